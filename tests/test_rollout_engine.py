"""The rollout function with the real router and a real engine."""

import json

import pytest
import torch

from slime.data.batch import samples_to_columns
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.on_policy_distillation import score_with_teacher
from slime.rollout.sglang_rollout import GenerateState, generate, generate_rollout
from slime.utils.async_utils import run
from slime.utils.http_utils import post
from slime.utils.types import Sample

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def args(tiny_engine, tiny_engine_args, tmp_path_factory):
    from slime.backends.sglang_utils.router import SGLangRouter

    # The engine is the session's: whatever weights another test gave it, these are the folder's.
    payload = {"model_path": tiny_engine_args.hf_checkpoint}
    run(post(f"{tiny_engine.url}/update_weights_from_disk", payload, timeout=120.0))
    folder = tmp_path_factory.mktemp("rollout")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "label": str(2 * i)}) + "\n" for i in range(12)))
    args = tiny_engine_args.replace(
        prompt_data=str(prompts),
        run_dir=str(folder),
        rm_type="math",
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        rollout_max_response_len=8,
        rollout_temperature=0.7,
        sglang_server_concurrency=16,
        progress="off",
    )
    router = SGLangRouter(args)
    GenerateState.clear_instances()
    try:
        router.start()
        with router.client() as client:
            client.add(tiny_engine.url)
        yield args.replace(sglang_router_ip="127.0.0.1", sglang_router_port=router.port)
    finally:
        GenerateState.clear_instances()
        router.stop()


def response_rows(args, sample):
    """log_softmax(logits / T) [R, V] at the response tokens, in float32, by the reference implementation."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.hf_checkpoint, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([sample.tokens])).logits[0] / args.rollout_temperature
    first = len(sample.tokens) - sample.response_length
    return logits[first - 1 : -1].log_softmax(-1)


def log_probs_by_transformers(args, sample):
    targets = torch.tensor(sample.tokens[len(sample.tokens) - sample.response_length :])
    return response_rows(args, sample).gather(1, targets[:, None])[:, 0].tolist()


def check(args, sample):
    n = sample.response_length
    assert 0 < n <= args.rollout_max_response_len and len(sample.rollout_log_probs) == n
    assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
    assert sum(span["end"] - span["start"] for span in sample.weight_versions) == n
    assert sample.rollout_log_probs == pytest.approx(log_probs_by_transformers(args, sample), abs=1e-4)


def test_a_rollout_has_the_models_log_probs(args):
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    samples = [s for group in output.samples for s in group]
    assert len(samples) == 4 and all(s.reward in (0.0, 1.0) for s in samples)
    for sample in samples:
        check(args, sample)
        assert sample.tokens[: -sample.response_length] == GenerateState(args).prompt_ids(sample)


def test_an_engine_as_teacher_scores_the_very_tokens(args, tiny_engine):
    """The student's own engine as its teacher: the scores are the log-probs that it sampled with."""
    taught = args.replace(
        rollout_temperature=1.0,
        opd_teacher_url=f"{tiny_engine.url}/generate",
        rollout_max_prompt_len=16,
        opd_kl_coef=0.5,
        distill_topk=3,
    )
    GenerateState.clear_instances()
    samples = [s for group in generate_rollout(taught, 0, RolloutDataSourceWithBuffer(taught)).samples for s in group]
    GenerateState.clear_instances()
    assert len(samples) == 4
    for sample in samples:
        assert sample.teacher_log_probs == pytest.approx(sample.rollout_log_probs, abs=1e-4)
        best = response_rows(taught, sample).topk(3, dim=1)
        torch.testing.assert_close(torch.tensor(sample.teacher_topk_log_probs), best.values, rtol=0, atol=1e-4)
        assert sample.teacher_topk_indices == best.indices.tolist()
    assert samples_to_columns(taught, samples)["teacher_topk_indices"][0].shape == (samples[0].response_length, 3)
    last = Sample(tokens=[5, 6, 330, 0, 7], response_length=3)  # SGLang reports the vocabulary's last id as 0
    run(score_with_teacher(taught, last, taught.opd_teacher_url))
    assert last.teacher_log_probs == pytest.approx(log_probs_by_transformers(taught, last), abs=1e-4)
    wrong = Sample(tokens=[5, 6, 7], response_length=0)
    run(score_with_teacher(taught, wrong, taught.opd_teacher_url))
    assert wrong.teacher_log_probs == wrong.teacher_topk_log_probs == wrong.teacher_topk_indices == []


async def long_from_group_2(args, sample, sampling_params):
    if sample.group_index >= 2:
        sampling_params |= {"max_new_tokens": 110, "ignore_eos": True}
    return await generate(args, sample, sampling_params)


def test_partial_rollout_goes_on_with_the_same_tokens(args):
    first = args.replace(
        partial_rollout=True, over_sampling_batch_size=4, custom_generate_function_path=f"{__name__}.long_from_group_2"
    )
    source = RolloutDataSourceWithBuffer(first)
    generate_rollout(first, 0, source)
    assert [g[0].group_index for g in source.buffer] == [2, 3]
    before = [(list(s.tokens), list(s.rollout_log_probs or [])) for g in source.buffer for s in g]
    assert any(log_probs for _, log_probs in before)

    second = args.replace(partial_rollout=True, rollout_max_response_len=115)
    output = generate_rollout(second, 1, source)
    samples = [s for group in output.samples for s in group]
    assert [s.group_index for s in samples] == [2, 2, 3, 3]
    for sample, (tokens, log_probs) in zip(samples, before, strict=True):
        assert sample.tokens[: len(tokens)] == tokens and sample.rollout_log_probs[: len(log_probs)] == log_probs
    check(second, samples[0])


def test_requests_that_the_engine_refuses_are_explained(args):
    from slime.rollout.base_types import RolloutError

    bad = args.replace(custom_generate_function_path=f"{__name__}.unknown_parameter")
    with pytest.raises(RolloutError, match=r"generating sample \d.*HTTP 4\d\d"):
        generate_rollout(bad, 0, RolloutDataSourceWithBuffer(bad))


async def unknown_parameter(args, sample, sampling_params):
    return await generate(args, sample, {**sampling_params, "temperature": -1.0})
