"""Sizes of a run from plain data: parameters per rank and bytes over the bridge."""

from __future__ import annotations

import math
from collections.abc import Iterable

from mimo.grid.spec import GridSpec
from mimo.protocols import ParameterShape


def total_parameters(shapes: Iterable[ParameterShape]) -> int:
    """Parameters of a whole module."""
    return sum(math.prod(shape.shape) * shape.count for shape in shapes)


def parameters_per_rank(shapes: Iterable[ParameterShape], grid: GridSpec, stage: int) -> int:
    """Parameters that one rank of a pipeline stage holds (the fullest one where a split is uneven).

    Args:
        shapes: every parameter of the module.
        grid: the module's grid.
        stage: pipeline stage, 0 to `grid.pp - 1`.
    """
    if not 0 <= stage < grid.pp:
        raise ValueError(f"stage {stage} is not in 0-{grid.pp - 1} of grid {grid.name!r}")
    return sum(_on_rank(shape, grid, stage) for shape in shapes)


def _on_rank(shape: ParameterShape, grid: GridSpec, stage: int) -> int:
    ways = {"none": 1, "tp": grid.tp, "expert": grid.ep * grid.expt_tp}[shape.split]
    if shape.stage == "layer":
        # Consecutive runs of layers whose lengths differ by at most one.
        count = (stage + 1) * shape.count // grid.pp - stage * shape.count // grid.pp
    else:
        count = shape.count if stage == {"first": 0, "last": grid.pp - 1}[shape.stage] else 0
    return -(-math.prod(shape.shape) * count // ways)


def bridge_bytes(*, image_tokens: int, hidden_size: int, dtype_bytes: int) -> int:
    """Bytes of activations that cross the bridge forward for one microbatch; the gradients going back are as many.

    Args:
        image_tokens: encoder output tokens of the microbatch, summed over its samples.
        hidden_size: width of the language model.
        dtype_bytes: bytes of an element (2 for bfloat16, 4 for float32).

    The copies inside the receiving replica (to its other tensor-parallel ranks) are not counted.
    """
    return image_tokens * hidden_size * dtype_bytes
