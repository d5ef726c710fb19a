"""What CPU engines load beside SGLang, against SGLang's own, in a process that finds what an engine finds."""

import os
import subprocess
import sys
import textwrap

from slime.backends.sglang_utils.server import STAND_INS, engine_site

ATTENTION = textwrap.dedent(
    """
    import sglang.srt.layers.attention.attention_registry as registry
    import torch
    from sglang.srt.plugins import load_plugins

    load_plugins()
    backend_class = registry.ATTENTION_BACKENDS["torch_native"]
    from slime.backends.sglang_utils.cpu_attention import BatchedDecode, plan

    assert backend_class is BatchedDecode
    torch.manual_seed(0)
    lengths = torch.tensor([1, 5, 127, 128, 129, 300, 2, 64])
    pool = torch.randperm(40)[: len(lengths)]
    table = torch.zeros(40, 400, dtype=torch.int32)
    slots = iter(torch.randperm(2000).tolist())
    for i, length in zip(pool, lengths, strict=True):
        table[i, :length] = torch.tensor([next(slots) for _ in range(length)])
    groups = plan(table, pool, lengths)
    assert sorted(i for rows in groups for i in rows.at.tolist()) == list(range(len(lengths)))
    assert [rows.longest for rows in groups] == [128, 129, 300]
    unused = torch.ones(2000, dtype=torch.bool)
    unused[torch.cat([table[i, :n] for i, n in zip(pool, lengths, strict=True)]).long()] = False
    for heads, kv, dim, out_dim in ((9, 3, 16, 16), (4, 4, 8, 8), (6, 1, 24, 16)):
        keys, values = torch.randn(2000, kv, dim), torch.randn(2000, kv, out_dim)
        keys[unused], values[unused] = float("nan"), float("nan")  # what no sequence owns is not looked at
        query = torch.randn(len(lengths), heads, dim)
        for window in (None, 3, 50):
            outs = []
            for rows in (None, groups):
                backend = object.__new__(BatchedDecode)
                backend._rows = rows
                out = torch.empty(len(lengths), heads, out_dim)
                outs.append(backend._run_sdpa_forward_decode(
                    query, out, keys, values, table, pool, lengths, None, scaling=0.3, enable_gqa=heads != kv,
                    causal=False, is_cross_attn=False, sliding_window_size=window,
                ))
            torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-6)
    print("same")
    """
)


LINEAR = textwrap.dedent(
    """
    from types import SimpleNamespace

    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    packed = []
    plain = torch.ops.mkldnn._reorder_linear_weight
    torch.ops.mkldnn._reorder_linear_weight = lambda *args: packed.append(args) or plain(*args)

    torch.manual_seed(0)
    method, layer = UnquantizedLinearMethod(), torch.nn.Linear(48, 80, dtype=torch.float32)
    processor = SimpleNamespace(use_fp32_lm_head=False, rl_on_policy_target=None)

    def same(out, want):
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)

    def check(x):
        want = torch.nn.functional.linear(x.double(), layer.weight.double())
        for bias in (None, layer.bias):
            out = method.apply(layer, x, bias)
            same(out, want if bias is None else want + bias.double())
        same(LogitsProcessor._compute_lm_head(processor, x, layer), want)

    with torch.no_grad():
        for rows in (2, 16, 33, 500):
            check(torch.randn(rows, 48))
        check(torch.randn(3, 5, 48))
        assert len(packed) == 1, "packed once, for all numbers of rows"
        check(torch.randn(1, 48))
        half, x = torch.nn.Linear(48, 80, dtype=torch.bfloat16), torch.randn(4, 48, dtype=torch.bfloat16)
        want = torch.nn.functional.linear(x.double(), half.weight.double(), half.bias.double())
        for rows in (4, 1):  # rounded once, whether torch does it or we do
            out = method.apply(half, x[:rows], half.bias)
            assert out.dtype == torch.bfloat16
            torch.testing.assert_close(out.double(), want[:rows], rtol=2.0**-8, atol=1e-5)
        assert len(packed) == 1 + (not torch.ops.mkldnn._is_mkldnn_bf16_supported())
        packed.clear()

        # A weight update writes into the parameter where autograd's version counter does not see it.
        model = SimpleNamespace(load_weights=lambda named: layer.weight.data.copy_(dict(named)["weight"]))
        updater = SimpleNamespace(
            get_model=lambda: model, _assert_weight_cache_inactive=lambda name: None, custom_weight_loaders={}
        )
        import sglang.srt.model_executor.model_runner_components.weight_updater as module
        module._unsupported_derived_weight_cache_error = lambda model: None
        done = WeightUpdater.load_weights_from_distributed(updater, [("weight", torch.randn(80, 48))])
        assert done[0], done
        check(torch.randn(16, 48))
        assert len(packed) == 1
        for name in ("update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_ipc"):
            assert hasattr(getattr(WeightUpdater, name), "__wrapped__"), name
    print("fresh")
    """
)


SAMPLING = textwrap.dedent(
    """
    import sglang.srt.layers.sampler as sampler

    probs = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.25 - 1e-3, 1e-3, 0.0]).expand(200_000, 7)
    drawn = sampler.sampling_from_probs_torch(probs.contiguous())
    assert drawn.dtype == torch.int32 and drawn.shape == (200_000,)
    seen = torch.bincount(drawn, minlength=7).double() / len(drawn)
    deviation = (probs[0] * (1 - probs[0]) / len(drawn)).sqrt().double()
    assert ((seen - probs[0]).abs() <= 5 * deviation).all(), seen  # exactly 0 where the probability is
    torch.rand, plain = (lambda *size, dtype: torch.full(size, 1.0 - 2.0**-53, dtype=dtype)), torch.rand
    assert sampler.sampling_from_probs_torch(probs[:3]).tolist() == [5] * 3, "the largest number that rand can give"
    torch.rand = lambda *size, dtype: torch.zeros(size, dtype=dtype)
    assert sampler.sampling_from_probs_torch(probs[:3]).tolist() == [1] * 3, "the least"
    torch.rand = plain
    for bad in (torch.nan, torch.inf):
        try:
            sampler.sampling_from_probs_torch(torch.tensor([[0.5, 0.5], [bad, 0.5]]))
        except ValueError as error:
            assert "not finite" in str(error)
        else:
            raise AssertionError(bad)
    print("fair")
    """
)


DIGESTS = textwrap.dedent(
    """
    from types import SimpleNamespace

    import xxhash
    from sglang.srt.utils.weight_checker import WeightChecker

    module = torch.nn.Module()
    module.weight, module.bias = torch.nn.Parameter(torch.randn(7, 33)), torch.nn.Parameter(torch.randn(7))
    module.register_buffer("scale", torch.randn(5, 5).t())
    checker = object.__new__(WeightChecker)
    checker.__dict__ |= dict(_get_model=lambda: module, _placement={}, _parallelism_info=lambda role: None)
    import sglang.srt.utils.weight_checker as module_
    module_.ChecksumInfo = lambda **values: SimpleNamespace(model_dump=lambda: values)
    for _ in range(2):
        found = checker._compute_checksum(role="target")["checksums"]
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        want = {n: xxhash.xxh3_64_hexdigest(t.detach().numpy().tobytes()) for n, t in tensors.items()}
        assert found == want and len(found) == 3, (found, want)
        module.weight.data.mul_(2)  # in the same memory: nothing is remembered from one check to the next
    assert module_._hash_tensor(torch.ones(3)) == xxhash.xxh3_64_hexdigest(torch.ones(3).numpy().tobytes())
    print("agreed")
    """
)


def test_the_engines_parts_do_what_sglang_does():
    paths = [str(STAND_INS), str(engine_site()), *sys.path]
    env = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", ATTENTION + LINEAR + SAMPLING + DIGESTS]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert run.stdout.split() == ["same", "fresh", "fair", "agreed"], run.stderr[-3000:]
