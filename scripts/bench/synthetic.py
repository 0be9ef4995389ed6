"""Modules that take as long as they are told: sleeps in the forward and backward passes of a real model on the CPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from mimo.protocols import LANGUAGE
from mimo.training.step import TrainerParts

# Share of a pass forward and backward that is forward, as for layers without recomputation.
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class Synthetic:
    """Lengths of a microbatch's passes, forward and backward together, on one stage, milliseconds.

    Attributes:
        encoder_ms: of every encoder.
        language_ms: of the language model; mean over its lanes.
        spread: the lanes of the language model are by turns so much longer and shorter, as a share.
    """

    encoder_ms: float
    language_ms: float
    spread: float = 0.0


class _Sleep(torch.autograd.Function):
    """The tensor as it is, after a while; its gradient likewise."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


def sleep_in(module: torch.nn.Module, seconds: Iterator[float]) -> None:
    """Have each pass through `module` take what `next(seconds)` says longer.

    A third in the forward pass and the rest in the backward one; where nothing before the output trains, all of it in
    the forward pass.
    """
    def sleep(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        whole = next(seconds)
        if not output.requires_grad:
            time.sleep(whole)
            return output
        slept: torch.Tensor = _Sleep.apply(output, FORWARD_SHARE * whole, (1 - FORWARD_SHARE) * whole)
        return slept

    module.register_forward_hook(sleep)


def install(parts: TrainerParts, synthetic: Synthetic, num_microbatches: int) -> None:
    """Slow this rank's modules down."""
    model, grids = parts.built.model, parts.grids
    for name in grids.modules:
        if name == LANGUAGE:
            lane = grids.layout.language.coordinates(grids.rank)["dp"]
            times = [synthetic.language_ms / 1000 * (1 + synthetic.spread * (-1) ** (lane + number))
                     for number in range(num_microbatches)]
            sleep_in(unwrap_model(model.language_model), itertools.cycle(times))
            continue
        submodule = unwrap_model(model.modality_submodules[name])
        # A frozen encoder may run long before its projector does.
        frozen = not any(parameter.requires_grad for parameter in submodule.encoder.parameters())
        sleep_in(submodule.encoder if frozen else submodule, itertools.repeat(synthetic.encoder_ms / 1000))
