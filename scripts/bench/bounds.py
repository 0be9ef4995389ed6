"""What a layout and a schedule can reach at best, from times of microbatches and shares of work: plain arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence


def prefetch_bound(encoder: float, language: float) -> float:
    """Speedup of a microbatch when the encoder's share runs beside the language model's instead of before it.

    (t_enc + t_lm) / max(t_enc, t_lm): 1 where one of them takes no time, 2 where both take the same.
    """
    return (encoder + language) / max(encoder, language)


def prefetch_bound_of_step(encoder: float, language: float, num_microbatches: int, num_stages: int = 1) -> float:
    """Speedup of a step when a frozen encoder runs a step ahead instead of as the stage before the language model.

    As that stage it works beside the language model's p stages already, but for the first microbatch's pass and their
    last ones: (t_enc + (M - 1) max(t_enc, t_lm) + p t_lm) / max(M t_enc, (M - 1 + p) t_lm). `prefetch_bound` with one
    microbatch, 1 with very many.

    Args:
        encoder: time of a microbatch.
        language: time of a microbatch on one stage.
        num_microbatches: M.
        num_stages: p.
    """
    serial = encoder + (num_microbatches - 1) * max(encoder, language) + num_stages * language
    return serial / max(num_microbatches * encoder, (num_microbatches - 1 + num_stages) * language)


def straggler_factor(times: Sequence[Sequence[float]]) -> float:
    """Sum over microbatches of the slowest lane's time, over that of the mean lane.

    Args:
        times: of each microbatch, seconds of each lane.
    """
    return sum(max(lanes) for lanes in times) / sum(statistics.fmean(lanes) for lanes in times)


def bubble_share(num_stages: int, num_microbatches: int) -> float:
    """Share of a 1F1B pipeline's time in which a stage has nothing to do: (p - 1) / (M + p - 1), without interleaving.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (arXiv:2104.04473), section 2.2.
    """
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def split_efficiency(ranks: Mapping[str, int], work: Mapping[str, float]) -> float:
    """How much of all GPUs a disjoint layout can use at best: 1 where each grid's share of GPUs is its share of work.

    min over grids of (its GPUs / all GPUs) / (its work / all work): the grid with the least GPUs for its work sets the
    pace of all.

    Args:
        ranks: GPUs of each grid.
        work: of each grid, in one unit: FLOPs where grids are equally efficient, else GPU-seconds of their passes.
    """
    all_ranks, all_work = sum(ranks.values()), sum(work.values())
    return min(ranks[name] / all_ranks * all_work / work[name] for name in ranks if work[name] > 0)
