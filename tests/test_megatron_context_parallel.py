"""Context parallelism: every rank runs the model on a part of the tokens, and all numbers are those of one process."""

import math

import pytest
import torch
from ranks import run_ranks

from benchmarks.layout_cases import LAYOUTS
from benchmarks.layout_grid import as_line, compare, make_models, run_layout
from slime.backends.megatron_utils import data
from slime.backends.megatron_utils.cp_utils import (
    ContextParallel,
    all_gather_with_cp,
    cut_row,
    joined_order,
    pad_lengths,
    response_part,
    slice_log_prob_with_cp,
)
from slime.backends.megatron_utils.log_probs import response_rows

CUTS = [ContextParallel(0, size, contiguous) for size in (2, 3, 4) for contiguous in (False, True)]
LENGTHS = [(1, 0), (3, 2), (9, 8), (13, 4), (2, 1), (30, 17)]  # total and response


def all_ranks(cut):
    return [ContextParallel(r, cut.size, cut.contiguous) for r in range(cut.size)]


# -- cutting rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("multiple", [1, 2, 3])
def test_ranks_share_the_row(cut, multiple):
    """Each token is on one rank, all have equally many, and `joined_order` undoes the cut."""
    lengths = pad_lengths([total for total, _ in LENGTHS], cut, multiple)
    parts = [cut_row(lengths, context) for context in all_ranks(cut)]
    assert len({len(part.index) for part in parts}) == 1 and len(parts[0].index) % multiple == 0
    joined = torch.cat([part.index for part in parts])
    assert joined.sort().values.tolist() == list(range(sum(lengths)))
    assert joined[joined_order(tuple(lengths), cut, joined.device)].tolist() == list(range(sum(lengths)))
    if cut.contiguous:
        assert joined.tolist() == list(range(sum(lengths)))
        assert sum(lengths) < sum(total for total, _ in LENGTHS) + cut.size * multiple


def test_zigzag_is_megatrons():
    from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

    for rank in range(3):
        part = cut_row([6, 18], ContextParallel(rank, 3))
        ours = [i if i < 6 else i - 6 for i in part.index.tolist()]
        theirs = [_get_thd_freqs_on_this_cp_rank(rank, 3, torch.zeros(n // 3), torch.arange(n)) for n in (6, 18)]
        assert ours == torch.cat(theirs).tolist()


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_packed_parts_and_the_rows_that_predict_responses(cut):
    """From what each rank holds, every response token is predicted exactly once, from the token before it."""
    totals, responses = [t for t, _ in LENGTHS[1:]], [r for _, r in LENGTHS[1:]]
    sequences = [torch.arange(100 * i, 100 * i + n) + 1 for i, n in enumerate(totals)]
    targets = torch.cat([s[len(s) - r :] for s, r in zip(sequences, responses, strict=True)])
    found = torch.zeros_like(targets)
    for context in all_ranks(cut):
        tokens, positions, packed = data.pack(sequences, 2, context)
        assert tokens.shape == positions.shape and tokens.size(1) % 2 == 0
        bound = tokens.size(1) if cut.contiguous else tokens.size(1) * cut.size
        assert packed.cu_seqlens_q[-1] == bound and packed.cu_seqlens_q.dtype == torch.int32
        assert cut.contiguous or all(n % (2 * cut.size) == 0 for n in packed.cu_seqlens_q.diff().tolist())
        real = tokens[0] > 0
        assert torch.equal(tokens[0][real] % 100, positions[0][real] + 1)
        part = response_part(response_rows(totals, responses), totals, context, tokens.size(1))
        assert torch.equal(tokens[0][part.rows] + 1, targets[part.places]) and part.count == len(targets)
        found[part.places] += 1
    assert (found == 1).all()


def test_lengths_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="cannot be cut over 2"):
        cut_row([4, 6], ContextParallel(0, 2))


def test_losses_see_whole_responses():
    x = torch.arange(3.0)
    assert slice_log_prob_with_cp(x, 5, 3) is x and all_gather_with_cp(x, 5, 3) is x
    with pytest.raises(ValueError, match="for a response of 4"):
        all_gather_with_cp(x, 5, 4)


# -- attention -----------------------------------------------------------------------------------------------------


def _attention(rank, world, port, cases):
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    from slime.backends.megatron_utils.attention import PackedAttention
    from slime.backends.megatron_utils.parallel import destroy_parallel

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    mpu.initialize_model_parallel(context_parallel_size=world)
    out = []
    for window, contiguous, softmax in cases:

        class Config:
            attention_dropout, kv_channels, window_attn_skip_freq, softmax_type = 0.0, 5, None, softmax
            num_attention_heads, tensor_model_parallel_size, use_cpu_initialization = 6, 1, True
            params_dtype = torch.float64
            window_size = (window - 1, 0) if window else None

        _, _, packed = data.pack([torch.zeros(n) for n, _ in LENGTHS], 1, ContextParallel(rank, world, contiguous))
        whole = sum(packed.lengths)
        g = torch.Generator().manual_seed(0)
        inputs = [torch.randn(whole, heads, 5, dtype=torch.float64, generator=g) for heads in (6, 2, 2)]
        grad = torch.randn(whole, 6, 5, dtype=torch.float64, generator=g)
        index = packed.part.index
        mine = [x[index].requires_grad_() for x in inputs]
        module = PackedAttention(Config, layer_number=1)
        result = module(*mine, packed_seq_params=packed)
        grads = torch.autograd.grad(result, mine, grad[index])

        inputs = [x.requires_grad_() for x in inputs]
        at, sequence = torch.arange(whole), torch.repeat_interleave(torch.tensor(packed.lengths))
        distance = at[:, None] - at
        seen = (sequence[:, None] == sequence) & (distance >= 0) & (distance < (window or whole))
        query, key, value = inputs[0], *(x.repeat_interleave(3, 1) for x in inputs[1:])
        scores = (torch.einsum("ihd,jhd->hij", query, key) / math.sqrt(5)).masked_fill(~seen, -math.inf)
        if softmax == "learnable":  # one logit more, 0 at first, without a value
            scores, value = torch.cat([scores, torch.zeros(6, whole, 1)], -1), torch.cat([value, torch.zeros(1, 6, 5)])
        plain = torch.einsum("hij,jhd->ihd", scores.softmax(-1), value)
        expected = torch.autograd.grad(plain, inputs, grad)
        # Sinks are computed in float32.
        tolerance = dict(rtol=1e-5, atol=1e-6) if softmax == "learnable" else {}
        torch.testing.assert_close(result, plain[index], **tolerance)
        for ours, reference in zip(grads, expected, strict=True):
            torch.testing.assert_close(ours, reference[index], **tolerance)
        out.append(whole)
    destroy_parallel()
    return out


def test_attention_and_its_gradients_are_those_of_whole_sequences():
    cases = [(window, contiguous, "vanilla") for window in (None, 1, 4) for contiguous in (False, True)]
    cases += [(4, False, "learnable"), (None, True, "learnable")]
    run_ranks(2, _attention, cases)


# -- training ------------------------------------------------------------------------------------------------------

# Each works on whole responses in its own way; `benchmarks/layout_grid.py` has all algorithms and layouts.
NAMES = ("grpo, KL, entropy", "gspo", "reinforce++", "MIS geometric", "custom loss on logits")
MODEL = "mistral, window of 7"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"), {MODEL})[MODEL]


@pytest.fixture(scope="module")
def reference(model):
    return run_layout(model, 1, {}, NAMES)


@pytest.mark.parametrize("name", ["cp2 tp2 sp", "cp2 dp2", "cp2 pp2 contiguous, recompute"])
def test_training_is_that_of_one_process(name, model, reference):
    outcomes, _ = run_layout(model, LAYOUTS[name].ranks, LAYOUTS[name].flags, NAMES)
    expected, start = reference
    rows = [compare(algorithm, name, outcomes[algorithm], expected[algorithm], start) for algorithm in NAMES]
    assert not [as_line(row) for row in rows if row.failed]
