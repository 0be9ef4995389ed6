"""The activation of routed experts in Triton's interpreter, against Megatron Core's. A GPU runs the kernels in
tests/gpu/test_moe_kernels.py."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.support.interpreted import interpreted


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return interpreted("mimo.model.expert_activation", monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("gated", "width"), [(True, 40), (True, 272), (False, 300)])
@pytest.mark.parametrize("rows", [(0, 0), (9, None), (9, 9), (9, 5), (9, 0)], ids=str)
def test_values_and_gradients_are_those_of_megatron_core(kernels: ModuleType, dtype: torch.dtype, gated: bool,
                                                         width: int, rows: tuple[int, int | None]) -> None:
    from megatron.core.fusions.fused_bias_swiglu import weighted_swiglu, weighted_swiglu_back
    from megatron.core.fusions.fused_weighted_squared_relu import weighted_squared_relu, weighted_squared_relu_back

    torch.manual_seed(0)
    count, limit = rows
    forward, backward = ((weighted_swiglu, weighted_swiglu_back) if gated else
                         (weighted_squared_relu, weighted_squared_relu_back))
    hidden = torch.randn(count, width * (2 if gated else 1), dtype=torch.float64).mul(3).to(dtype)
    weights, gradient = torch.rand(count), torch.randn(count, width).to(dtype)
    used = count if limit is None else limit
    if used < count:
        hidden[used:], weights[used:] = float("nan"), float("nan")
    hidden.requires_grad_(), weights.requires_grad_()
    output = kernels.weighted_activation(hidden, weights, None if limit is None else torch.tensor(limit), gated=gated)
    output.backward(gradient)
    assert output.dtype == hidden.grad.dtype == dtype and weights.grad.dtype == torch.float32
    exact = [each.detach().double()[:used] for each in (gradient, hidden, weights.unsqueeze(-1))]
    of_hidden, of_weights = backward(*exact)
    # The interpreter rounds towards zero.
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-6}
    for found, expected in ((output, forward(*exact[1:])), (hidden.grad, of_hidden)):
        torch.testing.assert_close(found[:used].double(), expected, **near)
    torch.testing.assert_close(weights.grad[:used].double(), of_weights.squeeze(-1), rtol=1e-5, atol=1e-4)
