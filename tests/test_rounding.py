"""Where a bf16 trainer rounds: each region against worked numbers and float64, switched in a model, in any layout."""

import itertools
import json
import math

import pytest
import torch
from megatron_runs import make_args, rank_data, rollout, tiny_model
from ranks import run_ranks

from slime.backends.megatron_utils import device
from slime.config import load_args
from slime.config.errors import ConfigError
from slime.config.rounding import REGIONS, rounding_regions
from slime.observability.rounding import format_probe, take_probe

device.adapt_megatron()

ALL = frozenset(REGIONS)


def bf16(*values):
    return torch.tensor(values).bfloat16()


def equal(ours, *values):
    torch.testing.assert_close(ours.detach().float(), torch.tensor(values), rtol=0, atol=1e-6)


class Config:
    params_dtype, sequence_parallel, use_cpu_initialization = torch.bfloat16, False, True


# -- worked numbers ----------------------------------------------------------------------------------------------------


def test_rope_at_position_1000():
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    x = bf16(1.2345, -0.777, 0.3333, 2.125)
    angles = 1000 * 10000.0 ** -(torch.arange(0, 4, 2) / 4)
    angles = torch.cat([angles, angles])
    equal(_apply_rotary_pos_emb_bshd(x.float(), angles).bfloat16(), 0.417969, 1.804688, 1.210938, -1.359375)
    equal(_apply_rotary_pos_emb_bshd(x, angles), 0.417969, 1.8125, 1.210938, -1.359375)


def test_swiglu():
    from slime.backends.megatron_utils.rounding import SwiGLU

    x = torch.cat([bf16(0.5, 1.0, 3.0, -0.25), bf16(1.5, 1.25, 1.1, 2.5)])
    part = SwiGLU(None)
    equal(part(x), 0.464844, 0.914062, 3.15625, -0.273438)
    part.one_round = True
    equal(part(x), 0.466797, 0.914062, 3.140625, -0.273438)


def test_add_and_norm():
    from slime.backends.megatron_utils.norm import RMSNorm
    from slime.backends.megatron_utils.rounding import ResidualAdd

    x, residual = bf16(0.013, -0.4, 0.25, 0.9), bf16(3.1, -0.06, 12.7, -0.333)
    norm, part = RMSNorm(Config, 4, eps=1e-6), ResidualAdd()
    norm.weight.data = bf16(1.1, 0.93, 1.02, 0.5)
    stream = 3.109375, -0.460938, 12.9375, 0.566406
    separate = part(True, False)((x, None), residual, 0.0)
    assert separate.dtype == torch.bfloat16
    equal(separate, *stream)
    equal(norm(separate), 0.515625, -0.064453, 1.984375, 0.04248)
    part.one_round = True
    h = part(True, False)((x, None), residual, 0.0)
    assert h.dtype == torch.float32 and norm(h).dtype == torch.bfloat16
    equal(h.bfloat16(), *stream)
    equal(norm(h), 0.511719, -0.064453, 1.984375, 0.04248)
    # The next sum takes the rounded stream.
    equal(part(True, False)((torch.zeros_like(x), None), h, 0.0), *stream)
    with pytest.raises(ValueError, match="bias"):
        part(True, False)((x, x), residual, 0.0)


def test_gap_between_log_probs():
    from slime.backends.megatron_utils.metrics import gap_between

    def gap(d):
        engine = [-0.1, -2.3, -0.7, -4.6]
        trainer = torch.tensor([e + x for e, x in zip(engine, d, strict=True)], dtype=torch.float64)
        masks = [torch.ones(4), torch.zeros(4)]
        engine = torch.tensor(engine, dtype=torch.float64)
        return _alone(gap_between, [engine, engine * math.nan], [trainer, trainer], masks)

    found = gap([-0.005, -0.01, 0.007, -0.4])
    want = dict(k1=0.102, k2=0.020022, k3=0.017602, max=0.4, share_over=0.25, mean_abs=0.1055, tokens=4)
    assert found.as_dict() == pytest.approx(want, abs=1e-6)
    far = gap([-1e4, 0.0, 0.0, 0.0])  # exp() of it is nothing, and its square would drown the others
    assert far.k3 == pytest.approx(19 / 4) and far.k2 == pytest.approx(50) and far.max == 1e4


def _alone(fn, *args):
    """Calls fn with data-parallel sums that are of this process alone."""
    from slime.backends.megatron_utils import train_step

    plain = train_step.sum_over_data_ranks, train_step.max_over_data_ranks
    train_step.sum_over_data_ranks = train_step.max_over_data_ranks = lambda value: value
    try:
        return fn(*args)
    finally:
        train_step.sum_over_data_ranks, train_step.max_over_data_ranks = plain


# -- float64 oracles and gradients -------------------------------------------------------------------------------------


def test_swiglu_is_float64_rounded_once_with_its_gradient():
    from slime.backends.megatron_utils.rounding import SwiGLU

    torch.manual_seed(0)
    part = SwiGLU(None)
    part.one_round = True
    x = torch.randn(500, 34).bfloat16().requires_grad_()
    grad = torch.randn(500, 17).bfloat16()
    part(x).backward(grad)
    x64 = x.detach().double().requires_grad_()
    gate, up = x64.chunk(2, -1)
    y64 = torch.nn.functional.silu(gate) * up
    y64.backward(grad.double())
    _one_ulp(part(x), y64)
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=2e-2, atol=1e-6)
    stepwise = (torch.nn.functional.silu(x.detach().chunk(2, -1)[0]) * x.detach().chunk(2, -1)[1]) != part(x)
    assert 0.2 < stepwise.float().mean() < 0.35  # worked share: 0.274


def test_add_and_norm_are_float64_rounded_once_with_their_gradients():
    from slime.backends.megatron_utils.norm import RMSNorm
    from slime.backends.megatron_utils.rounding import ResidualAdd

    torch.manual_seed(0)
    norm, part = RMSNorm(Config, 64), ResidualAdd()
    norm.weight.data = (1 + 0.2 * torch.randn(64)).bfloat16()
    x, residual = (s * torch.randn(300, 64) for s in (1, 5))
    x, residual = x.bfloat16().requires_grad_(), residual.bfloat16().requires_grad_()
    grads = torch.randn(300, 64).bfloat16(), torch.randn(300, 64).bfloat16()

    def run(one_round):
        part.one_round = one_round
        h = part(True, False)((x, None), residual, 0.0)
        y, after = norm(h), part(True, False)((torch.zeros_like(x), None), h, 0.0)
        found = torch.autograd.grad((y, after), (x, residual, norm.weight), (grads[0], grads[1].to(after.dtype)))
        return y, found

    y, found = run(True)
    x64, r64, w64 = (t.detach().double().requires_grad_() for t in (x, residual, norm.weight))
    h64 = x64 + r64
    y64 = h64 / (h64.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w64
    _one_ulp(y, y64)
    plain = torch.autograd.grad((y64, h64), (x64, r64, w64), tuple(g.double() for g in grads))
    for ours, ref in zip(found, plain, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), ref, rtol=2e-2, atol=2e-2)
    assert 0.15 < (run(False)[0] != y).float().mean() < 0.35  # worked share: 0.243


def _one_ulp(ours, float64):
    """Equal to float64 rounded to bf16, but for ties that float32 arithmetic decides: then the neighbour."""
    want = float64.detach().bfloat16()
    different = ours != want
    assert different.float().mean() < 1e-3
    torch.testing.assert_close(ours.detach().double(), float64.detach(), rtol=2**-7, atol=1e-30)


# -- in a model --------------------------------------------------------------------------------------------------------


def _passes(rank, world, port, args, subsets, train_too):
    """Log-probs of the rank's samples, by number, per subset of regions, and the metrics of training with the last."""
    from slime.backends.megatron_utils.actor import MegatronTrainActor
    from slime.backends.megatron_utils.parallel import destroy_parallel
    from slime.backends.megatron_utils.rounding import set_regions

    actor = MegatronTrainActor(rank, world, "127.0.0.1", port)
    info = actor.init(args)
    mine = rank_data(args, rollout(), info.dp_size)[info.dp_rank]
    columns, plans = actor._columns(mine)
    plan = actor._log_prob_plan(columns, plans)
    out = []
    for regions in subsets:
        if regions is not None:
            set_regions(actor.model, regions)
        found = actor._log_probs(columns, plan, "")
        if found:
            out.append(dict(zip(mine.samples, [x.numpy() for x in found["log_probs"]], strict=True)))
    metrics = actor.train(0, mine) if train_too else None
    destroy_parallel()
    return out, metrics if info.is_metrics_rank else None


def passes(world, args, subsets, train_too=True):
    """The same of the whole rollout."""
    results = run_ranks(world, _passes, args, subsets, train_too)
    joined = [{} for _ in subsets]
    for found, _ in results:
        for into, more in zip(joined, found, strict=False):
            into |= more
    return joined, next((m for _, m in results if m is not None), None)


def distance(one, other):
    return max(float(abs(one[i] - other[i]).max()) for i in one if len(one[i]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("rounding") / "qwen3")


def args_of(folder, **changes):
    return make_args(folder, params_dtype="bfloat16", **changes)


SUBSETS = [frozenset(s) for n in range(4) for s in itertools.combinations(REGIONS, n)]


@pytest.fixture(scope="module")
def alone(folder):
    return passes(1, args_of(folder, rounding_profile="sglang"), SUBSETS)


def test_regions_off_are_bitwise_the_trainer_without_them(folder, alone):
    plain, metrics = passes(1, args_of(folder), [None])
    assert distance(plain[0], alone[0][0]) == 0.0
    assert all(distance(alone[0][i], alone[0][j]) > 0 for i, j in itertools.combinations(range(8), 2))
    # All regions on: other roundings of the same numbers.
    assert distance(plain[0], alone[0][-1]) < 0.1
    assert metrics["train/grad_norm"] == pytest.approx(alone[1]["train/grad_norm"], rel=2e-2)


LAYOUTS = {
    "pp2": (2, dict(pipeline_model_parallel_size=2)),
    "tp2-sp": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "cp2-contiguous": (2, dict(context_parallel_size=2, allgather_cp=True)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_round_at_the_same_places(folder, alone, layout):
    world, changes = LAYOUTS[layout]
    found, metrics = passes(world, args_of(folder, rounding_profile="sglang", **changes), [SUBSETS[0], ALL])
    for ours, of_one in zip(found, (alone[0][0], alone[0][-1]), strict=True):
        # Tensor and context parallelism add up in another order, before a rounding; pipeline stages change nothing.
        assert distance(ours, of_one) <= (1e-5 if layout == "pp2" else 0.15)
    assert distance(found[0], found[1]) > 1e-3
    assert metrics["train/grad_norm"] == pytest.approx(alone[1]["train/grad_norm"], rel=2e-2)


def test_experts_have_the_regions_too(tmp_path):
    folder = tiny_model(tmp_path / "moe", arch="qwen3_moe")
    plain, _ = passes(1, args_of(folder), [None], False)
    found, _ = passes(1, args_of(folder, rounding_profile="sglang"), [SUBSETS[0], frozenset({"swiglu"})], False)
    assert distance(plain[0], found[0]) == 0.0 < distance(plain[0], found[1])  # a token may go to another expert


def test_transformer_engines_layers_are_taken_apart(folder):
    """Not run here, as it needs CUDA: which of its modules the layers would be built of."""
    from types import SimpleNamespace

    from megatron.core.extensions import transformer_engine as te

    from slime.backends.megatron_utils.norm import RMSNorm
    from slime.backends.megatron_utils.rounding import FusedRopeSelfAttention, ResidualAdd, SwiGLU
    from slime.backends.megatron_utils.spec import layer_parts, our_layer_spec

    config = SimpleNamespace(
        multi_latent_attention=False, qk_layernorm=True, use_te_activation_func=True, moe_grouped_gemm=True
    )
    layer = our_layer_spec(config, layer_parts(args_of(folder, rounding_probe=True), te=True)).submodules
    assert layer.input_layernorm is layer.pre_mlp_layernorm is RMSNorm
    assert layer.self_attn_bda is layer.mlp_bda is ResidualAdd
    attention, mlp = layer.self_attention, layer.mlp.submodules
    assert attention.module is FusedRopeSelfAttention
    assert attention.submodules.core_attention is te.TEDotProductAttention
    assert attention.submodules.linear_qkv is mlp.linear_fc1 is te.TEColumnParallelLinear
    assert mlp.activation_func is SwiGLU
    attention = object.__new__(FusedRopeSelfAttention)
    attention.__dict__["config"] = config
    attention.one_round = True
    assert config.apply_rope_fusion and attention.one_round


def test_checkpoints_are_those_of_the_trainer_without_regions(folder, tmp_path):
    from megatron_runs import train

    args = args_of(folder, save=str(tmp_path / "ck"), rounding_profile="sglang", num_rollout=1)
    _, _, weights, _ = train(1, args, [rollout()])
    _, _, loaded, _ = train(1, args_of(folder, load=str(tmp_path / "ck"), finetune=True), [])
    assert weights.keys() == loaded.keys() and all((weights[n] == loaded[n]).all() for n in weights)


# -- the probe ---------------------------------------------------------------------------------------------------------


def test_probe_finds_the_engines_rounding_and_changes_nothing(folder, alone, tmp_path):
    """The "engine" rounds once in norm only, as SGLang does on CPUs: that subset's k3 is exactly 0."""
    from megatron_runs import train

    columns = rollout()
    engine = alone[0][SUBSETS.index(frozenset({"norm"}))]
    columns["rollout_log_probs"] = [engine[i] for i in range(len(columns["tokens"]))]
    for world, layout in ((1, {}), (2, dict(pipeline_model_parallel_size=2))):
        args = args_of(folder, rounding_probe=True, **layout)
        _, [first, *later], weights, _ = train(world, args, [columns] * (2 if world == 1 else 1))
        probe = take_probe(first, 0)
        assert all(take_probe(metrics, 1) is None for metrics in later)  # once
        assert "perf/rounding_probe_time" in first and not any(name.startswith("rounding") for name in first)
        by_name = {"+".join(row["regions"]): row for row in probe["rows"]}
        assert len(by_name) == 8 and probe["lowest"] == ["norm"] and probe["training"] == []
        assert by_name["norm"]["k3"] < 1e-12 and by_name["norm"]["max"] < 1e-5
        others = [row for name, row in by_name.items() if name != "norm"]
        assert all(row["k3"] > 1e-8 and row["max"] >= row["mean_abs"] > 0 for row in others)
        assert probe["tokens"] == sum(int(mask.sum()) for mask in columns["loss_masks"])
        if world == 1:
            _, [plain, _], without, _ = train(world, args_of(folder, **layout), [columns, columns])
            assert all((weights[name] == without[name]).all() for name in without)
            assert plain["train/logprob_gap_k3"] == pytest.approx(by_name[""]["k3"], rel=1e-6)
    text = format_probe(probe)
    assert "--rounding-profile sglang --rounding-regions norm" in text and len(text.splitlines()) == 11
    json.dumps(probe)


# -- flags -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rounding-profile", "sglang", "--rounding-regions", "rope,silu"], "no region 'silu'; known: rope, swiglu"),
        (["--rounding-profile", "sglang", "--rounding-regions", " , "], "names no region"),
        (["--rounding-regions", "rope"], "has no effect without --rounding-profile"),
        (["--rounding-profile", "vllm"], "invalid choice"),
        (["--rounding-profile", "sglang", "--params-dtype", "float32"], "no effect with --params-dtype float32"),
        (["--rounding-probe", "--params-dtype", "float16"], "no effect with --params-dtype float16"),
        (["--rounding-probe", "--debug-rollout-only"], "--debug-rollout-only starts none"),
        (["--rounding-profile", "sglang", "--custom-model-provider-path", "a.b"], "a model of your own"),
    ],
)
def test_flags_that_could_not_work_are_one_line(folder, flags, message):
    run = ["--device", "cpu", "--hf-checkpoint", folder, "--rm-type", "exact", "--dry-run"]
    with pytest.raises(ConfigError) as error:
        load_args([*run, "--rollout-max-response-len", "8", *flags])
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1


def test_models_with_other_parts_are_refused(tmp_path):
    folder = tiny_model(tmp_path / "m", arch="glm4")
    with pytest.raises(ConfigError, match="glm4 has norms between"):
        load_args(["--hf-checkpoint", folder, "--rm-type", "exact", "--dry-run", "--rounding-profile", "sglang"])


def test_regions_of_flags(folder):
    assert rounding_regions(make_args(folder)) == frozenset()
    assert rounding_regions(make_args(folder, rounding_profile="sglang")) == ALL
    some = make_args(folder, rounding_profile="sglang", rounding_regions="norm, rope")
    assert rounding_regions(some) == {"norm", "rope"}


# -- the comparison of specs -------------------------------------------------------------------------------------------


def compare_specs(capfd, *flags):
    from slime.__main__ import main

    code = main(["compare-specs", "--tokens", "40", *flags])
    out, err = capfd.readouterr()
    return code, out, err


def test_our_layers_compare_with_transformers(folder, capfd):
    code, out, _ = compare_specs(capfd, "--hf-checkpoint", folder, "--params-dtype", "float32")
    first, what, limits, *rows, last = out.strip().splitlines()
    assert (
        code == 0 and "no Transformer Engine" in first and "with transformers" in what and "tolerance 0.0001" in limits
    )
    report = json.loads(last)
    assert report["failed"] == 0 and report["logits"] < 1e-5 and report["gradients_not_compared"] == 0
    assert [row.split()[0] + row.split()[1] for row in rows[:4]] == ["layer0", "layer1", "layer2", "layer3"]
    assert sum("gradients" in row for row in rows) == 5  # four layers and the rest


def test_a_difference_over_the_tolerance_is_exit_code_1(folder, capfd):
    flags = ["--hf-checkpoint", folder, "--against", "rounding", "--tolerance", "1e-4"]
    code, out, _ = compare_specs(capfd, *flags)
    assert code == 1 and "OVER" in out and "rounded once in all regions" in out
    assert json.loads(out.strip().splitlines()[-1])["failed"] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--against", "transformer_engine"], "needs CUDA and the package transformer-engine"),
        (["--against", "rounding", "--params-dtype", "float32"], "no effect with --params-dtype float32"),
        (["--tensor-model-parallel-size", "2"], "one process"),
        (["--tokens", "3"], "at least 12"),
        (["--tokns", "3"], "unknown flag --tokns"),
    ],
)
def test_comparisons_that_cannot_be_made_are_one_line(folder, capfd, flags, message):
    code, _, err = compare_specs(capfd, "--hf-checkpoint", folder, *flags)
    assert code == 2 and message in err and len(err.splitlines()) == 1
