"""The trainer's own parts against plain references: norm, attention, rope, packing, log-prob pass, device adapter."""

import math

import numpy as np
import pytest
import torch
from megatron_runs import make_args, rollout, tiny_model
from ranks import run_ranks

from slime.backends.megatron_utils import data, device
from slime.backends.megatron_utils.model import check_layout
from slime.config.errors import ConfigError
from slime.config.hf_config import parse_hf_config

CONFIG = dict(
    model_type="llama", num_hidden_layers=6, hidden_size=48, num_attention_heads=6, num_key_value_heads=2,
    intermediate_size=52, vocab_size=331,
)  # fmt: skip


# -- norm and attention ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_forward_and_gradients(dtype):
    from slime.backends.megatron_utils.norm import RMSNorm

    class Config:
        params_dtype, sequence_parallel, use_cpu_initialization = dtype, True, True

    torch.manual_seed(0)
    norm = RMSNorm(Config, 7, eps=1e-3)
    assert norm.weight.sequence_parallel
    norm.weight.data = torch.rand(7).to(dtype) + 0.5
    x = torch.randn(5, 1, 3, 7).to(dtype).requires_grad_()
    grad = torch.randn(5, 1, 3, 7).to(dtype)
    norm(x).backward(grad)

    x64, w64 = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    y64 = x64 / (x64.square().mean(-1, keepdim=True) + 1e-3).sqrt() * w64
    y64.backward(grad.double())
    tolerance = dict(rtol=2e-5, atol=2e-6) if dtype is torch.float32 else dict(rtol=2e-2, atol=2e-2)
    for ours, plain in ((norm(x), y64), (x.grad, x64.grad), (norm.weight.grad, w64.grad)):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), plain.double(), **tolerance)


@pytest.mark.parametrize("window", [None, 3])
def test_packed_attention_is_attention_of_each_sequence(window):
    from slime.backends.megatron_utils.attention import PackedAttention

    class Config:
        attention_dropout, kv_channels, window_attn_skip_freq, softmax_type = 0.0, 5, None, "vanilla"
        window_size = (window - 1, 0) if window else None

    torch.manual_seed(0)
    lengths = [4, 1, 9, 2]
    query, key, value = (torch.randn(16, heads, 5, dtype=torch.float64, requires_grad=True) for heads in (6, 2, 2))
    _, _, packed = data.pack([torch.zeros(n, dtype=torch.long) for n in lengths])
    out = PackedAttention(Config, layer_number=1)(query, key, value, packed_seq_params=packed)

    at = torch.arange(16)
    sequence = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    seen = (sequence[:, None] == sequence) & (at[:, None] >= at) & (at[:, None] - at < (window or 16))
    scores = torch.einsum("ihd,jhd->hij", query, key.repeat_interleave(3, 1)) / math.sqrt(5)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    plain = torch.einsum("hij,jhd->ihd", weights, value.repeat_interleave(3, 1))
    torch.testing.assert_close(out, plain)
    grad = torch.randn_like(plain)
    for ours, ref in zip(*(torch.autograd.grad(o, (query, key, value), grad) for o in (out, plain)), strict=True):
        torch.testing.assert_close(ours, ref)


def test_packed_attention_refuses_what_it_would_ignore():
    from slime.backends.megatron_utils.attention import PackedAttention

    class Config:
        attention_dropout, kv_channels, window_size, window_attn_skip_freq = 0.0, 5, None, None
        softmax_type = "vanilla"

    x = torch.zeros(2, 1, 5)
    _, _, packed = data.pack([torch.zeros(2, dtype=torch.long)])
    with pytest.raises(ValueError, match="packed"):
        PackedAttention(Config, 1)(x, x, x)
    with pytest.raises(ValueError, match="mask"):
        PackedAttention(Config, 1)(x, x, x, attention_mask=torch.ones(2, 2), packed_seq_params=packed)
    Config.attention_dropout = 0.1
    with pytest.raises(ValueError, match="dropout"):
        PackedAttention(Config, 1)


# -- packing -----------------------------------------------------------------------------------------------------------


def test_pack_pads_with_a_sequence_of_its_own():
    tokens, positions, packed = data.pack([torch.tensor([7, 8, 9]), torch.tensor([5, 6])], multiple=4)
    assert tokens.tolist() == [[7, 8, 9, 5, 6, 0, 0, 0]]
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert packed.cu_seqlens_q.tolist() == [0, 3, 5, 8] and packed.max_seqlen_q == 3
    with pytest.raises(ValueError, match="empty"):
        data.pack([torch.tensor([], dtype=torch.long)])


def test_an_empty_micro_batch_is_a_masked_dummy_with_every_column():
    columns = data.to_device(rollout()) | {"sample_denominators": [3.0] * 8}
    batch = data.make_micro_batch(columns, []).batch
    assert batch.keys() == columns.keys() | {"unconcat_tokens"}
    assert batch["loss_masks"][0].sum() == 0 and batch["response_lengths"] == [1] and batch["total_lengths"] == [2]
    assert batch["rollout_log_probs"][0].shape == (1,) and batch["turn"] == ["word 0"]
    nothing = data.make_micro_batch({name: [] for name in columns}, []).batch
    assert nothing.keys() == batch.keys()


def test_micro_batches_keep_a_column_when_it_is_complete():
    columns = {"tokens": [torch.tensor([1, 2])] * 3, "total_lengths": [2] * 3}
    batches = data.MicroBatches(columns, [[0, 2], [1], []])
    batches.keep("log_probs", [0, 2], ["a", "c"])
    assert "log_probs" not in columns
    batches.keep("log_probs", [], ["dummy"])
    batches.keep("log_probs", [1], ["b"])
    assert columns["log_probs"] == ["a", "b", "c"]


def test_repack_joins_up_to_the_limit_and_loses_nothing():
    lengths = [3, 4, 5, 6, 20]
    assert data.repack(lengths, [[0], [1], [2, 3], [4]], 18) == [[0, 1, 2, 3], [4]]
    assert data.repack(lengths, [[0], [1]], None) == [[0], [1]]
    assert data.pad_count([[0], [1], [2]], 2) == [[0], [1], [2], []]


# -- model configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 3.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_rope_frequencies_are_those_of_transformers(scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from slime.backends.megatron_utils.rope import rope_frequencies

    raw = CONFIG | {"head_dim": 32, "rope_theta": 5e5, "rope_scaling": scaling, "max_position_embeddings": 512}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**{k: v for k, v in raw.items() if k != "model_type"})).inv_freq
    torch.testing.assert_close(rope_frequencies(parse_hf_config(raw)), theirs, rtol=1e-6, atol=0)


def test_rope_scaling_that_is_not_built_is_named():
    from slime.backends.megatron_utils.rope import rope_frequencies

    with pytest.raises(ConfigError, match="dynamic"):
        rope_frequencies(parse_hf_config(CONFIG | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}))


@pytest.mark.parametrize(
    ("config", "flags", "message"),
    [
        ({}, dict(tensor_model_parallel_size=4), "num_attention_heads 6"),
        ({"intermediate_size": 53}, dict(tensor_model_parallel_size=2), "intermediate_size 53"),
        (
            dict(model_type="qwen2_moe", num_experts=2, num_experts_per_tok=1, moe_intermediate_size=4,
                 shared_expert_intermediate_size=5),
            dict(tensor_model_parallel_size=2), "the 5 of the experts of all tokens",
        ),
        ({}, dict(pipeline_model_parallel_size=4), "6 layers"),
    ],
)  # fmt: skip
def test_impossible_layouts_are_named(config, flags, message):
    with pytest.raises(ConfigError, match=message):
        check_layout(make_args("", **flags), parse_hf_config(CONFIG | config))


@pytest.mark.parametrize(
    ("config", "message"), [({"attention_bias": True}, "output projections"), ({"hidden_act": "gelu"}, "gelu")]
)
def test_parts_that_are_not_built_are_named(config, message):
    from slime.backends.megatron_utils.variants import check_runnable

    with pytest.raises(ConfigError, match=message):
        check_runnable(make_args(""), parse_hf_config(CONFIG | config), te=False)


@pytest.mark.parametrize(("layers", "pp", "message"), [(1, 2, "at least 3"), (4, 3, "must divide")])
def test_impossible_virtual_stages_are_named(layers, pp, message):
    from slime.backends.megatron_utils.parallel import virtual_pipeline_size

    args = make_args("", num_layers_per_virtual_pipeline_stage=layers, pipeline_model_parallel_size=pp)
    with pytest.raises(ConfigError, match=message):
        virtual_pipeline_size(args, 6)


def test_learning_rate_is_never_zero_and_decays():
    from slime.backends.megatron_utils.model import build_scheduler

    class Optimizer:
        param_groups = [{"lr": 0.0, "weight_decay": 0.0}]

    def rates(steps, **flags):
        scheduler = build_scheduler(make_args("", lr=1.0, **flags), Optimizer, total_steps=steps)
        out = []
        for _ in range(steps):
            out.append(Optimizer.param_groups[0]["lr"])
            scheduler.step(increment=1)
        return out

    assert rates(3) == [1.0] * 3
    np.testing.assert_allclose(rates(5, lr_warmup_iters=3), [0.25, 0.5, 0.75, 1.0, 1.0])
    np.testing.assert_allclose(rates(5, lr_decay_style="linear", min_lr=0.5), [1.0, 0.9, 0.8, 0.7, 0.6])
    assert rates(2, lr_warmup_iters=4) == [0.2, 0.4]  # longer than the run, constant style: fine
    with pytest.raises(ConfigError, match="warm-up"):
        rates(2, lr_warmup_iters=4, lr_decay_style="cosine")


# -- the log-prob pass and the device adapter --------------------------------------------------------------------------


def _log_probs(rank, world, port, args):
    from slime.backends.megatron_utils import train_step
    from slime.backends.megatron_utils.actor import MegatronTrainActor

    actor = MegatronTrainActor(rank, world, "127.0.0.1", port)
    actor.init(args)
    columns = data.to_device(rollout())
    batches = data.MicroBatches(columns, [[0, 3, 5], [1], [], [2, 4, 6, 7]])
    out = train_step.compute_log_probs(args, actor.model, batches, 8, with_entropy=True)
    return {name: [x.numpy() for x in column] for name, column in out.items()}


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_log_prob_pass_against_transformers_in_float64(tmp_path, arch):
    import transformers

    folder = tiny_model(tmp_path / "model", arch)
    (ours,) = run_ranks(1, _log_probs, make_args(folder, use_kl_loss=False))
    eager = {"experts_implementation": "eager"} if "moe" in arch else {}  # the other one has no float64
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **eager)
    columns = rollout()
    for i, (tokens, response) in enumerate(zip(columns["tokens"], columns["response_lengths"], strict=True)):
        ids = torch.tensor(tokens)
        with torch.no_grad():
            logits = model(ids[None]).logits[0] / 0.8
        plain = logits.log_softmax(-1)[len(ids) - response - 1 : len(ids) - 1]
        expected = plain.gather(1, ids[len(ids) - response :, None]).squeeze(1)
        np.testing.assert_allclose(ours["log_probs"][i], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(ours["entropy"][i], -(plain.exp() * plain).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the adapter does nothing with CUDA")
def test_only_megatron_sees_another_torch():
    import megatron.core.optimizer.clip_grads as megatron_module

    device.adapt_megatron()  # again: changes nothing
    assert megatron_module.torch is not torch
    assert megatron_module.torch.zeros(1, device="cuda").device.type == "cpu"
    assert megatron_module.torch.cuda.current_device() == torch.device("cpu")
    x = torch.zeros(1)
    assert x.type() == "torch.FloatTensor"
    assert eval("x.type()", {"__name__": "megatron.core.any", "x": x}) == "torch.cuda.FloatTensor"
    assert eval("x.cuda()", {"__name__": "megatron.core.any", "x": x}) is x
    with pytest.raises((AssertionError, RuntimeError)):
        x.cuda()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_device_flag_must_fit_the_machine():
    assert device.is_cpu(make_args("")) == (not torch.cuda.is_available())
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            device.is_cpu(make_args("", device="cuda"))
    assert device.threads_per_rank(10_000) == 1


def test_head_pads_the_vocabulary_with_impossible_logits():
    from slime.backends.megatron_utils.head import full_logits

    class Group:
        def __init__(self, rank):
            self._rank = rank

        def rank(self):
            return self._rank

    class Model:
        class output_layer:
            vocab_size, tp_group = 5, None

    logits = torch.ones(1, 2, 3, dtype=torch.bfloat16)
    for rank, absent in ((0, 0), (1, 1)):
        Model.output_layer.tp_group = Group(rank)
        out = full_logits(logits, Model, temperature=0.5)
        assert out.dtype == torch.float32 and (out[..., : 3 - absent] == 2.0).all()
        assert (out[..., 3 - absent :].exp() == 0.0).all()


def test_buckets_keep_together_what_an_engine_loads_as_one():
    """SGLang joins q_a_proj and kv_a_proj_with_mqa only when both come in one call, and drops them otherwise."""
    from slime.backends.megatron_utils.update_weight.bucket import make_buckets
    from slime.models.rows import Pieces

    names = ["q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    weights = [
        (f"model.layers.{layer}.self_attn.{name}.weight", Pieces((torch.ones(10, 10),), 0, None))
        for layer in range(2)
        for name in names
    ]
    for max_bytes in (1, 400, 1000, 10_000):
        buckets = list(make_buckets(weights, max_bytes))
        assert [name for bucket in buckets for name in bucket.names] == [name for name, _ in weights]
        for bucket in buckets:
            ends = [sum(name.endswith(f".{half}.weight") for name in bucket.names) for half in (names[0], names[3])]
            assert ends[0] == ends[1]
        assert len(buckets) == {1: 6, 400: 6, 1000: 4, 10_000: 1}[max_bytes]
    plain = [(name.replace("q_a_proj", "q_proj"), pieces) for name, pieces in weights]
    assert len(list(make_buckets(plain, 400))) == 12
