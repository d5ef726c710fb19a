"""bf16 products computed in float32, against float64."""

import pytest
import torch

from slime.backends.megatron_utils.cpu_products import Float32Products


def once_rounded(found, exact):
    """One rounding to bf16 (relative error 2**-8 at most, 8 bits of significand), and float32's error before it."""
    assert found.dtype == torch.bfloat16
    scale = exact.abs().max()
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-8, atol=float(scale) * 1e-5)


def gradients(function, tensors, seed):
    torch.manual_seed(seed)
    out = function(*tensors)
    weight = torch.randn(out.shape, dtype=torch.float64).bfloat16()
    return [out.detach(), *torch.autograd.grad(out, tensors, weight.to(out.dtype))]


CASES = {
    "linear": (lambda x, w, b: torch.nn.functional.linear(x, w, b), [(2, 70, 33), (40, 33), (40,)]),
    "no bias": (lambda x, w: torch.nn.functional.linear(x, w), [(70, 1, 33), (40, 33)]),
    "batched": (lambda a, b: torch.bmm(a, b), [(3, 20, 7), (3, 7, 50)]),
    "one call": (lambda c, a, b: torch.baddbmm(c, a, b), [(3, 20, 50), (3, 20, 7), (3, 7, 50)]),
}


@pytest.mark.parametrize("name", CASES)
def test_products_are_rounded_once_forward_and_backward(name):
    function, shapes = CASES[name]
    torch.manual_seed(1)
    tensors = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    with Float32Products():
        found = gradients(function, tensors, seed=2)
    for one, want in zip(found, gradients(function, exact, seed=2), strict=True):
        once_rounded(one, want)


def test_attention_agrees_with_float64_and_keeps_its_types():
    torch.manual_seed(1)
    tensors = [torch.randn(2, 3, 40, 16).bfloat16().requires_grad_() for _ in range(3)]
    exact = [t.detach().double().requires_grad_() for t in tensors]

    def attend(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    with Float32Products():
        found = gradients(attend, tensors, seed=2)
    for one, want in zip(found, gradients(attend, exact, seed=2), strict=True):
        assert one.dtype == torch.bfloat16
        # Backward starts from the rounded output, so an error of one rounding enters through it.
        torch.testing.assert_close(one.double(), want, rtol=2.0**-7, atol=float(want.abs().max()) * 2.0**-7)


def test_other_dtypes_are_left_alone():
    a, b = torch.randn(5, 6), torch.randn(6, 7)
    with Float32Products():
        assert torch.equal(a @ b, torch.mm(a, b)) and (a @ b).dtype == torch.float32
        assert (a.double() @ b.double()).dtype == torch.float64
        assert (a.bfloat16() + 1).dtype == torch.bfloat16
    assert (a.bfloat16() @ b.bfloat16()).dtype == torch.bfloat16
