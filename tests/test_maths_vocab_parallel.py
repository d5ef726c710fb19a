"""Log-probs and entropy from hidden states or logits, whole or split over ranks, against float64 autograd."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from slime.utils import vocab_shard
from slime.utils.vocab_parallel import linear_log_probs_and_entropy, vocab_parallel_log_probs_and_entropy
from slime.utils.vocab_topk import linear_topk_log_probs, vocab_parallel_topk_log_probs


def reference(hidden, weight, targets, temperature=1.0):
    """Plain float64: the whole matrix, torch's own log_softmax."""
    log_p = torch.log_softmax(hidden.double() @ weight.double().t() / temperature, -1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def problem(n, vocab, width, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, width, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (n,), generator=g)
    return hidden, weight, targets, torch.randn(n, generator=g).double(), torch.randn(n, generator=g).double()


def grads(outputs, weights, inputs):
    total = sum((out.double() * w).sum() for out, w in zip(outputs, weights, strict=True))
    return torch.autograd.grad(total, inputs)


@pytest.mark.filterwarnings("error")  # an `out=` of another shape would be one
@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 9), vocab=st.integers(1, 23), width=st.integers(1, 5), chunk=st.integers(1, 10),
    temperature=st.sampled_from([0.6, 1.0, 1.7]), padding=st.integers(0, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_linear_equals_reference(n, vocab, width, chunk, temperature, padding, seed):
    hidden, weight, targets, g_lp, g_ent = problem(n, vocab, width, seed)
    g_lp[: n // 2] = 0.0  # rows without gradient are skipped: some have neither, some one, some both
    g_ent[n // 3 : n // 3 * 2] = 0.0
    padded = torch.nn.functional.pad(weight.detach(), (0, 0, 0, padding), value=50.0).requires_grad_()
    out = linear_log_probs_and_entropy(
        hidden, padded, targets, temperature=temperature, chunk_size=chunk, with_entropy=True, vocab_size=vocab
    )
    want = reference(hidden, weight, targets, temperature)
    for a, b in zip(out, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    got_h, got_w = grads(out, (g_lp, g_ent), (hidden, padded))
    want_h, want_w = grads(want, (g_lp, g_ent), (hidden, weight))
    torch.testing.assert_close(got_h, want_h, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(got_w[:vocab], want_w, rtol=1e-8, atol=1e-8)
    assert not got_w[vocab:].any()


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(0, 9), vocab=st.integers(1, 23), k=st.integers(0, 6), chunk=st.integers(1, 10),
    padding=st.integers(0, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_several_targets_per_row(n, vocab, k, chunk, padding, seed):
    """Repeated ids too: each is a log-prob of its own, and the gradients add up."""
    hidden, weight, _, _, g_ent = problem(n, vocab, 3, seed)
    g = torch.Generator().manual_seed(seed)
    targets, g_lp = torch.randint(0, vocab, (n, k), generator=g), torch.randn(n, k, generator=g).double()
    g_lp[: n // 3] = g_ent[: n // 3] = 0.0
    padded = torch.nn.functional.pad(weight.detach(), (0, 0, 0, padding), value=50.0).requires_grad_()
    log_p = torch.log_softmax(hidden @ weight.t() / 0.7, -1)
    want = log_p.gather(1, targets), -(log_p.exp() * log_p).sum(-1)
    logits = (hidden @ padded.t() / 0.7).detach().requires_grad_()
    flat = vocab_parallel_log_probs_and_entropy(logits, targets, with_entropy=True, vocab_size=vocab)
    out = linear_log_probs_and_entropy(
        hidden, padded, targets, temperature=0.7, chunk_size=chunk, with_entropy=True, vocab_size=vocab
    )
    for a, b, c in zip(out, want, flat, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(c, b, rtol=1e-9, atol=1e-9)
    want_h, want_w = grads(want, (g_lp, g_ent), (hidden, weight))
    got_h, got_w = grads(out, (g_lp, g_ent), (hidden, padded))
    torch.testing.assert_close(got_h, want_h, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(got_w[:vocab], want_w, rtol=1e-8, atol=1e-8)
    (got_z,) = grads(flat, (g_lp, g_ent), (logits,))
    torch.testing.assert_close(got_z @ padded.detach() / 0.7, want_h, rtol=1e-8, atol=1e-8)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(0, 9), vocab=st.integers(1, 23), chunk=st.integers(1, 10), seed=st.integers(0, 99), data=st.data())
def test_topk_equals_reference(n, vocab, chunk, seed, data):
    k = data.draw(st.integers(1, vocab))
    hidden, weight, *_ = problem(n, vocab, 3, seed)
    padded = torch.nn.functional.pad(weight.detach(), (0, 0, 0, 2), value=50.0)
    want = torch.log_softmax(hidden @ weight.t() / 0.7, -1).topk(k, dim=1)
    out = linear_topk_log_probs(hidden, padded, k, temperature=0.7, chunk_size=chunk, vocab_size=vocab)
    flat = vocab_parallel_topk_log_probs(hidden @ padded.t() / 0.7, k, vocab_size=vocab)
    for log_probs, ids in (out, flat):
        assert not log_probs.requires_grad and torch.equal(ids, want.indices)
        torch.testing.assert_close(log_probs, want.values, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("dtype", "supported"), [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)]
)
def test_dtypes(monkeypatch, dtype, supported):
    """bf16 products stay bf16 where a CPU has them; their sum over chunks is float32 in any case."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    hidden, weight, targets, g_lp, g_ent = problem(37, 101, 13, dtype=dtype)
    out = linear_log_probs_and_entropy(hidden, weight, targets, chunk_size=8, with_entropy=True)
    assert all(x.dtype == torch.float32 for x in out)
    want = reference(hidden, weight, targets)
    tight = 1e-5 if dtype == torch.float32 else 5e-2  # logits of bf16 inputs may be rounded to bf16
    for a, b in zip(out, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tight, atol=tight)
    for a, b in zip(
        grads(out, (g_lp, g_ent), (hidden, weight)), grads(want, (g_lp, g_ent), (hidden, weight)), strict=True
    ):
        assert a.dtype == dtype
        assert (a - b).double().norm() <= tight * b.double().norm()


@settings(max_examples=20, deadline=None)
@given(n=st.integers(0, 7), vocab=st.integers(1, 19), padding=st.integers(0, 2), seed=st.integers(0, 99))
def test_logits_equal_reference(n, vocab, padding, seed):
    hidden, weight, targets, g_lp, g_ent = problem(n, vocab, 4, seed)
    logits = (hidden @ weight.t()).detach()
    padded = torch.nn.functional.pad(logits, (0, padding), value=99.0).requires_grad_()
    out = vocab_parallel_log_probs_and_entropy(padded, targets, with_entropy=True, vocab_size=vocab)
    g_lp[: n // 2], g_ent[n // 3 : n // 3 * 2] = 0.0, 0.0
    plain = logits.clone().requires_grad_()
    want = reference(plain, torch.eye(vocab), targets)
    for a, b in zip(out, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    (got,) = grads(out, (g_lp, g_ent), (padded,))
    (expected,) = grads(want, (g_lp, g_ent), (plain,))
    torch.testing.assert_close(got[:, :vocab], expected, rtol=1e-8, atol=1e-8)
    assert not got[:, vocab:].any()


def test_only_one_of_the_outputs_may_have_a_gradient():
    hidden, weight, targets, g, _ = problem(6, 11, 3)
    for index in (0, 1):
        out = linear_log_probs_and_entropy(hidden, weight, targets, chunk_size=4, with_entropy=True)[index]
        want = reference(hidden, weight, targets)[index]
        for a, b in zip(grads([out], [g], (hidden, weight)), grads([want], [g], (hidden, weight)), strict=True):
            torch.testing.assert_close(a, b)
    assert linear_log_probs_and_entropy(hidden, weight, targets)[1] is None
    assert vocab_parallel_log_probs_and_entropy(hidden @ weight.t(), targets)[1] is None


def test_backward_twice_over_a_retained_graph():
    hidden, weight, targets, g, _ = problem(5, 7, 3)
    out, _ = linear_log_probs_and_entropy(hidden, weight, targets, chunk_size=2)
    first = torch.autograd.grad((out * g).sum(), (hidden, weight), retain_graph=True)
    second = torch.autograd.grad((out * g).sum(), (hidden, weight))
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block_bytes", [1, 4 * 7 * 2])  # each row by itself; two rows at a time
def test_rows_in_several_blocks_and_a_chunk_size_of_nothing(monkeypatch, block_bytes):
    monkeypatch.setattr(vocab_shard, "_CPU_BLOCK_BYTES", block_bytes)
    hidden, weight, targets, g_lp, g_ent = problem(5, 7, 3)
    want = reference(hidden, weight, targets)
    expected = grads(want, (g_lp, g_ent), (hidden, weight))
    for chunk in (0, 3, 100):
        out = linear_log_probs_and_entropy(hidden, weight, targets, chunk_size=chunk, with_entropy=True)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(grads(out, (g_lp, g_ent), (hidden, weight)), expected)


def test_blocks_of_rows_fit_the_cache(monkeypatch):
    """Two rows of 7 float32 each on a CPU, at least one row; all at once elsewhere."""
    monkeypatch.setattr(vocab_shard, "_CPU_BLOCK_BYTES", 4 * 7 * 2)
    assert list(vocab_shard.cache_blocks(torch.empty(5, 7))) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(vocab_shard.cache_blocks(torch.empty(2, 99))) == [slice(0, 1), slice(1, 2)]
    assert list(vocab_shard.cache_blocks(torch.empty(5, 7, device="meta"))) == [slice(0, 5)]


@pytest.mark.parametrize("supported", [True, False])
def test_half_precision_is_widened_only_where_a_cpu_lacks_it(monkeypatch, supported):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    half = torch.ones(1, dtype=torch.bfloat16)
    others = torch.ones(1), torch.ones(1).double(), half.to("meta")
    assert all(vocab_shard.for_matmul(x) is x for x in others)
    assert vocab_shard.for_matmul(half).dtype == (torch.bfloat16 if supported else torch.float32)


class RowsOfLogits(TorchDispatchMode):
    """Counts rows whose logits are computed: products that are written into the buffer."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.rows += args[0].size(0) if func is torch.ops.aten.mm.out else 0
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("n", "live", "again"),
    [(10, range(10), 8), (8, range(8), 4), (9, range(9), 8), (10, [8, 9], 0), (10, [0, 5, 9], 2), (3, range(3), 0)],
)
def test_backward_computes_only_logits_that_it_needs_and_lacks(n, live, again):
    """Chunks of 4 rows: the last one is still there, and rows without a gradient need none."""
    hidden, weight, targets, *_ = problem(n, 7, 3)
    with RowsOfLogits() as count:
        out, _ = linear_log_probs_and_entropy(hidden, weight, targets, chunk_size=4)
        assert count.rows == n
        torch.autograd.grad(out[list(live)].sum(), (hidden, weight))
    assert count.rows == n + again


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_extreme_logits_stay_finite(temperature):
    hidden = torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    out = linear_log_probs_and_entropy(
        hidden, weight, torch.tensor([0, 0, 2]), temperature=temperature, with_entropy=True
    )
    torch.testing.assert_close(out[0], torch.tensor([0.0, -2e4 / temperature, -torch.log(torch.tensor(3.0))]))
    assert out[1].isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out[0].sum() + out[1].sum(), (hidden, weight)))


@pytest.mark.parametrize(
    ("hidden", "weight", "targets"),
    [((3, 2, 1), (5, 2), 3), ((3, 2), (5, 2, 1), 3), ((3, 2), (5, 2), (3, 1, 1)), ((3, 2), (5, 2), 2),
     ((3, 2), (5, 3), 3), ((2, 2, 1), (5, 3, 1), 2)],
)  # fmt: skip
def test_shapes_that_do_not_fit_are_named(hidden, weight, targets):
    ids = torch.zeros(targets, dtype=torch.long)
    with pytest.raises(ValueError, match=rf"hidden \({hidden[0]}, .*expected \[N, H\]"):
        linear_log_probs_and_entropy(torch.zeros(hidden), torch.zeros(weight), ids)
    if weight == (5, 2):  # `hidden` may as well be logits
        with pytest.raises(ValueError, match=rf"logits \({hidden[0]}, .*expected \[N, V / tp\]"):
            vocab_parallel_log_probs_and_entropy(torch.zeros(hidden), ids)


def test_faults_are_named():
    hidden, weight, targets, *_ = problem(3, 5, 2)
    with pytest.raises(ValueError, match="token id 9 is outside the vocabulary of 5"):
        linear_log_probs_and_entropy(hidden, weight, torch.tensor([0, 9, 1]))
    with pytest.raises(ValueError, match="token id 5 is outside the vocabulary of 5"):
        linear_log_probs_and_entropy(hidden, weight, torch.tensor([0, 5, 1]))
    with pytest.raises(ValueError, match="token id -1"):
        vocab_parallel_log_probs_and_entropy(torch.zeros(1, 4), torch.tensor([-1]))
    with pytest.raises(ValueError, match=r"k must be in \[1, that\]"):
        linear_topk_log_probs(hidden, weight, 6)


TOPK = 4


def _on_rank(rank, world_size, port, vocab, columns):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    hidden, weight, targets, g_lp, g_ent = problem(9, vocab, 4)
    full = torch.nn.functional.pad(weight.detach(), (0, 0, 0, columns * world_size - vocab))
    mine = full[rank * columns : (rank + 1) * columns].clone().requires_grad_()
    out = linear_log_probs_and_entropy(
        hidden, mine, targets, tp_group=dist.group.WORLD, temperature=0.7, chunk_size=4, with_entropy=True,
        vocab_size=vocab,
    )  # fmt: skip
    d_hidden, d_weight = grads(out, (g_lp, g_ent), (hidden, mine))
    logits = (hidden.detach() @ mine.detach().t() / 0.7).requires_grad_()
    plain = vocab_parallel_log_probs_and_entropy(
        logits, targets, tp_group=dist.group.WORLD, with_entropy=True, vocab_size=vocab
    )
    (d_logits,) = grads(plain, (g_lp, g_ent), (logits,))
    top = linear_topk_log_probs(
        hidden, mine, TOPK, tp_group=dist.group.WORLD, temperature=0.7, chunk_size=4, vocab_size=vocab
    )
    # Several targets per row, the most likely ones: here they come from both ranks.
    several, _ = linear_log_probs_and_entropy(
        hidden, mine, top[1], tp_group=dist.group.WORLD, temperature=0.7, chunk_size=4, vocab_size=vocab
    )
    d_several = grads([several], [g_lp[:, None]], (hidden, mine))
    # Without a true size all columns are real, the zeros of the padding too.
    everything, _ = vocab_parallel_log_probs_and_entropy(logits, targets, tp_group=dist.group.WORLD)
    dist.destroy_process_group()
    out = (*out, d_hidden, d_weight, *plain, d_logits, everything)
    return [x.detach().numpy() for x in out], [x.detach().numpy() for x in (*top, several, *d_several)]


@pytest.mark.parametrize(("vocab", "columns"), [(11, 6), (5, 5)])  # the second leaves rank 1 with padding only
def test_split_vocabulary_equals_whole(vocab, columns):
    results, topk = zip(*run_ranks(2, _on_rank, vocab, columns), strict=True)
    hidden, weight, targets, g_lp, g_ent = problem(9, vocab, 4)
    want = reference(hidden, weight, targets, 0.7)
    d_hidden, d_weight = grads(want, (g_lp, g_ent), (hidden, weight))
    logits = (hidden.detach() @ weight.detach().t() / 0.7).requires_grad_()
    (d_logits,) = grads(reference(logits, torch.eye(vocab), targets), (g_lp, g_ent), (logits,))
    padded = torch.nn.functional.pad(weight, (0, 0, 0, columns * 2 - vocab))
    everything, _ = reference(hidden, padded, targets, 0.7)
    for rank, (lp, entropy, dh, _, lp2, entropy2, _, lp3) in enumerate(results):
        pairs = (
            (lp, want[0]),
            (lp2, want[0]),
            (lp3, everything),
            (entropy, want[1]),
            (entropy2, want[1]),
            (dh, d_hidden),
        )
        for a, b in pairs:
            torch.testing.assert_close(torch.from_numpy(a), b.detach(), rtol=1e-9, atol=1e-9, msg=f"rank {rank}")
    whole_w = torch.cat([torch.from_numpy(r[3]) for r in results])
    whole_z = torch.cat([torch.from_numpy(r[6]) for r in results], dim=1)
    torch.testing.assert_close(whole_w[:vocab], d_weight, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(whole_z[:, :vocab], d_logits, rtol=1e-9, atol=1e-9)
    assert not whole_w[vocab:].any() and not whole_z[:, vocab:].any()
    log_p = torch.log_softmax(hidden @ weight.t() / 0.7, -1)
    best = log_p.topk(TOPK, dim=1)
    d_hidden, d_weight = grads([best.values], [g_lp[:, None]], (hidden, weight))
    for log_probs, ids, several, dh, _ in topk:
        assert (ids == best.indices.numpy()).all()
        for a, b in ((log_probs, best.values), (several, best.values), (dh, d_hidden)):
            torch.testing.assert_close(torch.from_numpy(a), b.detach(), rtol=1e-9, atol=1e-9)
    whole_w = torch.cat([torch.from_numpy(r[4]) for r in topk])
    torch.testing.assert_close(whole_w[:vocab], d_weight, rtol=1e-9, atol=1e-9)
