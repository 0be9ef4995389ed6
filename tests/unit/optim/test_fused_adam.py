"""The update kernel in Triton's interpreter against PyTorch's AdamW. tests/gpu/test_fused_adam.py runs it on a GPU."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from scripts.bench import kernels
from tests.support.interpreted import interpreted

BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1


@pytest.fixture
def fused_adam(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return interpreted("mimo.training.fused_adam", monkeypatch)


class Adam:
    """The part of Transformer Engine's `FusedAdam` that `FusedUpdate` uses. The class itself imports only on GPUs."""

    def __init__(self, groups: list[dict]) -> None:
        self.param_groups = [{"betas": BETAS, "eps": EPS, "bias_correction": True, **group} for group in groups]
        self.state: dict[torch.Tensor, dict] = {each: {} for group in groups for each in group["params"]}

    def initialize_state(self, parameter: torch.Tensor, store_param_remainders: bool) -> None:
        assert not store_param_remainders
        self.state[parameter].update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))


@pytest.mark.parametrize("begin", [0, 1], ids=["aligned", "unaligned"])
def test_updates_are_those_of_adamw_with_scaled_gradients(fused_adam: ModuleType, begin: int) -> None:
    torch.manual_seed(0)
    # One tensor of several chunks, one of exactly one chunk, and one with a single element.
    sizes = [fused_adam.CHUNK + 3, fused_adam.CHUNK, 1]
    mains = [torch.randn(begin + size)[begin:].requires_grad_() for size in sizes]
    reference = [main.detach().clone().requires_grad_() for main in mains]
    weights = {main: torch.zeros(begin + len(main), dtype=torch.bfloat16)[begin:] for main in mains[:2]}
    groups = [(slice(0, 1), 1e-2, DECAY), (slice(1, 3), 3e-3, 0.0)]
    update = fused_adam.FusedUpdate(Adam([{"params": mains[part], "lr": lr, "weight_decay": decay}
                                          for part, lr, decay in groups] + [{"params": [], "lr": 1.0}]))
    update.weights = weights
    adamw = torch.optim.AdamW([{"params": reference[part], "lr": lr, "weight_decay": decay}
                               for part, lr, decay in groups], betas=BETAS, eps=EPS)
    for number, scale in enumerate((1.0, 0.25, 1.0)):
        for main, other in zip(mains, reference, strict=True):
            main.grad = torch.randn(begin + len(main))[begin:]
            other.grad = main.grad * scale
        if scale != 1:
            update.gradient_scale = scale
        if number == 2:  # as after a return from host memory
            with torch.no_grad():
                mains[0].data = torch.cat([torch.zeros(begin), mains[0]])[begin:]
        update.find_tensors()
        update.step()
        adamw.step()
        for main, other in zip(mains, reference, strict=True):
            torch.testing.assert_close(main, other, rtol=2e-6, atol=1e-7)
    for main, weight in weights.items():
        # The interpreter cuts a number where a GPU rounds it.
        torch.testing.assert_close(weight.float(), main.detach(), rtol=2**-7, atol=0)
    assert [group["step"] for group in update._adam.param_groups] == [3, 3, 3]


def test_tables_of_kernels_count_the_update_as_the_optimizers(fused_adam: ModuleType) -> None:
    assert kernels.kind_of(fused_adam._adam_chunk.fn.__name__) == "optimizer"
