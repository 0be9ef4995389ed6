"""A budget for the encoder's activations changes what is kept and recomputed, and no bit of the results."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.equality import Outcome, run_layout
from tests.support.marks import fast_only
from tests.support.spawn import WorkerPool
from tests.support.steps import trainer_changed_by

LAYOUTS = {
    "llm-pp2": (2, "--layout colocated --encoder-dp 2 --llm-pp 2 --encoder-chunk 2"),
    "llm-tp2-window1": (2, "--layout colocated --encoder-dp 2 --llm-tp 2 --sequence-parallel --encoder-window 1"),
    "encoder-tp2-llm-pp2-iteration": (2, "--layout colocated --encoder-tp 2 --llm-pp 2 --encoder-window 0"),
    "packed": (2, "--layout colocated --encoder-dp 2 --llm-pp 2 --vision-dynamic-resolution "
               "--no-vision-class-token"),
}
DROPOUT = 0.25


def run_within(rank: int, flags: tuple[str, ...], world_size: int, dropout: bool) -> tuple[Outcome, int, int]:
    """Train as `run_layout`; also return the most bytes that were kept, and how often a layer ran again."""
    kept, again = [0], [0]

    def change(patch: pytest.MonkeyPatch, parts: Any) -> None:
        (module,) = parts.windows._modules
        layers = module._module.module.encoder.decoder.layers
        for layer in layers:
            layer.hidden_dropout = DROPOUT if dropout else layer.hidden_dropout
            layer.register_forward_pre_hook(lambda *_: again.append(not torch.is_grad_enabled()))
        if module._recomputation is not None:
            budget, choose = module._recomputation._budget, module._recomputation.choose
            patch.setattr(module._recomputation, "choose",
                          lambda sizes: (choose(sizes), kept.append(budget.kept))[0])

    with trainer_changed_by(change) as built:
        outcome = run_layout(rank, flags, world_size)
    (module,) = built[0].windows._modules
    assert module._recomputation is None or module._recomputation._budget.kept == 0, "every pass gave its bytes back"
    return outcome, max(kept), sum(again)


def bits(outcome: Outcome) -> Iterator[np.ndarray]:
    yield np.array([outcome.losses, outcome.grad_norms])
    for piece in (*outcome.gradients, *outcome.parameters):
        yield piece.value


@pytest.mark.parametrize(("layout", "dropout"), fast_only(
    [("llm-pp2", False)], [*((name, False) for name in LAYOUTS), ("llm-pp2", True)]))
def test_results_are_equal_to_the_last_bit_with_every_budget(pool: WorkerPool, layout: str, dropout: bool) -> None:
    world_size, words = LAYOUTS[layout]

    def run(*flags: str) -> list[tuple[Outcome, int, int]]:
        return pool.run(run_within, (*words.split(), *flags), world_size, dropout, world_size=world_size)

    whole, ample = run(), run("--encoder-activation-gib", "1")
    need = [kept for _, kept, _ in ample]
    half = run("--encoder-activation-gib", repr(max(need) / 2 / 2**30))
    none = run("--encoder-activation-gib", "0")
    for rank, (expected, _, no_layer) in enumerate(whole):
        assert no_layer == 0
        assert 0 < half[rank][1] <= max(need) / 2 < max(need) and none[rank][1] == 0
        # The first pass, which is measured, is recomputed with every budget.
        assert 0 < ample[rank][2] < half[rank][2] < none[rank][2]
        for outcome, _, _ in (ample[rank], half[rank], none[rank]):
            for value, other in zip(bits(expected), bits(outcome), strict=True):
                assert np.array_equal(value, other)


class Layer(torch.nn.Module):
    """A layer with an operation that saves its own output for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.linear(hidden_states))


def measure(rank: int) -> tuple[int, bool]:
    """Return what the layer saves, in bytes, and whether its weights are still there when nobody needs it."""
    from mimo.training.encoder_activations import saved_bytes

    layer = Layer()
    found, weights = saved_bytes(layer, {"hidden_states": torch.ones(4, 8)}), weakref.ref(layer.linear.weight)
    del layer
    gc.collect()
    return found, weights() is not None


def test_a_layer_that_was_measured_is_not_kept(pool: WorkerPool) -> None:
    # The input and the weights are not counted, and the output of the linear layer is not saved.
    assert pool.run(measure, world_size=1) == [(4 * 8 * 4, False)]
