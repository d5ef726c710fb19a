"""The CPU engines' batched decoding against SGLang's own loop, in a process that finds what an engine finds."""

import os
import subprocess
import sys
import textwrap

from slime.backends.sglang_utils.server import STAND_INS, engine_site

SCRIPT = textwrap.dedent(
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


def test_batched_decoding_is_sglangs_loop():
    paths = [str(STAND_INS), str(engine_site()), *sys.path]
    env = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=300)
    assert run.stdout.strip().endswith("same"), run.stderr[-3000:]
