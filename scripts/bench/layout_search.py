"""Search the layouts of a model on a number of ranks, and sort them by their expected efficiency. Plain data."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mimo.config.cli import parse
from mimo.config.trainer import LayoutConfig, RunConfig
from mimo.config.validate import validate
from mimo.planner.candidates import flags_of, grids
from scripts.training_runs import num_ranks

HOMOGENEOUS, COLOCATED, DISJOINT = "homogeneous", "colocated", "disjoint"
KINDS = (HOMOGENEOUS, COLOCATED, DISJOINT)


@dataclass(frozen=True)
class Candidate:
    """A layout to try.

    Attributes:
        kind: one of `KINDS`. Encoder and language model are on the same ranks with the same grid (homogeneous), on the
            same ranks with different grids (colocated) or on different ranks (disjoint).
        flags: flags that the layout adds to those of the run.
        config: configuration of the run on this layout.
    """

    kind: str
    flags: str
    config: RunConfig

    @property
    def name(self) -> str:
        """Name for messages, and key of the figures."""
        return f"{self.kind}: {self.flags}"


def layout_of(kind: str, encoder: tuple[int, int, int], language: tuple[int, int, int]) -> LayoutConfig:
    """Return the layout of two grids (tp, dp, pp), with sequence parallelism if the language model has tp."""
    return LayoutConfig(
        layout="disjoint" if kind == DISJOINT else "colocated", encoder_tp=encoder[0], encoder_dp=encoder[1],
        encoder_pp=encoder[2], llm_tp=language[0], llm_dp=language[1], llm_pp=language[2],
        sequence_parallel=language[0] > 1)


def all_layouts(kind: str, size: int) -> Iterator[LayoutConfig]:
    """Yield every layout of a kind on `size` ranks, whether the trainer can run it or not.

    Cuts of pipelines, other windows, recomputation and larger microbatches come later (`layout_variants`).
    """
    if kind == HOMOGENEOUS:
        for tp, dp, pp in grids(size):
            yield LayoutConfig(layout="homogeneous", llm_tp=tp, llm_dp=dp, llm_pp=pp, sequence_parallel=tp > 1)
    elif kind == COLOCATED:
        for language in grids(size):
            for encoder in (grid for grid in grids(size) if grid[2] == 1):
                if language[2] == 1 and encoder != language:
                    yield layout_of(kind, encoder, language)
                # Pipeline stages have windows by default; elsewhere they balance images over the replicas.
                window = None if language[2] > 1 else 2
                if encoder[1] > 1:
                    yield replace(layout_of(kind, encoder, language), encoder_window=window)
    else:
        for ranks in range(1, size):
            yield from (layout_of(kind, encoder, language) for encoder in grids(ranks)
                        for language in grids(size - ranks))


def search(base: RunConfig, kind: str, size: int) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """Return the layouts of a kind that the trainer accepts, and the flags and reason of each that it refuses.

    Encoder ranks that share a lane need a sample each, so such a layout has larger microbatches.

    Args:
        base: the run. Its own layout is ignored.
        kind: one of `KINDS`.
        size: number of ranks.
    """
    found, refused, samples = [], [], base.train.micro_batch_size
    for layout in all_layouts(kind, size):
        sharing = max(layout.encoder_dp // layout.llm_dp, 1)
        for micro_batch_size in dict.fromkeys((samples, samples * sharing)):
            config = replace(base, layout=layout, train=replace(base.train, micro_batch_size=micro_batch_size))
            flags = flags_of(config, base)
            try:
                validate(config, size)
            except ValueError as error:
                refused.append((flags, str(error)))
                continue
            found.append(Candidate(kind, flags, config))
            break
    return found, refused


def given(flags: Sequence[str], kind: str, layouts: Sequence[str], size: int) -> list[Candidate]:
    """Return the layouts that the user names.

    Args:
        flags: flags of the run.
        kind: one of `KINDS`.
        layouts: flags of each layout.
        size: number of ranks.

    Raises:
        ValueError: the trainer refuses a layout, or it has another number of ranks.
    """
    found = []
    for words in layouts:
        config = parse([*flags, *shlex.split(words)])
        needed = num_ranks(config)
        if needed != size:
            raise ValueError(f"--{kind} {words!r} has {needed} ranks, --gpus is {size}")
        validate(config, size)
        found.append(Candidate(kind, words, config))
    return found


def split_efficiency(ranks: Mapping[str, int], work: Mapping[str, float]) -> float:
    """Share of all GPUs that a disjoint layout can use at best: 1 if each grid's share of GPUs is its share of work.

    This is the minimum over grids of (its GPUs / all GPUs) / (its work / all work), because the grid with the fewest
    GPUs for its work sets the pace of all.

    Args:
        ranks: GPUs of each grid.
        work: work of each grid in one unit: FLOPs if grids are equally efficient, else GPU-seconds of their passes.
    """
    all_ranks, all_work = sum(ranks.values()), sum(work.values())
    return min(ranks[name] / all_ranks * all_work / work[name] for name in ranks if work[name] > 0)


def eta_split(config: RunConfig, encoder: str, work: Mapping[str, float]) -> float | None:
    """Return `split_efficiency` of a disjoint layout, or None for other layouts or unknown work.

    Args:
        config: the run.
        encoder: name of its encoder.
        work: work of each module.
    """
    layout = config.layout
    if layout.layout != "disjoint" or not work:
        return None
    ranks = {encoder: layout.encoder_tp * layout.encoder_dp * layout.encoder_pp,
             "language": layout.llm_tp * layout.llm_dp * layout.llm_pp}
    return split_efficiency(ranks, work)


def by_split(candidates: Sequence[Candidate], encoder: str, work: Mapping[str, float]) -> list[Candidate]:
    """Sort disjoint layouts: the best split first, then the least parallelism inside a module."""
    def order(candidate: Candidate) -> tuple[float, int, int]:
        layout = candidate.config.layout
        efficiency = eta_split(candidate.config, encoder, work) or 0.0
        return -round(efficiency, 6), layout.llm_tp * layout.llm_pp, layout.encoder_tp * layout.encoder_pp

    return sorted(candidates, key=order)
