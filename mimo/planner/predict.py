"""Predicts step time and memory of a run on one layout from costs and sample sizes. Plain Python.

The time of the passes is simulated event by event for a few iterations of the run's own samples. Reduction of
gradients, the optimizer and the host's own time are added to it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import cycle, islice
from statistics import fmean

from mimo.config.trainer import RunConfig
from mimo.config.validate import layers_of_stages, num_microbatches, row_multiple, share_with_graphs
from mimo.grid.dry_run import parameters_per_rank
from mimo.grid.lanes import row_length
from mimo.grid.spec import GridSpec, LaneShare, Layout, lane_shares
from mimo.grid.windows import WindowSchedule
from mimo.planner.activations import Windows, peak
from mimo.planner.costs import FP8_COPY_BYTES, GIB, STATIC, Costs
from mimo.planner.shapes import multiplies_in_fp8
from mimo.planner.simulation import BACKWARD, FORWARD, Action, Stage, Work, links_of, simulate
from mimo.planner.transfers import transfers
from mimo.planner.workload import (
    Microbatches,
    SampleSize,
    iterations,
    longest_in_windows,
    order_of,
)
from mimo.protocols import LANGUAGE, ParameterShape

# Most lanes that are simulated, those with the most work.
MAX_LANES = 4
# Most lanes whose samples are read. With more lanes, which are alike, a layout with fewer replicas stands for them.
LANES_WITH_DATA = 8
# Most microbatches of an iteration that are simulated, or four for each pipeline stage if that is more.
SHORT_ITERATION = 16
# The same if they are ordered by length. The longest follow each other then, and need more memory the more there are.
ORDERED_ITERATION = 64
# Most iterations and most passes that are simulated, but at least one iteration.
MAX_ITERATIONS, MAX_PASSES = 4, 1000
# Share of the expected calls of an encoder that a lower bound counts, because the simulated samples may have fewer.
SURE_CALLS = 0.75
ENCODING = "encoding"
PASSES = (FORWARD, BACKWARD)


@dataclass(frozen=True)
class Prediction:
    """Expected speed and memory of a layout.

    Attributes:
        step_s: seconds of a step, the mean over the simulated iterations.
        bound_s: the same if transfers between ranks took no time, and if the images of a colocated layout were shared
            out evenly and filled the time in which a pipeline waits, as far as they fit into it.
        tokens_per_s: tokens of text and images without padding, per GPU.
        memory_gib: peak memory of the fullest rank.
        fullest: name of the fullest rank.
        encoder_gib: part of its memory that activations of images take.
        parts_s: seconds of a step of the rank that is done last, by their purpose.
    """

    step_s: float
    bound_s: float
    tokens_per_s: float
    memory_gib: float
    fullest: str
    encoder_gib: float
    parts_s: Mapping[str, float] = field(default_factory=dict)


def predict(config: RunConfig, layout: Layout, costs: Costs, samples: Sequence[SampleSize], step: Step | None = None
            ) -> Prediction:
    """Predict a run on one layout.

    Args:
        config: the run, with the layout's flags.
        layout: its layout, which the trainer accepts.
        costs: costs of the model.
        samples: sizes of the first samples; repeated if an iteration has more.
        step: a `Step` of the first three arguments, if there is one.
    """
    step = step or Step(config, layout, costs)
    every = step.batches(samples)
    batches = every[: step.num_simulated]
    lanes, count, short = step.sampled.num_lanes, step.num_microbatches, len(batches[0])
    after = {"optimizer": step.optimizer_s(), "gradient reduction": step.reduction_s(), "host": costs.profile.step_s}
    parts: dict[str, float] = defaultdict(float, after)
    seconds = bound = sum(after.values())
    for batch in batches:
        programs = step.programs(batch)
        timeline = simulate(programs, transfers(step, batch))
        busy = timeline.busy_s[timeline.last]
        whole, longer = timeline.seconds, 1.0
        if short < count:
            # Each further microbatch is assumed to add as much as the mean of half of these, between the two ends. If
            # they are ordered by length, every other one stands for all.
            half = [*batch[: short - 2 : 2], batch[-1]] if step.is_ordered else [*batch[: short // 2 - 1], batch[-1]]
            each = (whole - simulate(step.programs(half), transfers(step, half)).seconds) / (short - len(half))
            longer = 1 + each * (count - short) / whole
        bound += step.bound_s(batch, programs) * longer / len(batches)
        for label, spent in busy.items():
            parts[label or "passes"] += spent * longer / len(batches)
        parts["waiting"] += (whole - sum(busy.values())) * longer / len(batches)
        seconds += whole * longer / len(batches)
    tokens = fmean(sum(sample.num_tokens for microbatch in batch for lane in microbatch for sample in lane)
                   for batch in batches) * layout.num_lanes / lanes * count / short
    memory, images, fullest = step.memory(every, from_start=True)
    return Prediction(seconds, bound, tokens / seconds / layout.world_size, memory / GIB, fullest, images / GIB,
                      {name: value for name, value in parts.items() if value})


class Step:
    """One training step of a layout, whose arguments are those of `predict`.

    Attributes:
        sampled: the layout with few enough lanes to read the samples of each.
        language_cost: returns the costs of a microbatch of the language model, by the length of its rows.
        pass_cost: those of rows of --seq-length tokens.
        is_ordered: whether microbatches are ordered by their lengths.
    """

    def __init__(self, config: RunConfig, layout: Layout, costs: Costs) -> None:
        self.config, self.layout, self.costs = config, layout, costs
        # Lanes are alike, so the replicas of each module are divided by the largest common factor that leaves enough.
        common = math.gcd(layout.num_lanes, *(encoder.dp for encoder in layout.encoders))
        factor = max((each for each in range(1, common + 1)
                      if common % each == 0 and layout.num_lanes // each >= min(LANES_WITH_DATA, layout.num_lanes)),
                     default=1)
        self.sampled = replace(
            layout, language=replace(layout.language, dp=layout.num_lanes // factor),
            encoders=tuple(replace(encoder, dp=encoder.dp // factor) for encoder in layout.encoders))
        self.num_microbatches = num_microbatches(config)
        self.is_ordered = order_of(config, layout).by_length
        language, self._row_multiple = layout.language, row_multiple(config, layout)
        self.language_cost = cache(partial(
            costs.language, language.tp, config.train.micro_batch_size, language.ep, language.cp,
            graphs=share_with_graphs(config),
            exchange=STATIC if config.model.moe_static_rows else config.model.moe_token_dispatcher_type,
            splits_rows=config.layout.sequence_parallel))
        self.pass_cost = self.language_cost()
        self.layers = layers_of_stages(config, layout)
        self._windows_of: dict[int, Windows] = {}  # by the identity of the iteration, which `Windows` keeps alive
        self._batches: tuple[Sequence[SampleSize], list[Microbatches]] | None = None
        self._memory: tuple[Sequence[Microbatches], tuple[tuple[float, float, str], ...]] | None = None
        recomputed = config.model.recompute_num_layers
        self.recomputed = tuple(
            0 if config.model.recompute != "full" else min(recomputed or count, count) for count in self.layers)

    def batches(self, samples: Sequence[SampleSize]) -> list[Microbatches]:
        """Return the iterations to predict, shortened if they have many microbatches."""
        if self._batches is None or self._batches[0] is not samples:
            lanes, count = self.sampled.num_lanes, self._num_predicted
            repeated = list(islice(cycle(samples), max(lanes * count * self.config.train.micro_batch_size,
                                                       len(samples))))
            found = iterations(repeated, self.config, self.layout, num_lanes=lanes, num_microbatches=count)
            self._batches = samples, list(found)
        return self._batches[1]

    def reuse(self, other: Step) -> None:
        """Take the iterations of another step, and how their images are dealt, where this one has the same."""
        if (self.layout is not other.layout or self.config.train is not other.config.train
                or (self.is_ordered, self._row_multiple) != (other.is_ordered, other._row_multiple)):
            return
        self._batches = other._batches
        if (self.config.layout == other.config.layout
                and self.config.model.encoder_recompute == other.config.model.encoder_recompute):
            self._windows_of = other._windows_of

    @property
    def num_simulated(self) -> int:
        """How many iterations are simulated at most; memory is predicted from all."""
        passes = min(self.sampled.num_lanes, MAX_LANES) * self.layout.language.pp * self._num_predicted
        return min(max(MAX_PASSES // passes, 1), MAX_ITERATIONS)

    @property
    def _num_predicted(self) -> int:
        """Microbatches of an iteration, or of the part of it that is simulated."""
        most = ORDERED_ITERATION if self.is_ordered else SHORT_ITERATION
        return min(self.num_microbatches, max(4 * self.layout.language.pp, most))

    def _padded(self, tokens: int) -> int:
        """Return the length of rows, the longest of which has so many tokens."""
        return row_length(tokens, self._row_multiple, self.config.train.seq_length)

    # Time of single passes.

    def language_s(self, kind: str, stage: int, length: int) -> float:
        """Return the seconds of a pass on a stage of the language model over rows of this length."""
        layers, cost = self.layers[stage], self.language_cost(length)
        is_last = stage == len(self.layers) - 1
        if kind == FORWARD:
            return layers * cost.forward_s + (cost.ends_forward_s if is_last else 0.0)
        again = self._again_s(stage, cost.forward_s, cost.mtp_forward_s) if cost.backward_s else 0.0
        return layers * cost.backward_s + again + (cost.ends_backward_s if is_last else 0.0)

    def launch_s(self, kind: str, stage: int, length: int) -> float:
        """Return the seconds in which the host launches a pass on a stage of the language model."""
        layers, cost, index = self.layers[stage], self.language_cost(length), kind == BACKWARD
        launching = layers * cost.launch_s[index] + (cost.mtp_launch_s[index] if stage == len(self.layers) - 1 else 0.0)
        repeats = index and cost.backward_s
        return launching + (self._again_s(stage, cost.launch_s[0], cost.mtp_launch_s[0]) if repeats else 0.0)

    def _again_s(self, stage: int, layer_s: float, mtp_s: float) -> float:
        """Return the seconds of repeated forward passes, from those of a layer and of multi-token prediction."""
        is_last = stage == len(self.layers) - 1
        return self.recomputed[stage] * layer_s + (mtp_s if is_last and self.config.model.recompute == "full" else 0.0)

    def encoder_s(self, kind: str, encoder: GridSpec, images: Iterable[int], calls: int = 1) -> float:
        """Return the seconds of a pass over images, given by their tokens, on one stage of an encoder replica."""
        cost = self.costs.encoder(encoder.name, encoder.tp)
        each = [self.costs.image_s(encoder.name, encoder.tp, tokens) for tokens in images]
        forward, again, backward = (sum(passes) for passes in zip(*each, strict=True)) if each else (0.0, 0.0, 0.0)
        if kind == FORWARD:
            return (calls * cost.forward.call_s + forward if each else 0.0) / encoder.pp
        if not backward:
            return 0.0
        if self.costs.trains(encoder.name):
            backward += calls * cost.backward.call_s
            if self.config.model.encoder_recompute == "full":
                backward += calls * cost.again.call_s + again
        # A frozen encoder leaves only the projector's backward pass.
        return backward / encoder.pp

    def encoder_launch_s(self, kind: str, encoder: GridSpec, images: Iterable[int]) -> float:
        """Return the seconds in which the host launches a pass over images on one stage of an encoder replica."""
        if not any(True for _ in images):
            return 0.0
        forward, backward = self.costs.encoder_launch_s(encoder.name, encoder.tp)
        again = forward if self.config.model.encoder_recompute == "full" and backward else 0.0
        return (forward if kind == FORWARD else backward + again) / encoder.pp

    # Time of all passes.

    def least_s(self, images: Mapping[int, float], share: float, longest: Counter[int]) -> float:
        """Return a lower bound of the seconds of a step.

        Images are dealt evenly, and no rank waits for more than the first and the last passes of the stages before it.

        Args:
            images: how many images of each number of tokens a mean sample has.
            share: share of the samples that have images.
            longest: counts of the tokens of the longest rows of some microbatches.
        """
        layout, count, rows = self.layout, self.num_microbatches, Counter[int]()
        for tokens, number in longest.items():
            rows[self._padded(tokens)] += number
        # Of the device and of the host, of which each may be the limit.
        device, host = ([count * sum(number * seconds(kind, stage, length) for length, number in rows.items()
                                     for kind in PASSES) / longest.total() for stage in range(layout.language.pp)]
                        for seconds in (self.language_s, self.launch_s))
        stages = [max(both) for both in zip(device, host, strict=True)]
        bounds = [each + sum(stages[:stage]) / count for stage, each in enumerate(stages)]
        samples = self.config.train.micro_batch_size * count * layout.num_lanes
        for encoder in layout.encoders:
            encoding = samples / encoder.dp * sum(
                number * self.encoder_s(kind, encoder, [tokens], calls=0)
                for tokens, number in images.items() for kind in PASSES)
            launching = self._calls(encoder, sum(images.values()), share) * sum(
                self.encoder_launch_s(kind, encoder, images) for kind in PASSES)
            beside = {"homogeneous": (device[0], host[0]), "colocated": (fmean(device), fmean(host))}.get(
                layout.kind, (0.0, 0.0))
            bounds += [encoding + beside[0], launching + beside[1]]
        return max(bounds) + self.reduction_s() + self.optimizer_s() + self.costs.profile.step_s

    def _calls(self, encoder: GridSpec, images: float, share: float) -> float:
        """Return the least calls of an encoder replica in a step, for a mean sample as in `least_s`."""
        each = self.config.train.micro_batch_size * self.layout.num_lanes / encoder.dp
        if self.layout.encoder_window is not None:
            # Images are dealt to replicas that have none yet.
            calls = sum(min(images * each * len(window), 1.0)
                        for window in self.window_schedule(self.num_microbatches).windows)
        else:
            calls = self.num_microbatches * min(each, 1.0) * (1 - (1 - share) ** max(each, 1.0))
        return SURE_CALLS * calls

    def bound_s(self, batch: Microbatches, programs: Mapping[Hashable, Sequence[Action]]) -> float:
        """Return the seconds of the passes of one iteration without transfers, with images that are shared out evenly.

        A colocated layout of n replicas needs at least `T + max(0, E / n - idle)`. T is the time of 1F1B without
        images, E the time of the images, with one call for each window, and `idle` the idle time of the busiest stage
        in T. `programs` are those of the iteration's workers.
        """
        if self.layout.kind != "colocated":
            return simulate(programs).seconds
        (encoder,), count, stages = self.sampled.encoders, len(batch), self.layout.language.pp
        images = [tokens for microbatch in batch for lane in microbatch for tokens in self.images(lane)]
        dealt = None if self.layout.encoder_window is None else self.windows(batch)
        calls = encoder.dp * (count if dealt is None else len(dealt.schedule.windows))
        encoding = sum(self.encoder_s(kind, encoder, images, calls=calls) for kind in PASSES) / encoder.dp
        if dealt is not None and self.config.model.encoder_recompute != "full":
            encoding += dealt.again_s() / encoder.dp
        lengths = max(self.lengths(batch), key=sum)
        passes = [partial(self._stage_work, lengths, stage) for stage in range(stages)]
        alone = simulate({stage: Stage(stage, stages, count, each, *links_of(LANGUAGE, stage, stages)).program()
                          for stage, each in enumerate(passes)})
        busiest = max(sum(each(kind, number).seconds for number in range(count) for kind in PASSES) for each in passes)
        return max(alone.seconds, busiest + encoding)

    def lengths(self, batch: Microbatches) -> list[list[int]]:
        """Return the lengths of the rows of each microbatch, lane by lane."""
        return [[self._padded(max(sample.num_tokens for sample in rows)) for rows in lane]
                for lane in zip(*batch, strict=True)]

    def _stage_work(self, lengths: Sequence[int], stage: int, kind: str, microbatch: int) -> Work:
        return Work(self.language_s(kind, stage, lengths[microbatch]), self.launch_s(kind, stage, lengths[microbatch]))

    def programs(self, batch: Microbatches) -> dict[Hashable, list[Action]]:
        """Return the program of each worker for one iteration."""
        kind, layout = self.layout.kind, self.layout
        if not layout.encoders or kind == "homogeneous":
            return self._homogeneous(batch)
        if kind == "disjoint":
            return self._disjoint(batch)
        if layout.encoder_window is not None:
            return self._windowed(batch)
        return self._colocated(batch)

    def images(self, lane: Sequence[SampleSize]) -> list[int]:
        return [tokens for sample in lane for tokens in sample.images]

    def _heaviest(self, batch: Microbatches, group: int) -> list[range]:
        """Return the groups of `group` neighbouring lanes with the most work, few enough to simulate."""
        work = [sum(self.language_s(kind, 0, length) for length in lengths for kind in PASSES)
                + sum(self.encoder_s(kind, encoder, self.images(microbatch[lane])) for kind in PASSES
                      for encoder in self.layout.encoders for microbatch in batch)
                for lane, lengths in enumerate(self.lengths(batch))]
        groups = [range(first, first + group) for first in range(0, self.sampled.num_lanes, group)]
        groups.sort(key=lambda lanes: -sum(work[lane] for lane in lanes))
        return groups[: max(MAX_LANES // group, 1)]

    def _replicas(self, encoder: GridSpec, lanes: Iterable[int]) -> list[int]:
        """Return the replicas of an encoder that encode images of these lanes."""
        num_lanes = self.sampled.num_lanes
        return sorted({lane * encoder.dp // num_lanes + part for lane in lanes
                       for part in range(max(encoder.dp // num_lanes, 1))})

    def shares(self, encoder: GridSpec, replica: int) -> tuple[LaneShare, ...]:
        """Return the parts of lanes that a replica of an encoder encodes."""
        return lane_shares(encoder.dp, self.sampled.num_lanes, self.config.train.micro_batch_size, replica)

    def _replica_work(self, kind: str, encoder: GridSpec, replica: int, microbatch: Sequence[Sequence[SampleSize]]
                      ) -> Work:
        """Return a replica's pass over its images of a microbatch, which is given by lanes."""
        images = [tokens for share in self.shares(encoder, replica)
                  for tokens in self.images(microbatch[share.lane][share.start:share.stop])]
        return Work(self.encoder_s(kind, encoder, images), self.encoder_launch_s(kind, encoder, images))

    def _homogeneous(self, batch: Microbatches) -> dict[Hashable, list[Action]]:
        programs: dict[Hashable, list[Action]] = {}
        stages, lengths = self.layout.language.pp, self.lengths(batch)
        for (lane,) in self._heaviest(batch, 1):
            def first(kind: str, microbatch: int, lane: int = lane) -> Work:
                images = self.images(batch[microbatch][lane])
                work = self._stage_work(lengths[lane], 0, kind, microbatch)
                for encoder in self.layout.encoders:
                    work = work.and_then(Work(self.encoder_s(kind, encoder, images),
                                              self.encoder_launch_s(kind, encoder, images)))
                return work

            for stage in range(stages):
                work = partial(self._stage_work, lengths[lane], stage) if stage else first
                programs[lane, stage] = Stage(stage, stages, len(batch), work, *links_of(lane, stage, stages)).program()
        return programs

    def _colocated(self, batch: Microbatches) -> dict[Hashable, list[Action]]:
        """Return the programs of a layout whose replicas encode the images of their own lanes in every microbatch.

        Lanes that share a replica wait for each other.
        """
        (encoder,), lengths = self.sampled.encoders, self.lengths(batch)
        programs: dict[Hashable, list[Action]] = {}
        for members in self._heaviest(batch, max(self.sampled.num_lanes // encoder.dp, 1)):
            replicas = self._replicas(encoder, members)
            for lane in members:
                program = programs[lane] = []
                for microbatch in range(len(batch)):
                    for kind in PASSES:
                        slowest = max(self._replica_work(kind, encoder, replica, batch[microbatch])
                                      for replica in replicas)
                        images = Action(slowest.seconds, posts=((members, kind, microbatch),),
                                        awaits=((members, kind, microbatch),), label=ENCODING, host_s=slowest.host_s)
                        seconds, host_s = self._stage_work(lengths[lane], 0, kind, microbatch)
                        own = Action(seconds, label=LANGUAGE, host_s=host_s)
                        program += [images, own] if kind == FORWARD else [own, images]
        return programs

    def _windowed(self, batch: Microbatches) -> dict[Hashable, list[Action]]:
        """Return the programs of a layout in which all replicas encode a window together; a stage is one worker."""
        (encoder,), stages, dealt = self.sampled.encoders, self.layout.language.pp, self.windows(batch)
        whole, (forward, backward) = dealt.schedule, dealt.work()
        lengths = longest_in_windows(self.lengths(batch), whole.windows)
        programs: dict[Hashable, list[Action]] = {}
        for stage in range(stages):
            schedule = replace(whole, stage=stage)
            mine = slice(0, encoder.dp) if whole.together else slice(
                stage * encoder.dp // stages, (stage + 1) * encoder.dp // stages)

            def turn(windows: tuple[list[int], list[int]], stage: int = stage, mine: slice = mine) -> Iterator[Action]:
                finished, encoded = windows
                # Work that each replica has left before the replicas wait for each other.
                left = [Work()] * len(forward[0][mine])

                def action(posts: tuple[Hashable, ...] = (), awaits: tuple[Hashable, ...] = ()) -> Action:
                    return Action(max(work.seconds for work in left), posts, awaits, ENCODING,
                                  max(work.host_s for work in left))

                for window in finished:
                    key = ("gradients", window)
                    yield action((key,) if stage == 0 else (), (key,))
                    left = backward[window][mine]
                if finished and not encoded:
                    yield action()
                for window in encoded:
                    key = ("features", window)
                    left = [before.and_then(own) for before, own in zip(left, forward[window][mine], strict=True)]
                    yield action((key,), (key,) if stage == 0 else ())
                    left = [Work()] * len(left)

            def at(due: Callable[[int], tuple[list[int], list[int]]], take: Callable[..., Iterator[Action]] = turn
                   ) -> Callable[[int], Iterator[Action]]:
                return lambda microbatch: take(due(microbatch))

            passes = Stage(
                stage, stages, len(batch), partial(self._stage_work, lengths, stage), *links_of(0, stage, stages),
                label=LANGUAGE, before_forward=at(schedule.before), after_forward=at(schedule.after),
                after_backward=at(schedule.after_backward), before_backward=at(schedule.before_backward)).program()
            programs[stage] = [*turn(([], schedule.at_start())), *passes, *turn((schedule.at_end(), []))]
        return programs

    def window_schedule(self, count: int) -> WindowSchedule:
        """Return the first stage's windows of an iteration of `count` microbatches."""
        return WindowSchedule(self.layout.encoder_window or count, 0, self.layout.language.pp, count,
                              together=self.layout.encoder_spans_stages)

    def windows(self, batch: Microbatches) -> Windows:
        """Return how the images of an iteration are dealt."""
        if id(batch) not in self._windows_of:
            self._windows_of[id(batch)] = Windows(self, batch)
        return self._windows_of[id(batch)]

    def _disjoint(self, batch: Microbatches) -> dict[Hashable, list[Action]]:
        """Return the programs of a layout in which the encoder's stages precede those of the language model."""
        (encoder,), language, count = self.sampled.encoders, self.layout.language, len(batch)
        stages, ahead = encoder.pp + language.pp, self.config.layout.encoder_run_ahead
        trains = self.costs.trains(encoder.name) or self.costs.trains("projector")
        programs: dict[Hashable, list[Action]] = {}
        lengths = self.lengths(batch)
        for members in self._heaviest(batch, max(self.sampled.num_lanes // encoder.dp, 1)):
            replicas = self._replicas(encoder, members)
            links = {(replica, lane): ("bridge", replica, lane) for replica in replicas for lane in members}
            for replica in replicas:
                for stage in range(encoder.pp):
                    def encode(kind: str, microbatch: int, replica: int = replica) -> Work:
                        return self._replica_work(kind, encoder, replica, batch[microbatch])

                    before, after = links_of(("encoder", replica), stage, encoder.pp)
                    out = tuple(links[replica, lane] for lane in members) if stage == encoder.pp - 1 else after
                    programs["encoder", replica, stage] = Stage(
                        stage, stages, count, encode, before, out, label=ENCODING, takes_gradients=trains,
                        run_ahead=ahead, prefetch=self.config.train.encoder_prefetch_depth,
                        buffered=out if ahead and stage == encoder.pp - 1 else ()).program()
            for lane in members:
                for stage in range(language.pp):
                    before, after = links_of(lane, stage, language.pp)
                    into = tuple(links[replica, lane] for replica in replicas) if stage == 0 else before
                    programs[lane, stage] = Stage(
                        encoder.pp + stage, stages, count, partial(self._stage_work, lengths[lane], stage), into,
                        after, label=LANGUAGE, sends_gradients=trains or stage > 0,
                        buffered=into if ahead and stage == 0 else ()).program()
        return programs

    # Time after the passes.

    def optimizer_s(self) -> float:
        """Return the seconds of the optimizer step on the rank that updates most parameters."""
        is_sharded = self.config.optim.use_distributed_optimizer

        def seconds(module: str, grid: GridSpec, stage: int) -> float:
            dense, experts = ((count / (replicas if is_sharded else 1), replicas)
                              for count, replicas in self.trained(module, grid, stage))
            weights = parameters_per_rank(
                [replace(shape, shape=(1,)) for shape in self.costs.trained(module) if shape.split == "expert"],
                grid, stage) / (experts[1] if is_sharded else 1)
            return self.costs.optimizer_s(dense[0] + experts[0], weights)

        return self._most_of_a_rank(seconds)

    def reduction_s(self) -> float:
        """Return the seconds of gradient reduction and parameter gather that do not overlap with passes."""
        ddp = self.config.ddp

        def seconds(module: str, grid: GridSpec, stage: int) -> float:
            total = sum(self.costs.reduction_s(count, replicas, grid.tp * grid.dp * grid.cp)
                        for count, replicas in self.trained(module, grid, stage))
            overlaps = ddp.overlap_grad_reduce if module == LANGUAGE else ddp.encoder_ddp_overlap
            # The last bucket and the gather of parameters remain.
            return total / 2 if overlaps else total

        return self._most_of_a_rank(seconds)

    def _most_of_a_rank(self, seconds: Callable[[str, GridSpec, int], float]) -> float:
        """Return the most seconds that any rank needs for all of its modules that train."""
        return max(sum(seconds(*module) for module in modules) for _, modules in self.places())

    # Memory.

    def memory(self, batches: Sequence[Microbatches], *, from_start: bool = False) -> tuple[float, float, str]:
        """Return the peak bytes of the fullest rank, how many of them are for images, and the name of that rank.

        With `from_start`, the iterations are the first ones of a run. With CUDA graphs, these need more memory than
        later ones, until the run has graphs of all lengths of rows. A run without room for that drops its graphs, so
        they raise the result to no more than a plan may use. The run itself may come closer to the GPU's memory.
        """
        if self._memory is None or self._memory[0] is not batches:
            self._memory = batches, peak(self, batches)
        return self._memory[1][from_start]

    def in_flight(self, stage: int) -> int:
        """Return the most microbatches that a stage of the language model has between their two passes."""
        return min(self.num_microbatches, self.layout.language.pp - stage)

    def places(self) -> Iterator[tuple[str, list[tuple[str, GridSpec, int]]]]:
        """Yield the kinds of ranks: their name, and their modules with grid and stage."""
        layout = self.layout
        for stage in range(layout.language.pp):
            modules = [(LANGUAGE, layout.language, stage)]
            name = f"language stage {stage}" if layout.language.pp > 1 else "language"
            if layout.kind == "colocated" or (layout.kind == "homogeneous" and stage == 0):
                modules += [(encoder.name, encoder, 0) for encoder in layout.encoders]
                name = " and ".join([name, *(encoder.name for encoder in layout.encoders)])
            yield name, modules
        if layout.kind == "disjoint":
            for encoder in layout.encoders:
                for stage in range(encoder.pp):
                    yield (f"{encoder.name} stage {stage}" if encoder.pp > 1 else encoder.name,
                           [(encoder.name, encoder, stage)])

    def parameters(self, module: str, grid: GridSpec, stage: int) -> list[tuple[int, int]]:
        """Count a rank's dense and expert parameters, each with the number of ranks that have the same ones."""
        return _by_replicas(self.costs.shapes[module], grid, stage)

    def trained(self, module: str, grid: GridSpec, stage: int) -> list[tuple[int, int]]:
        """Count the parameters that train, as `parameters` does; a projector may train while its encoder does not."""
        return _by_replicas(self.costs.trained(module), grid, stage)

    def state_bytes(self, module: str, grid: GridSpec, stage: int) -> float:
        """Return the bytes of weights, their FP8 copies, gradients and optimizer state of one module on a rank.

        These are the bytes during passes; see `released_bytes`.
        """
        bf16 = self.config.model.bf16
        total = float(sum(count for count, _ in self.parameters(module, grid, stage)) * (2 if bf16 else 4))
        total -= self.released_bytes(module, grid, stage)
        total += FP8_COPY_BYTES * parameters_per_rank(self.costs.fp8_copies(module), grid, stage)
        gradients = 4 if self.config.ddp.grad_reduce_in_fp32 or not bf16 else 2
        for count, shards in self._shards(module, grid, stage):
            total += count * (gradients + self.config.optim.bytes_per_parameter(bf16) / shards)
        return total

    def moment_bytes(self, module: str, grid: GridSpec, stage: int) -> float:
        """Return those bytes of `state_bytes` that a run has from its first update on."""
        return sum(count * self.config.optim.moment_bytes / shards
                   for count, shards in self._shards(module, grid, stage))

    def _shards(self, module: str, grid: GridSpec, stage: int) -> Iterator[tuple[int, int]]:
        """Yield numbers of trained parameters, and of the ranks over which their optimizer state is divided."""
        for count, replicas in self.trained(module, grid, stage):
            yield count, max(replicas, 1) if self.config.optim.use_distributed_optimizer else 1

    def released_bytes(self, module: str, grid: GridSpec, stage: int) -> float:
        """Return the bytes of one module's weights that have memory on a rank only during updates."""
        if not self.config.model.fp8_primary_weights:
            return 0.0
        shapes = [shape for shape in self.costs.fp8_copies(module) if multiplies_in_fp8(shape)]
        return 2.0 * parameters_per_rank(shapes, grid, stage)

    def update_bytes(self, module: str, grid: GridSpec, stage: int) -> float:
        """Return the bytes of one module's weights in the buffers that get memory for an update on a rank.

        They contain trained weights outside FP8 products as well, which have other memory during passes.
        """
        if not self.released_bytes(module, grid, stage):
            return 0.0
        return 2.0 * sum(count for count, _ in self.trained(module, grid, stage))


def _by_replicas(shapes: Sequence[ParameterShape], grid: GridSpec, stage: int) -> list[tuple[int, int]]:
    experts = [shape for shape in shapes if shape.split == "expert"]
    others = [shape for shape in shapes if shape.split != "expert"]
    return [(parameters_per_rank(others, grid, stage), grid.dp * grid.cp),
            (parameters_per_rank(experts, grid, stage), grid.expt_dp)]
