"""Loss masks of conversations, and the rollout function of fine-tuning."""

import json

import pytest

from slime.config import Args, ConfigError
from slime.rollout.base_types import RolloutError
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.sft_rollout import SFTEncoder, generate_rollout
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

# Other ways to render: a turn end without special meaning to us, text stripped, no generation prompt, and one that
# shows a turn's thinking only while no user turn follows.
LLAMA3 = (
    "<|bos|>{% for m in messages %}<|im_start|>{{ m['role'] }}<|pad|>\n\n{{ m['content'] | trim }}<|im_end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|pad|>\n\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)
NO_PROMPT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
FORGETFUL = (
    "{% set last = messages | map(attribute='role') | list %}"
    "{% for m in messages %}{{ m['role'] }} {% if 'user' in last[loop.index:] %}short{% else %}{{ m['content'] }}"
    "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
TURNS = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "12+34="},
    {"role": "assistant", "content": "46"},
]


@pytest.fixture(scope="session")
def tokenizer(tiny_model):
    return load_tokenizer(str(tiny_model))


def with_template(tiny_model, template):
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = template
    return tokenizer


def test_every_assistant_turn_is_trained_with_its_end(tokenizer):
    masks = MultiTurnLossMaskGenerator(tokenizer, tokenizer_type="qwen")
    ids, mask = masks.get_loss_mask(TURNS)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert ids == tokenizer.apply_chat_template(TURNS, tokenize=True, return_dict=True)["input_ids"]
    assert masks.get_text_from_loss_mask(ids, mask) == ["2<|im_end|>", "46<|im_end|>"]
    assert sum(mask) == 2 + 3 and mask[-1] == 0  # the template's last line break is not trained
    assert masks.get_response_lengths([mask, [0, 0]]) == [len(mask) - mask.index(1), 0]


@pytest.mark.parametrize(
    "template, trained",
    [
        (LLAMA3, ["2<|im_end|>", "46<|im_end|>"]),
        (MISTRAL, [" 2<|im_end|>", " 46<|im_end|>"]),
        (NO_PROMPT, ["2<|im_end|>", "46<|im_end|>"]),
    ],
)
def test_other_templates(tiny_model, template, trained):
    tokenizer = with_template(tiny_model, template)
    masks = MultiTurnLossMaskGenerator(tokenizer)
    ids, mask = masks.get_loss_mask(TURNS[1:])
    got = masks.get_text_from_loss_mask(ids, mask)
    if template is MISTRAL:  # its header " " is excluded where there is no generation prompt
        trained = [t.lstrip() for t in trained]
    assert got == trained
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(TURNS[1:], tokenize=False)


def test_tokens_are_those_that_generation_sees(tokenizer):
    """An answer that begins with a line break is not joined with the line break that ends the prompt."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\n\nuser"}]
    ids, mask = MultiTurnLossMaskGenerator(tokenizer).get_loss_mask(messages)
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer.encode(prompt)
    assert ids[: len(prompt_ids)] == prompt_ids and mask.index(1) == len(prompt_ids)


def test_step_loss_mask_makes_a_turn_context(tokenizer):
    masks = MultiTurnLossMaskGenerator(tokenizer)
    messages = [dict(m) for m in TURNS]
    messages[2]["step_loss_mask"] = 0
    ids, mask = masks.get_loss_mask(messages)
    assert masks.get_text_from_loss_mask(ids, mask) == ["46<|im_end|>"]
    messages[4]["step_loss_mask"] = 0
    with pytest.raises(ValueError, match="no assistant message to train on"):
        masks.get_loss_mask(messages)


def test_what_cannot_be_masked_rightly_is_refused(tokenizer, tiny_model):
    with pytest.raises(ValueError, match="one row per assistant turn"):
        MultiTurnLossMaskGenerator(with_template(tiny_model, FORGETFUL)).get_loss_mask(TURNS)
    with pytest.raises(ValueError, match="ends a turn"):
        turns = [TURNS[1], {"role": "assistant", "content": "2<|im_end|> more"}]
        MultiTurnLossMaskGenerator(tokenizer).get_loss_mask(turns)
    with pytest.raises(ValueError, match="no chat template"):
        MultiTurnLossMaskGenerator(with_template(tiny_model, None))


# -- rows to samples -------------------------------------------------------------------------------------------------


def trained_text(tokenizer, sample):
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return tokenizer.decode([t for t, m in zip(response, sample.loss_mask, strict=True) if m])


def test_prompt_and_label_in_three_spellings_give_the_same_sample(tokenizer):
    chat = TURNS[1:2]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    encoder = SFTEncoder(tokenizer)
    conversation = encoder.encode(Sample(prompt=TURNS[1:3]))
    messages = encoder.encode(Sample(prompt=chat, label="2"))
    text = encoder.encode(Sample(prompt=rendered, label=2), rendered=True)
    assert trained_text(tokenizer, text) == "2<|im_end|>"
    for sample in (conversation, messages):
        # The conversation also has the template's last line break, which is not trained.
        assert sample.tokens[:-1] == text.tokens and sample.loss_mask == [1, 1, 0]
        assert trained_text(tokenizer, sample) == "2<|im_end|>"
        assert sample.status is Sample.Status.COMPLETED and sample.reward is None


def test_a_label_answers_a_conversation_that_is_context(tokenizer):
    sample = SFTEncoder(tokenizer).encode(Sample(prompt=TURNS[:4], label="46"))
    assert trained_text(tokenizer, sample) == "46<|im_end|>"


def test_rows_without_answer_or_prompt_are_refused(tokenizer):
    for row in (Sample(prompt="1+1="), Sample(prompt=TURNS[1:2], label="")):
        with pytest.raises(ValueError, match="--label-key"):
            SFTEncoder(tokenizer).encode(row)
    with pytest.raises(ValueError, match="nothing comes before"):
        SFTEncoder(tokenizer).encode(Sample(prompt="", label="2"))


def sft_args(tiny_model, path, **flags):
    return Args(
        hf_checkpoint=str(tiny_model), prompt_data=str(path), input_key="messages", rollout_batch_size=4,
        n_samples_per_prompt=1, loss_type="sft_loss",
        rollout_function_path="slime.rollout.sft_rollout.generate_rollout", **flags,
    )  # fmt: skip


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "sft.jsonl"
    turns = [[*TURNS[1:2], {"role": "assistant", "content": "2" * n}] for n in (1, 2, 40, 3, 4, 5)]
    path.write_text("".join(json.dumps({"messages": t}) + "\n" for t in turns))
    return path


def test_rollout_function(tiny_model, rows):
    args = sft_args(tiny_model, rows)
    source = RolloutDataSource(args)
    output = generate_rollout(args, 0, source)
    assert [[s.index for s in group] for group in output.samples] == [[0], [1], [2], [3]]
    assert [sum(g[0].loss_mask) for g in output.samples] == [2, 3, 41, 4]
    assert source.accounting()["trained"] == 4 and source.accounting()["in_flight"] == 0


def test_rows_that_are_too_long_are_counted_and_replaced(tiny_model, rows):
    args = sft_args(tiny_model, rows, rollout_max_context_len=30)
    source = RolloutDataSource(args)
    output = generate_rollout(args, 0, source)
    assert [g[0].index for g in output.samples] == [0, 1, 3, 4] and output.metrics["rollout/overlong_rows"] == 1
    counts = source.accounting()
    assert counts["drawn"] == 5 == counts["trained"] + counts["filtered"]
    with pytest.raises(RolloutError, match="sample 2 has .* tokens, over --rollout-max-context-len 30"):
        args = args.replace(overlong_prompt="error")
        generate_rollout(args, 0, RolloutDataSource(args))
    with pytest.raises(RolloutError, match="a whole epoch"):
        args = args.replace(overlong_prompt="skip", rollout_max_context_len=5)
        generate_rollout(args, 0, RolloutDataSource(args))


def test_rollout_function_says_what_it_cannot(tiny_model, rows, tmp_path):
    args = sft_args(tiny_model, rows)
    with pytest.raises(ConfigError, match="--eval-interval"):
        generate_rollout(args, 0, None, evaluation=True)
    with pytest.raises(ConfigError, match="--n-samples-per-prompt 8"):
        generate_rollout(args.replace(n_samples_per_prompt=8), 0, None)
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"messages": TURNS[:2]}) + "\n")
    with pytest.raises(RolloutError, match="sample 0 cannot be made a training row: .*--label-key"):
        args = sft_args(tiny_model, bad)
        generate_rollout(args, 0, RolloutDataSource(args))
