"""How evenly encoder work is spread over lanes."""

from __future__ import annotations

from collections.abc import Sequence

from mimo.batch import Microbatch


def image_tokens(microbatches: Sequence[Microbatch]) -> tuple[list[float], list[float]]:
    """Image tokens of this rank's lane in each microbatch, and those it would have had without balanced packing.

    Zero on ranks without text.
    """
    texts = [batch.text for batch in microbatches]
    held = [0.0 if text is None else float(sum(map(sum, text.token_counts.values()))) for text in texts]
    return held, [0.0 if text is None else float(text.unbalanced_image_tokens) for text in texts]


def imbalance(largest: Sequence[float], total: float, num_lanes: int) -> float | None:
    """Image tokens of the fullest lane over the mean of all lanes, over a step; None without images.

    Args:
        largest: of each microbatch, the image tokens of the lane that has most.
        total: image tokens of all lanes and microbatches.
        num_lanes: number of lanes.
    """
    return sum(largest) * num_lanes / total if total else None
