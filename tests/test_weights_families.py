"""Each model family runs in Megatron: logits as transformers', and the same folder back, byte by byte."""

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_weights_megatron import TOKENS, assert_same_tensors, build, make_args, model_folder

from slime.config.errors import ConfigError
from slime.config.hf_config import parse_hf_config

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
NEW = ("qwen2_moe", "mixtral", "glm4", "glm4_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "qwen3_moe")


def logits_and_folder(rank, world, port, cases):
    from megatron.core.parallel_state import destroy_model_parallel

    from slime.backends.megatron_utils.convert.verify import logits_of
    from slime.models import save_hf

    out = []
    for args, target in cases:
        (model,), hf = build(args, rank, world, port)
        save_hf([model], target, hf, args)
        out.append(logits_of(model, [torch.tensor(t) for t in TOKENS]).numpy())
        destroy_model_parallel()
    return out


def reference_logits(folder):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return torch.cat([reference(torch.tensor([tokens])).logits[0] for tokens in TOKENS])


def folders(tmp_path, families):
    """Small models whose norms differ: with ones in all of them it would not show which is which."""
    found = [model_folder(tmp_path / family, family, False, num_layers=3, num_experts=4) for family in families]
    generator = torch.Generator().manual_seed(0)
    for file in (folder / "model.safetensors" for folder in found):
        tensors = load_file(file)
        for name in sorted(name for name in tensors if "norm" in name):
            tensors[name] *= 1 + 0.3 * torch.randn(tensors[name].shape, generator=generator)
        save_file(tensors, file, metadata={"format": "pt"})
    return found


def check(cases, shards):
    for (args, target), *parts in zip(cases, *shards, strict=True):
        assert_same_tensors(args.hf_checkpoint, target)
        ours, theirs = torch.cat([torch.from_numpy(p) for p in parts], dim=-1), reference_logits(args.hf_checkpoint)
        ours = ours[:, : theirs.shape[1]]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item(), msg=args.hf_checkpoint)


def test_every_family_in_one_process(tmp_path):
    cases = [(make_args(f, 1, 1, 1), f"{f}-out") for f in folders(tmp_path, NEW)]
    check(cases, run_ranks(1, logits_and_folder, cases))


def test_every_family_over_two_ranks(tmp_path):
    """Tensor parallel, and experts over two ranks in half of them."""
    cases = []
    for i, folder in enumerate(folders(tmp_path, NEW)):
        ep = 1 + (i % 2 and not folder.name.startswith("glm4"))
        etp = 1 if ep == 2 or folder.name == "gpt_oss" else 2
        changes = dict(expert_model_parallel_size=ep, expert_tensor_parallel_size=etp, sequence_parallel=True)
        cases.append((make_args(folder, 2, 2, 1, make_vocab_size_divisible_by=8, **changes), f"{folder}-out"))
    check(cases, run_ranks(2, logits_and_folder, cases))


def bf16_router_bias(rank, world, port, args):
    from slime.backends.megatron_utils.model import wrap_model

    chunks, _ = build(args, rank, world, port)
    before = chunks[0].decoder.layers[1].mlp.router.expert_bias.clone()
    wrap_model(args, chunks)
    after = chunks[0].decoder.layers[1].mlp.router.expert_bias
    return before.dtype, after.dtype, torch.equal(before, after), bool(before.any())


def test_the_bias_that_chooses_experts_is_not_rounded(tmp_path):
    (folder,) = folders(tmp_path, ["deepseek_v3"])
    args = make_args(folder, 1, 1, 1, params_dtype="bfloat16")
    assert run_ranks(1, bf16_router_bias, args)[0] == (torch.float32, torch.float32, True, True)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "deepseek_v2",
            dict(n_group=2, topk_group=1, topk_method="group_limited_greedy"),
            "group_limited_greedy ranks",
        ),
        ("deepseek_v3", dict(norm_topk_prob=False), "norm_topk_prob must be true"),
        ("deepseek_v3", dict(n_group=2, topk_group=2), "ranks groups by two experts only"),
        ("deepseek_v3", dict(rope_interleave=False), "rope_interleave false is not supported"),
        ("llama", dict(attention_bias=True), "biases on output projections: not supported"),
        ("deepseek_v3", dict(rope_scaling=dict(YARN, mscale=0.7)), "one of mscale and mscale_all_dim only"),
        ("deepseek_v3", dict(rope_scaling=dict(YARN, attention_factor=1.3)), "attention_factor or truncate false"),
        ("deepseek_v3", dict(rope_scaling=dict(YARN, truncate=False)), "attention_factor or truncate false"),
        ("mixtral", dict(num_experts_per_tok=1), "every weight is 1"),
        ("qwen3_moe", dict(num_experts_per_tok=1, norm_topk_prob=True), "every weight is 1"),
        ("gpt_oss", dict(attention_bias=False), "attention_bias false is not supported"),
        ("gpt_oss", dict(swiglu_alpha=1.5), "swiglu_alpha 1.5 is not supported"),
    ],
)
def test_what_cannot_run_is_named_and_still_declared(family, changes, message):
    from test_weights_algebra import config

    from slime.backends.megatron_utils.variants import check_runnable
    from slime.config import Args
    from slime.models import model_table

    hf = config(family, **changes)
    with pytest.raises(ConfigError, match=message):
        check_runnable(Args(), hf, te=False)
    assert model_table(hf).hf_shapes()


@pytest.mark.parametrize(
    "scaling",
    [
        dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
             original_max_position_embeddings=8192),
        dict(rope_type="linear", factor=4.0),
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096),
        dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
             original_max_position_embeddings=4096),
    ],
    ids=["llama3", "linear", "yarn", "gpt_oss"],
)  # fmt: skip
def test_rope_scalings_are_those_of_transformers(scaling):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from slime.backends.megatron_utils.rope import attention_factor, rope_frequencies

    sizes = dict(hidden_size=256, num_attention_heads=2, max_position_embeddings=131072)
    reference = LlamaConfig(**sizes, rope_parameters={**scaling, "rope_theta": 500000.0})
    want, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](reference, "cpu")
    raw = dict(model_type="llama", num_hidden_layers=1, intermediate_size=8, vocab_size=8, rope_theta=5e5, **sizes)
    hf = parse_hf_config({**raw, "rope_scaling": scaling})
    torch.testing.assert_close(rope_frequencies(hf), want, rtol=1e-6, atol=0)
    assert attention_factor(hf) == pytest.approx(factor)


@pytest.mark.parametrize("family", ["mistral", "mixtral", "qwen2_moe", "qwen3_moe", "glm4", "glm4_moe", "gpt_oss"])
def test_a_key_that_config_json_leaves_out_is_what_transformers_takes(family):
    """Those that no weight's shape would contradict."""
    from transformers import AutoConfig

    whole = {**AutoConfig.for_model(family, head_dim=64).to_dict(), "model_type": family}
    left_out = ("rms_norm_eps", "sliding_window", "norm_topk_prob", "tie_word_embeddings")
    full, short = (parse_hf_config(raw) for raw in (whole, {k: v for k, v in whole.items() if k not in left_out}))
    for name in ("rms_norm_eps", "sliding_window", "windowed_layers", "norm_topk_prob", "tie_word_embeddings"):
        assert getattr(short, name) == getattr(full, name), name


def test_qwen3_moe_has_its_window_in_all_layers():
    from test_weights_algebra import config

    window = dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)
    hf = config("qwen3_moe", **window)
    assert hf.sliding_window == 6 and hf.windowed_layers == set(range(hf.num_layers))
