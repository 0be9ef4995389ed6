"""Search the layouts of a model on a number of ranks, and propose variants of those that were tried. Plain data.

Layouts that differ only in what `Variants` changes form a group. A group takes these steps, each from its best
configuration so far:

1. encoder windows of 1, 2 and all microbatches;
2. cuts of a pipeline around the one that FLOPs suggest (`--llm-pp-layout`);
3. if windows run out of memory, `--encoder-activation-gib`: first 0, then what that leaves free;
4. if nothing fits, the least `--recompute-num-layers` that does, found from the peak memory of runs that fit and by
   bisection, with and without `--encoder-recompute full`;
5. twice the samples a microbatch, and twice as many again if that was faster.

An encoder that every tensor-parallel rank computes in full is not among the layouts of the trainer. In its place stands
the colocated layout in which these ranks share the samples of a microbatch, which does the same work once.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mimo.config.cli import parse
from mimo.config.trainer import LayoutConfig, RunConfig
from mimo.config.validate import layers_of_stages, num_microbatches, validate
from mimo.grid.layout import build_layout
from mimo.grid.spec import Layout
from mimo.planner.candidates import COLOCATED, DISJOINT, HOMOGENEOUS, cuts, flags_of, grids
from scripts.training_runs import num_ranks

KINDS = (HOMOGENEOUS, COLOCATED, DISJOINT)
WINDOWS = (2, 1, 0)
MOST_FITS = 5
# Share of the memory that tensors may fill: the rest is for communication, libraries and gaps.
USABLE = 0.94


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

    Cuts of pipelines, other windows, recomputation and larger microbatches come later (`Variants`).
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


@dataclass(frozen=True)
class Trial:
    """A run of the search.

    Attributes:
        candidate: layout and flags of the run.
        tokens_per_s: its speed; None if it has none.
        is_full: whether it ran out of memory.
        peak_gib: high-water mark of its memory.
    """

    candidate: Candidate
    tokens_per_s: float | None
    is_full: bool = False
    peak_gib: float = 0.0


@dataclass(frozen=True)
class Work:
    """Relative time of the parts of a model.

    Attributes:
        encoder: the encoder.
        layers: all layers of the language model.
        head: its logits.
    """

    encoder: float
    layers: float
    head: float


def next_recomputation(peaks: Mapping[int, float | None], layers: int, memory_gib: float | None) -> int | None:
    """Return the number of recomputed layers to try next, on the way to the least that fits. None: there is no more.

    Args:
        peaks: peak memory by number of recomputed layers of a stage; None where memory ran out. Without recomputation
            it has.
        layers: layers of the largest stage.
        memory_gib: memory that may be filled; None if unknown.
    """
    if layers not in peaks:
        return layers
    fitting = sorted(number for number, peak in peaks.items() if peak is not None)
    if not fitting or len(peaks) >= MOST_FITS:
        return None
    most, least = fitting[0], max((number for number, peak in peaks.items() if peak is None), default=0)
    if most - least <= max(1, layers // 16):
        return None
    guess = (least + most) // 2
    if len(fitting) > 1 and memory_gib is not None:
        small, large = peaks[fitting[0]], peaks[fitting[1]]
        assert small is not None and large is not None
        if small > large:
            guess = most - int((memory_gib - small) * (fitting[1] - fitting[0]) / (small - large))
    return min(max(guess, least + 1), most - 1)


class Variants:
    """Proposes further runs.

    Args:
        base: the run; its layout is ignored.
        size: number of ranks.
        memory_gib: memory of a rank; None if unknown.
        num_cuts: cuts of each pipeline to try.

    Attributes:
        refused: flags and reason of each variant that the trainer refuses.
    """

    def __init__(self, base: RunConfig, size: int, memory_gib: float | None, num_cuts: int) -> None:
        self._base, self._size, self._num_cuts = base, size, num_cuts
        self._memory_gib = None if memory_gib is None else USABLE * memory_gib
        self.refused: list[tuple[str, str]] = []

    def next(self, trials: Sequence[Trial], work: Work | None) -> list[Candidate]:
        """Return what to run next; nothing once every group has taken all steps.

        Args:
            trials: all runs of the search so far.
            work: time of the parts of the model; None if unknown. Then no cuts are tried.
        """
        groups: dict[tuple[Any, ...], list[Trial]] = {}
        for trial in trials:
            groups.setdefault(_group(trial.candidate), []).append(trial)
        # What was refused once is not tried again.
        known = {trial.candidate.flags for trial in trials} | {flags for flags, _ in self.refused}
        found: list[Candidate] = []
        steps: tuple[Callable[[list[Trial]], Iterator[Candidate | None]], ...] = (
            self._windows, lambda group: self._cuts(group, work), self._budgets, self._recomputation,
            self._microbatches)
        for group in groups.values():
            for step in steps:
                new = [candidate for candidate in step(group) if candidate and candidate.flags not in known]
                found += {candidate.flags: candidate for candidate in new}.values()
                if new:
                    break
        return found

    def _windows(self, group: list[Trial]) -> Iterator[Candidate | None]:
        first = group[0].candidate
        if first.config.layout.layout == "colocated" and _window(first.config) is not None:
            for window in WINDOWS:
                if window < num_microbatches(first.config) and window != _window(first.config):
                    yield self._changed(first, layout={"encoder_window": window})

    def _cuts(self, group: list[Trial], work: Work | None) -> Iterator[Candidate | None]:
        origin = _best(group) or group[0]
        layout = origin.candidate.config.layout
        if layout.llm_pp == 1 or work is None or any(trial.candidate.config.layout.llm_pp_layout for trial in group):
            return
        (layers,) = layers_of_stages(self._base, build_layout(LayoutConfig(), 0, ("vision",)))
        layer = work.layers / layers
        encoder = work.encoder / layer if layout.layout == "homogeneous" else 0.0
        tried = cuts(layers, layout.llm_pp, encoder, work.head / layer)
        for cut in tried[:self._num_cuts]:
            if len(set(cut)) > 1:
                yield self._changed(origin.candidate, layout={"llm_pp_layout": ",".join(map(str, cut))})

    def _budgets(self, group: list[Trial]) -> Iterator[Candidate | None]:
        """Propose `--encoder-activation-gib` for every window that runs out of memory."""
        for trial in group:
            config = trial.candidate.config
            if not trial.is_full or _window(config) is None or config.layout.encoder_activation_gib is not None:
                continue
            same = {other.candidate.config.layout.encoder_activation_gib: other for other in group
                    if _same_but(other.candidate.config, config, "encoder_activation_gib")}
            if 0.0 not in same:
                yield self._changed(trial.candidate, layout={"encoder_activation_gib": 0.0})
            elif not same[0.0].is_full and self._memory_gib is not None and len(same) < 4:
                above = [gib for gib, other in same.items() if gib and other.is_full]
                room = min([self._memory_gib - same[0.0].peak_gib, *(gib / 2 for gib in above)])
                gib = math.floor(2 * room) / 2
                if gib > 0 and len(above) == len(same) - 2:
                    yield self._changed(trial.candidate, layout={"encoder_activation_gib": gib})

    def _recomputation(self, group: list[Trial]) -> Iterator[Candidate | None]:
        """Propose the least recomputation that fits, if nothing does without it."""
        plain = [trial for trial in group if trial.candidate.config.model.recompute == "none"]
        if not all(trial.is_full for trial in plain) or not plain:
            return
        origin = plain[0].candidate
        layers = max(layers_of_stages(origin.config, _layout(origin.config, self._size)))
        windowed = _window(origin.config) is not None
        for encoder in ("none",) if windowed else ("none", "full"):
            peaks: dict[int, float | None] = {}
            for trial in group:
                config = trial.candidate.config
                if (config.model.recompute == "full" and config.model.encoder_recompute == encoder
                        and config.layout == origin.config.layout and config.train == origin.config.train
                        and (trial.is_full or trial.tokens_per_s is not None)):
                    peaks[config.model.recompute_num_layers or layers] = None if trial.is_full else trial.peak_gib
            number = next_recomputation(peaks, layers, self._memory_gib)
            if number is not None:
                yield self._changed(origin, model={
                    "recompute": "full", "recompute_num_layers": None if number == layers else number,
                    "encoder_recompute": encoder})

    def _microbatches(self, group: list[Trial]) -> Iterator[Candidate | None]:
        """Propose larger microbatches for the fastest configuration, four times as large at most."""
        best = _best(group)
        if best is None:
            return
        config, least = best.candidate.config, min(trial.candidate.config.train.micro_batch_size for trial in group)
        samples = 2 * config.train.micro_batch_size
        if samples > 4 * least:
            return
        larger = self._changed(best.candidate, train={"micro_batch_size": samples})
        yield larger
        did_not_fit = larger and any(trial.is_full and trial.candidate.flags == larger.flags for trial in group)
        if did_not_fit and config.model.recompute_num_layers is not None:
            yield self._changed(best.candidate, train={"micro_batch_size": samples},
                                model={"recompute_num_layers": None})

    def _changed(self, candidate: Candidate, **changes: Mapping[str, Any]) -> Candidate | None:
        """Return a candidate with other flags, or None if the trainer refuses them."""
        config = replace(candidate.config, **{
            section: replace(vars(candidate.config)[section], **fields) for section, fields in changes.items()})
        flags = flags_of(config, self._base)
        try:
            validate(config, self._size)
        except ValueError as error:
            if flags not in (known for known, _ in self.refused):
                self.refused.append((flags, str(error)))
            return None
        return Candidate(candidate.kind, flags, config)


def _layout(config: RunConfig, size: int) -> Layout:
    # Whatever the encoder's name is.
    return build_layout(config.layout, size, ("vision",))


def _window(config: RunConfig) -> int | None:
    """Microbatches of an encoder window; None without windows."""
    return _layout(config, 0).encoder_window


def _group(candidate: Candidate) -> tuple[Any, ...]:
    layout = candidate.config.layout
    return (candidate.kind, layout.layout, layout.encoder_tp, layout.encoder_dp, layout.encoder_pp, layout.llm_tp,
            layout.llm_dp, layout.llm_pp, _window(candidate.config) is None)


def _best(group: Sequence[Trial]) -> Trial | None:
    ended = [trial for trial in group if trial.tokens_per_s is not None]
    return max(ended, key=lambda trial: trial.tokens_per_s or 0.0) if ended else None


def _same_but(one: RunConfig, other: RunConfig, field: str) -> bool:
    """Whether two runs differ in one flag of the layout at most."""
    return replace(one, layout=replace(one.layout, **{field: None})) == replace(
        other, layout=replace(other.layout, **{field: None}))
