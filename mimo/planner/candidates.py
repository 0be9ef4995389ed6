"""Search for the fastest layouts of a model on a number of GPUs. Plain Python."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import batched, islice
from statistics import fmean

from mimo.config.toml_file import flag_words
from mimo.config.trainer import LayoutConfig, ModelConfig, RunConfig, TrainConfig
from mimo.config.validate import (
    can_recompute_some_layers,
    check_data,
    layers_of_stages,
    may_have_graphs,
    row_multiple,
    validate_without_data,
)
from mimo.grid.lanes import row_length
from mimo.grid.layout import divisors
from mimo.grid.spec import GridSpec, Layout
from mimo.planner.costs import GIB, Costs
from mimo.planner.predict import Prediction, Step, predict
from mimo.planner.workload import SampleSize
from mimo.protocols import LANGUAGE

HOMOGENEOUS, COLOCATED, DISJOINT = "homogeneous", "colocated", "disjoint"
# A text model has no encoder to place.
TEXT = "language only"
# Most encoder sizes that are tried on large disjoint layouts, those nearest to the encoder's share of the work.
MAX_ENCODER_SIZES = 6
# Micro-batch sizes that are tried, as multiples of the run's own.
MICRO_BATCHES = (1, 2, 4)
# Prefetch depth of frozen encoders on grids of their own, in microbatches.
USUAL_PREFETCH = 2
# Windows of a colocated layout that are tried, in microbatches; 0: the iteration.
WINDOWS = (1, 2, 4, 0)
# Most sizes of expert parallelism that are tried, those nearest to a node's number of GPUs.
MAX_EXPERT_SIZES = 3
# Most cuts of a pipeline whose memory is looked at, and how many are added if the fastest ones do not fit.
MAX_CUTS, CUTS_THAT_FIT = 60, 2
# On more GPUs than this, fewer of each are tried, as there are more grids.
MANY_GPUS = 16
# Number of layouts that a search has to find, of all kinds together and of each kind.
BEST, BEST_OF_KIND = 20, 6
# A prediction simulates a few iterations, so it may be below the lower bound for a mean sample by this share.
TOLERANCE = 0.05
# CUDA graphs and a dispatcher that the user has not chosen have to make a step shorter by this share.
VARIANT_GAIN = 0.02


@dataclass(frozen=True)
class Candidate:
    """A layout with its prediction.

    Attributes:
        kind: `homogeneous`, `colocated`, `disjoint` or `language only`.
        flags: flags that the layout adds to those of the run.
        config: the run on this layout.
        prediction: expected speed and memory.
        fits: whether the fullest rank has enough memory.
    """

    kind: str
    flags: str
    config: RunConfig
    prediction: Prediction
    fits: bool


def grids(size: int, largest_tp: int | None = None, largest_pp: int | None = None) -> Iterator[tuple[int, int, int]]:
    """Yield all (tp, dp, pp) whose product is `size`, the least split ones first."""
    found = [(tp, size // tp // pp, pp) for tp in divisors(size) if tp <= (largest_tp or size)
             for pp in divisors(size // tp) if pp <= (largest_pp or size)]
    yield from sorted(found, key=lambda grid: (grid[0] * grid[2], grid[2]))


def cuts(num_layers: int, stages: int, first: float, last: float) -> list[tuple[int, ...]]:
    """Return the layers of each stage for all ways to cut a pipeline, ordered by the time of the slowest stage.

    Stages between the first and the last have the same number of layers, as Megatron Core requires.

    Args:
        num_layers: layers of the language model.
        stages: number of stages, at least two.
        first: other work of the first stage, such as an encoder, in units of a layer's time.
        last: other work of the last stage, such as the logits.
    """
    found = []
    for middle in range(1, num_layers // (stages - 2) + 1) if stages > 2 else (0,):
        ends = num_layers - middle * (stages - 2)
        for head in range(1, ends):
            slowest = max(head + first, middle, ends - head + last)
            found.append((slowest, abs(2 * head - ends), (head, *(middle,) * (stages - 2), ends - head)))
    return [cut for _, _, cut in sorted(found)]


def flags_of(config: RunConfig, base: RunConfig) -> str:
    """Return the flags by which a run's layout differs from the default, and its model and batch from `base`.

    They also undo the layout of `base`, whose flags may be in a file that the run reads.
    """
    words = _changed(config.layout, LayoutConfig(), base.layout) or ["--encoder-dp", "1", "--llm-dp", "1"]
    return shlex.join([*words, *_changed(config.model, base.model), *_changed(config.train, base.train)])


def _changed(section: LayoutConfig | ModelConfig | TrainConfig, *others: LayoutConfig | ModelConfig | TrainConfig
             ) -> list[str]:
    """Return the flags of a section whose values differ from those of any of the others."""
    words = []
    for name, value in vars(section).items():
        if any(value != vars(other)[name] for other in others):
            words += flag_words(name, value)
    return words


def _without_variant(kind: str, config: RunConfig) -> tuple[str, LayoutConfig, TrainConfig]:
    """Return what a layout has in common with and without CUDA graphs, recomputation and static rows."""
    return kind, replace(config.layout, encoder_activation_gib=None), config.train


def _handicapped_s(candidate: Candidate) -> float:
    """Return the step of a candidate, made longer by `VARIANT_GAIN` for each choice that has to pay."""
    model = candidate.config.model
    choices = model.cuda_graphs + (model.moe_token_dispatcher_type == "allgather") + model.moe_static_rows
    return candidate.prediction.step_s * (1 + VARIANT_GAIN * choices)


class Found:
    """Predicted layouts.

    Attributes:
        all: every candidate; a layout may have one with and one without CUDA graphs, one with each dispatcher, and one
            with static rows of experts.
        chosen: one candidate for each layout: with CUDA graphs, the dispatcher `allgather` or static rows if that makes
            it faster by `VARIANT_GAIN`, else without.
    """

    def __init__(self) -> None:
        self.all: list[Candidate] = []
        self.chosen: dict[tuple[str, LayoutConfig, TrainConfig], Candidate] = {}

    def add(self, candidate: Candidate) -> None:
        """Add a candidate, unless its windows are the same as with flags that have been added."""
        layout = replace(candidate.config.layout, encoder_window=None)
        if any(candidate.prediction == each.prediction and layout == replace(each.config.layout, encoder_window=None)
               for each in self.all):
            return
        self.all.append(candidate)
        common = _without_variant(candidate.kind, candidate.config)
        self.chosen[common] = min(self.chosen.get(common, candidate), candidate, key=lambda each: (
            not each.fits, _handicapped_s(each)))

    def with_graphs(self, kind: str, config: RunConfig) -> Candidate | None:
        """Return the candidate with CUDA graphs of a layout that has none itself, if there is one."""
        other = self.chosen.get(_without_variant(kind, config))
        return other if other and other.config.model.cuda_graphs > config.model.cuda_graphs else None

    def is_hopeless(self, kind: str, config: RunConfig, least_s: float, best: int) -> bool:
        """Return whether a layout is certain not to be among the best, or to be slower than with CUDA graphs.

        `least_s` is a lower bound of its step for a mean sample, `best` how many of the fastest layouts have to be
        found.
        """
        least_s *= 1 - TOLERANCE
        other = self.with_graphs(kind, config)
        if other is not None:
            if least_s > _handicapped_s(other):
                return True
            without = replace(other.config, model=replace(other.config.model, cuda_graphs=False))
            # Graphs only take time of the host away.
            least_s = max(least_s, other.prediction.step_s) if without == config else least_s
        times = [(_handicapped_s(each), each.kind) for each in self.chosen.values()]
        alike = sorted(seconds for seconds, each in times if each == kind)
        return (len(times) >= best and least_s > sorted(times)[best - 1][0]
                and len(alike) >= BEST_OF_KIND and least_s > alike[BEST_OF_KIND - 1])


class Search:
    """Search for the layouts of a run that fit, with predictions.

    Args:
        base: the run. Its layout is ignored, except for --llm-only, --llm-cp and --cp-comm-type.
        costs: costs of the model.
        samples: sizes of the run's first samples.
        size: number of GPUs.
        best: how many of the fastest layouts that fit have to be among the results.

    Attributes:
        refused: number of layouts that the trainer refuses.
        refusal: the trainer's message about the last one of them.
        slow: number of layouts that were not predicted because they cannot be among the best.
        large: number of layouts that were not predicted because they do not fit.
        others: predictions of layouts that are among the results in another form, with or without CUDA graphs or
            static rows, or with another dispatcher.
    """

    def __init__(self, base: RunConfig, costs: Costs, samples: list[SampleSize], size: int, best: int = BEST) -> None:
        self._best = best
        self.base, self.costs, self.samples, self.size = base, costs, samples, size
        self.encoders = costs.encoders
        self.refused = self.slow = self.large = 0
        self.others: list[Candidate] = []
        self.refusal = ""
        self._latest: Step | None = None
        # Message with which the data set refuses layouts, by (lanes, micro-batch size); empty if it accepts them.
        self._data_refusals: dict[tuple[int, int], str] = {}
        # Tokens of the rows of a mean microbatch.
        multiple = row_multiple(base, Layout("disjoint", 1, (), GridSpec(LANGUAGE)))
        self._longest_of: dict[int, Counter[int]] = {}
        self._mean_length = round(fmean(row_length(longest, multiple, base.train.seq_length)
                                        for longest in self._longest(base.train.micro_batch_size).elements()))
        few = size > MANY_GPUS
        self._micro_batches: tuple[int, ...] = MICRO_BATCHES[:2] if few else MICRO_BATCHES
        if any(sample.is_packed for sample in samples):
            self._micro_batches = (1,)
        self._windows: tuple[int, ...] = (1, 0) if few else WINDOWS
        self._num_encoder_sizes = MAX_ENCODER_SIZES // 2 if few else MAX_ENCODER_SIZES
        self._num_cuts = 1 if few else 5

    def run(self) -> list[Candidate]:
        """Return the layouts that the trainer accepts, the fastest first and those that do not fit last.

        On many GPUs, layouts that do not fit are left out, and so are those that cannot be among the best even if no
        rank ever waits.
        """
        few, found = self.size <= MANY_GPUS, Found()
        slow, large, refused = (set[tuple[str, LayoutConfig, TrainConfig]]() for _ in range(3))
        plausible = list(self._accepted())
        if not few:
            # Graphs first, because layouts without them are often known to be slower then.
            plausible.sort(key=lambda each: (not each[1].model.cuda_graphs, each[3]))
        for kind, config, accepted, least in plausible:
            common = _without_variant(kind, config)
            if not few and found.is_hopeless(kind, config, least, self._best):
                slow.add(common)
                continue
            fitted, fits = self._fitted(config, accepted)
            if not few and (not fits or found.is_hopeless(kind, fitted, least, self._best)):
                (slow if fits else large).add(common)
                continue
            # Checked again, as recomputation may have been added, and only a layout that can run may displace others.
            refusal = self._refusal_of(fitted)
            if refusal:
                self.refusal = refusal
                refused.add(common)
                continue
            found.add(self.candidate(kind, fitted, accepted))
        known, chosen = found.chosen.keys(), list(found.chosen.values())
        self.refused += len(refused - known)
        self.slow, self.large = len(slow - known), len(large - known - slow)
        self.others = [each for each in found.all if all(each is not one for one in chosen)]
        return sorted(chosen, key=lambda each: (not each.fits, each.prediction.step_s))

    def _accepted(self) -> Iterator[tuple[str, RunConfig, Layout, float]]:
        """Yield the runs that the trainer accepts: kind, run, layout, and on many GPUs a lower bound of the step."""
        counts = Counter(tokens for sample in self.samples for tokens in sample.images)
        images = {tokens: number / len(self.samples) for tokens, number in counts.items()}
        share = fmean(bool(sample.images) for sample in self.samples)
        for kind, layout in self._layouts():
            for samples, depth in itertools.product(self._micro_batches, self._prefetch_depths(kind)):
                train = replace(self.base.train, micro_batch_size=self.base.train.micro_batch_size * samples,
                                encoder_prefetch_depth=depth)
                config = replace(self.base, layout=layout, train=train)
                accepted = self.accepted(config)
                if accepted is None:
                    continue
                variants = [config, *self._with_graphs(config)]
                variants += itertools.chain.from_iterable(map(self._with_gathered_tokens, tuple(variants)))
                variants += itertools.chain.from_iterable(map(self._with_static_rows, tuple(variants)))
                for variant in variants:
                    least = 0.0 if self.size <= MANY_GPUS else Step(variant, accepted, self.costs).least_s(
                        images, share, self._longest(train.micro_batch_size))
                    yield kind, variant, accepted, least

    def _with_graphs(self, config: RunConfig) -> Iterator[RunConfig]:
        """Yield a run with CUDA graphs if its flags do not have them, and layers or parts of them may be captured."""
        model = config.model
        gpu = self.costs.gpu
        if model.cuda_graphs or not (gpu.multiplies_packed_experts if self.costs.num_experts else gpu.launches_kernels):
            return
        if may_have_graphs(config) and config.layout.llm_expt_tp == 1:
            yield replace(config, model=replace(model, cuda_graphs=True))

    def _with_gathered_tokens(self, config: RunConfig) -> Iterator[RunConfig]:
        """Yield a run with the dispatcher `allgather` if that can send less, which is only so within a node.

        A token goes to the ranks of its experts and comes back, all in bfloat16, or to all ranks, which return sums.
        """
        model, ranks = config.model, config.layout.llm_ep
        sends_less = ranks * (2 + self.costs.gathered_sum_bytes) < self.costs.top_k * (2 + 2)
        # The trainer refuses it with rows of several lengths that the user has asked for.
        if (model.moe_token_dispatcher_type == "alltoall" and (config.data.row_lengths or 1) == 1
                and 1 < ranks <= self.costs.gpu.gpus_per_node and sends_less):
            yield replace(config, model=replace(model, moe_token_dispatcher_type="allgather"))

    def _with_static_rows(self, config: RunConfig) -> Iterator[RunConfig]:
        """Yield a run whose graphs contain the exchange and the experts, too, if its flags allow it."""
        model = config.model
        if (self.costs.gpu.multiplies_packed_experts and model.cuda_graphs and config.layout.llm_ep > 1
                and model.moe_token_dispatcher_type == "allgather" and not model.moe_static_rows
                and model.moe_gemm in ("auto", "packed") and model.moe_permute_fusion):
            yield replace(config, model=replace(model, moe_static_rows=True))

    def _longest(self, micro_batch_size: int) -> Counter[int]:
        """Count the tokens of the longest sample of each microbatch, if neighbouring samples share one."""
        if micro_batch_size not in self._longest_of:
            self._longest_of[micro_batch_size] = Counter(
                max(sample.num_tokens for sample in rows) for rows in batched(self.samples, micro_batch_size))
        return self._longest_of[micro_batch_size]

    def _prefetch_depths(self, kind: str) -> tuple[int, ...]:
        """Return the prefetch depths to try. They differ from 0 only for a frozen encoder on ranks of its own."""
        if kind != DISJOINT or any(map(self.costs.trains, self.encoders)):
            return (0,)
        return 0, self.base.train.encoder_prefetch_depth or USUAL_PREFETCH

    def _fitted(self, config: RunConfig, layout: Layout) -> tuple[RunConfig, bool]:
        """Add the least recomputation with which a run fits, if it needs any. Returns the run and whether it fits.

        What the run's own flags say about recomputation is kept: --recompute for the language model, and
        --encoder-recompute for the encoder.
        """
        limit, needed = self.costs.gpu.usable_bytes, self._needed(config, layout)
        if needed <= limit:
            return config, True
        # A frozen encoder keeps no activations.
        keeps = config.model.encoder_recompute == "none" and any(map(self.costs.trains, self.encoders))
        if layout.encoder_window is not None and keeps:
            # The activations of images are recomputed first. They get what is left besides their inputs and pixels.
            config = replace(config, layout=replace(config.layout, encoder_activation_gib=0.0))
            left = max(limit - self._needed(config, layout), 0.0)
            config = replace(config, layout=replace(config.layout, encoder_activation_gib=float(left // GIB)))
            return self._recomputed(config, layout, limit)
        found = [self._recomputed(config, layout, limit)]
        if keeps:
            # Without windows there is no budget: an encoder recomputes all its layers or none.
            model = replace(config.model, encoder_recompute="full")
            found.append(self._recomputed(replace(config, model=model), layout, limit))
        fitting = [each for each, fits in found if fits]
        if len(fitting) < 2:
            return (fitting[0], True) if fitting else found[-1]
        return min(fitting, key=lambda each: predict(each, layout, self.costs, self.samples).step_s), True

    def _step(self, config: RunConfig, layout: Layout) -> Step:
        """Return the step of a run. Runs that follow each other share what they have in common."""
        latest = self._latest
        if latest is None or latest.config is not config or latest.layout is not layout:
            self._latest = Step(config, layout, self.costs)
            if latest is not None:
                self._latest.reuse(latest)
            return self._latest
        return latest

    def _needed(self, config: RunConfig, layout: Layout) -> float:
        """Return the bytes that the fullest rank needs."""
        step = self._step(config, layout)
        return step.memory(step.batches(self.samples))[0]

    def _recomputed(self, config: RunConfig, layout: Layout, limit: float) -> tuple[RunConfig, bool]:
        """Recompute the fewest language layers with which a run fits, unless it has --recompute already.

        Returns the run and whether it fits.
        """
        needed, step = self._needed(config, layout), self._step(config, layout)
        if needed <= limit or config.model.recompute != "none":
            return config, needed <= limit
        cost = step.language_cost(max(length for batch in step.batches(self.samples) for lane in step.lengths(batch)
                                      for length in lane))
        # Bytes that each recomputed layer saves. 0 leads to the recomputation of all layers.
        saved = ((cost.layer_bytes - cost.recomputed_bytes) * step.in_flight(0) if can_recompute_some_layers(config)
                 else 0.0)
        layers = max(layers_of_stages(config, layout))
        # One layer more, because the layer that is being recomputed has all its activations.
        count = 1 if saved > 0 else layers
        while True:
            count = min(count + int(max(needed - limit, 0.0) / saved) + 1, layers) if saved > 0 else layers
            model = replace(config.model, recompute="full", recompute_num_layers=count if count < layers else None)
            recomputing = replace(config, model=model)
            needed = self._needed(recomputing, layout)
            if needed <= limit or count == layers:
                return recomputing, needed <= limit

    def _layout_of(self, config: RunConfig) -> Layout | str:
        """Return the layout of a run, or the message with which the trainer refuses it."""
        try:
            return validate_without_data(config, self.size)
        except ValueError as error:
            return str(error)

    def accepted(self, config: RunConfig) -> Layout | None:
        """Return the layout of a run, or None if the trainer refuses it, which is counted."""
        layout = self._layout_of(config)
        if isinstance(layout, Layout):
            return layout
        self.refused, self.refusal = self.refused + 1, layout
        return None

    def _refusal_of(self, config: RunConfig) -> str:
        """Return the message with which the trainer or the data set refuses a run; empty if they accept it."""
        layout = self._layout_of(config)
        if not isinstance(layout, Layout):
            return layout
        # A data set depends on nothing else of a layout.
        key = layout.num_lanes, config.train.micro_batch_size
        if key not in self._data_refusals:
            try:
                check_data(config, layout)
                self._data_refusals[key] = ""
            except ValueError as error:
                self._data_refusals[key] = str(error)
        return self._data_refusals[key]

    def candidate(self, kind: str, config: RunConfig, layout: Layout) -> Candidate:
        prediction = predict(config, layout, self.costs, self.samples, self._step(config, layout))
        return Candidate(kind, flags_of(config, self.base), config, prediction,
                         prediction.memory_gib * GIB <= self.costs.gpu.usable_bytes)

    def _layouts(self) -> Iterator[tuple[str, LayoutConfig]]:
        if not self.encoders:
            for grid in self._grids(self.size):
                yield from ((TEXT, layout) for layout in self._language(*grid, llm_only=self.base.layout.llm_only))
            return
        for grid in self._grids(self.size):
            yield from ((HOMOGENEOUS, layout) for layout in self._language(*grid, layout="homogeneous"))
            yield from ((COLOCATED, layout) for layout in self._colocated(*grid))
        for ranks in self._encoder_sizes():
            yield from ((DISJOINT, layout) for layout in self._disjoint(ranks))

    def _grids(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield all (tp, dp, pp) of a language grid of `size` ranks, with the run's context parallelism."""
        own, rest = divmod(size, self.base.layout.llm_cp)
        return iter(()) if rest else grids(own, self.costs.gpu.gpus_per_node, self.costs.num_layers)

    def _colocated(self, tp: int, dp: int, pp: int) -> Iterator[LayoutConfig]:
        """Yield the layouts of a language grid with windows and with every encoder grid of at most the same tp."""
        for encoder_tp in (each for each in divisors(self.size) if each <= tp):
            encoder_dp = self.size // encoder_tp
            for layout in self._language(tp, dp, pp, layout="colocated", encoder_tp=encoder_tp, encoder_dp=encoder_dp):
                # With pipeline stages or context parallelism windows are needed, so None would be the default window.
                if pp == 1 and layout.llm_cp == 1 and (encoder_tp, encoder_dp) != (tp, dp):
                    yield layout
                if encoder_dp > 1:
                    yield from (replace(layout, encoder_window=window) for window in self._windows)

    def _disjoint(self, ranks: int) -> Iterator[LayoutConfig]:
        """Yield the disjoint layouts whose encoder has `ranks` ranks."""
        for encoder_tp in (each for each in divisors(ranks) if each <= self.costs.gpu.gpus_per_node):
            for tp, dp, pp in self._grids(self.size - ranks):
                yield from self._language(tp, dp, pp, even=True, encoder_tp=encoder_tp, encoder_dp=ranks // encoder_tp)

    def _language(self, tp: int, dp: int, pp: int, *, even: bool = False, **more: object) -> Iterator[LayoutConfig]:
        """Yield the layouts of a language grid with every size of expert parallelism and, unless `even`, cuts."""
        experts = self.costs.num_experts
        given = self.base.layout
        sizes = [ep for ep in divisors(tp * given.llm_cp * dp) if experts % ep == 0] if experts else [1]
        node = self.costs.gpu.gpus_per_node
        # Twice the GPUs of a node are as near as half of them.
        for ep in sorted(sizes, key=lambda ep: max(ep / node, node / ep))[:MAX_EXPERT_SIZES]:
            layout = LayoutConfig(llm_tp=tp, llm_cp=given.llm_cp, cp_comm_type=given.cp_comm_type, llm_dp=dp, llm_pp=pp,
                                  llm_ep=ep, sequence_parallel=tp > 1, **more)  # type: ignore[arg-type]
            if pp == 1 or even:
                yield layout
                continue
            if self.costs.num_layers % pp == 0:
                yield layout
            for cut in self._cuts(layout):
                yield replace(layout, llm_pp_layout=cut)

    def _cuts(self, layout: LayoutConfig) -> list[str]:
        """Return cuts with fewer layers on the first stage, for the encoder, or on the last one, for the logits."""
        layers, stages = self.costs.num_layers, layout.llm_pp
        cost = self.costs.language(layout.llm_tp, self.base.train.micro_batch_size, layout.llm_ep, layout.llm_cp,
                                   self._mean_length,
                                   graphs=float(self.base.model.cuda_graphs and layout.llm_expt_tp == 1))
        layer = cost.forward_s + cost.backward_s
        first = last = 0.0
        if layer > 0:
            last = (cost.ends_forward_s + cost.ends_backward_s) / layer
            if layout.layout == "homogeneous":
                first = self._encoder_s(layout.llm_tp) / layer
        found = [",".join(map(str, cut)) for cut in cuts(layers, stages, first, last) if len(set(cut)) > 1]
        fastest, others = found[: self._num_cuts], found[self._num_cuts : MAX_CUTS]
        if self.size > MANY_GPUS or any(self._fits(layout, cut) for cut in fastest):
            return fastest
        return [*fastest, *islice((cut for cut in others if self._fits(layout, cut)), CUTS_THAT_FIT)]

    def _fits(self, layout: LayoutConfig, cut: str) -> bool:
        """Return whether a layout with a cut fits without recomputation, with the run's micro-batch size."""
        config = replace(self.base, layout=replace(layout, llm_pp_layout=cut),
                         train=replace(self.base.train, encoder_prefetch_depth=0))
        accepted = self._layout_of(config)
        if not isinstance(accepted, Layout):
            return False
        step = Step(config, accepted, self.costs)
        return step.memory(step.batches(self.samples))[0] <= self.costs.gpu.usable_bytes

    def _encoder_s(self, tp: int) -> float:
        """Return the seconds of both passes over the images of a mean microbatch."""
        rows = self.base.train.micro_batch_size
        total = 0.0
        for name in self.encoders:
            for sample in self.samples:
                for tokens in sample.images:
                    forward, _, backward = self.costs.image_s(name, tp, tokens)
                    total += forward + backward
        return total / len(self.samples) * rows

    def _encoder_sizes(self) -> list[int]:
        """Return numbers of ranks for a disjoint layout's encoder, those nearest to its share of the work first."""
        cost = self.costs.language(1, self.base.train.micro_batch_size, length=self._mean_length)
        language = self.costs.num_layers * (cost.forward_s + cost.backward_s)
        language += cost.ends_forward_s + cost.ends_backward_s
        images = self._encoder_s(1)
        share = images / (images + language) * self.size
        nearest = sorted(range(1, self.size), key=lambda ranks: (abs(ranks - share), ranks))
        return list(islice(filter(self._can_split, nearest), self._num_encoder_sizes))

    def _can_split(self, ranks: int) -> bool:
        """Return whether the trainer accepts any disjoint layout whose encoder has `ranks` ranks."""
        batch = self.base.train.global_batch_size // self.base.train.micro_batch_size
        encoders = [ranks // tp for tp in divisors(ranks) if tp <= self.costs.gpu.gpus_per_node]
        # This rules out most numbers without making every layout.
        if not any(batch % dp == 0 and self.costs.num_layers % pp == 0
                   and any(dp % replicas == 0 or replicas % dp == 0 for replicas in encoders)
                   for _, dp, pp in self._grids(self.size - ranks)):
            return False
        train = replace(self.base.train, encoder_prefetch_depth=0)
        return any(isinstance(self._layout_of(replace(self.base, layout=layout, train=train)), Layout)
                   for layout in self._disjoint(ranks))
