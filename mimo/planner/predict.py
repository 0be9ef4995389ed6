"""Predicts step time and memory of a run on one layout from costs and sample sizes. Plain Python.

The time of the passes is simulated event by event for a few iterations of the run's own samples. Reduction of
gradients, the optimizer and the host's own time are added to it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from statistics import fmean

from mimo.config.trainer import RunConfig
from mimo.config.validate import ROW_LENGTHS, layers_of_stages, num_microbatches, row_multiple, share_with_graphs
from mimo.grid.dry_run import parameters_per_rank
from mimo.grid.lanes import has_eight_bit_pixels, row_length
from mimo.grid.spec import GridSpec, Layout, lane_shares
from mimo.grid.windows import BACKWARD_COST, WindowSchedule, deal_in_order, deal_iteration
from mimo.planner.costs import GIB, LATENCY_S, Costs
from mimo.planner.simulation import BACKWARD, FORWARD, Action, Stage, links_of, simulate
from mimo.planner.workload import Microbatches, SampleSize, iterations, longest_in_windows
from mimo.protocols import LANGUAGE

# Most lanes that are simulated, those with the most work.
MAX_LANES = 4
# Most lanes whose samples are read. With more lanes, which are alike, a layout with fewer replicas stands for them.
LANES_WITH_DATA = 8
# Most microbatches of an iteration that are simulated, or four for each pipeline stage if that is more.
SHORT_ITERATION = 16
# Most iterations and most passes that are simulated, but at least one iteration.
MAX_ITERATIONS, MAX_PASSES = 4, 1000
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


def predict(config: RunConfig, layout: Layout, costs: Costs, samples: Sequence[SampleSize]) -> Prediction:
    """Predict a run on one layout.

    Args:
        config: the run, with the layout's flags.
        layout: its layout, which the trainer accepts.
        costs: costs of the model.
        samples: sizes of the first samples; repeated if an iteration has more.
    """
    step = Step(config, layout, costs)
    batches = step.batches(samples)
    lanes, count, short = step.sampled.num_lanes, step.num_microbatches, len(batches[0])
    after = {"optimizer": step.optimizer_s(), "gradient reduction": step.reduction_s(), "host": costs.profile.step_s}
    parts: dict[str, float] = defaultdict(float, after)
    seconds = bound = sum(after.values())
    for batch in batches:
        programs = step.programs(batch)
        timeline = simulate(programs, step.transfer_s)
        busy = timeline.busy_s[timeline.last]
        whole, longer = timeline.seconds, 1.0
        if short < count:
            # Each further microbatch is assumed to add as much as the mean of half of these, between the two ends.
            ends = simulate(step.programs([*batch[: short // 2 - 1], batch[-1]]), step.transfer_s)
            each = (whole - ends.seconds) / (short - short // 2)
            longer = 1 + each * (count - short) / whole
        bound += step.bound_s(batch, programs) * longer / len(batches)
        for label, spent in busy.items():
            parts[label or "passes"] += spent * longer / len(batches)
        parts["waiting"] += (whole - sum(busy.values())) * longer / len(batches)
        seconds += whole * longer / len(batches)
    tokens = fmean(sum(sample.num_tokens for microbatch in batch for lane in microbatch for sample in lane)
                   for batch in batches) * layout.num_lanes / lanes * count / short
    memory, images, fullest = step.memory(batches)
    return Prediction(seconds, bound, tokens / seconds / layout.world_size, memory / GIB, fullest, images / GIB,
                      {name: value for name, value in parts.items() if value})


class Step:
    """One training step of a layout, whose arguments are those of `predict`.

    Attributes:
        sampled: the layout with few enough lanes to read the samples of each.
        pass_cost: costs of a microbatch of the language model whose rows have --seq-length tokens.
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
        language, self._row_multiple = layout.language, row_multiple(config, layout)
        self._language = partial(costs.language, language.tp, config.train.micro_batch_size, language.ep, language.cp,
                                 graphs=share_with_graphs(config))
        self.pass_cost = self._language()
        self.layers = layers_of_stages(config, layout)
        recomputed = config.model.recompute_num_layers
        self.recomputed = tuple(
            0 if config.model.recompute != "full" else min(recomputed or count, count) for count in self.layers)

    def batches(self, samples: Sequence[SampleSize]) -> list[Microbatches]:
        """Return the iterations to simulate, shortened if they have many microbatches."""
        lanes, rows, stages = self.sampled.num_lanes, self.config.train.micro_batch_size, self.layout.language.pp
        count = min(self.num_microbatches, max(4 * stages, SHORT_ITERATION))
        samples = list(islice(cycle(samples), max(lanes * count * rows, len(samples))))
        found = iterations(samples, self.config, self.layout, num_lanes=lanes, num_microbatches=count)
        most = MAX_PASSES // (min(lanes, MAX_LANES) * stages * count)
        return list(islice(found, min(max(most, 1), MAX_ITERATIONS)))

    def _padded(self, tokens: int) -> int:
        """Return the length of rows, the longest of which has so many tokens."""
        return row_length(tokens, self._row_multiple, self.config.train.seq_length)

    # Time of single passes.

    def language_s(self, kind: str, stage: int, length: int) -> float:
        """Return the seconds of a pass on a stage of the language model over rows of this length."""
        layers, cost = self.layers[stage], self._language(length)
        is_last = stage == len(self.layers) - 1
        if kind == FORWARD:
            return layers * cost.forward_s + (cost.ends_forward_s if is_last else 0.0)
        again = self.recomputed[stage] * cost.forward_s if cost.backward_s else 0.0
        return layers * cost.backward_s + again + (cost.ends_backward_s if is_last else 0.0)

    def encoder_s(self, kind: str, encoder: GridSpec, images: Iterable[int], calls: int = 1) -> float:
        """Return the seconds of a pass over images, given by their tokens, on one stage of an encoder replica."""
        cost = self.costs.encoder(encoder.name, encoder.tp)
        flops = [self.costs.image_flops(encoder.name, tokens) for tokens in images]
        if not flops:
            return 0.0
        forward = calls * cost.call_forward_s + sum(each[0] for each in flops) / cost.forward_flops_s
        if kind == FORWARD:
            return forward / encoder.pp
        if not any(each[1] for each in flops):
            return 0.0
        trains = self.costs.trains(encoder.name)
        # A frozen encoder leaves only the projector's backward pass.
        calls = calls if trains else 0
        again = forward if self.config.model.encoder_recompute == "full" and trains else 0.0
        return (calls * cost.call_backward_s + sum(each[1] for each in flops) / cost.backward_flops_s + again
                ) / encoder.pp

    # Time of all passes.

    def least_s(self, images: Mapping[int, float], longest: Sequence[int]) -> float:
        """Return a lower bound of the seconds of a step.

        Images are dealt evenly, and no rank waits for more than the first and the last passes of the stages before it.
        A mean sample has so many `images` with each number of tokens. `longest` has the tokens of the longest row of
        some microbatches.
        """
        layout, count, rows = self.layout, self.num_microbatches, Counter(map(self._padded, longest))
        stages = [sum(number * self.language_s(kind, stage, length) for length, number in rows.items()
                      for kind in PASSES) / len(longest) for stage in range(layout.language.pp)]
        samples = self.config.train.micro_batch_size * count * layout.num_lanes
        encoding = [samples / encoder.dp * sum(
                        number * self.encoder_s(kind, encoder, [tokens], calls=0)
                        for tokens, number in images.items() for kind in PASSES)
                    for encoder in layout.encoders]
        bounds = [*encoding, *(count * each + sum(stages[:stage]) for stage, each in enumerate(stages))]
        if layout.kind == "homogeneous":
            bounds.append(count * stages[0] + sum(encoding))
        elif layout.kind == "colocated":
            bounds.append(count * fmean(stages) + sum(encoding))
        return max(bounds) + self.reduction_s() + self.optimizer_s() + self.costs.profile.step_s

    def bound_s(self, batch: Microbatches, programs: Mapping[Hashable, Sequence[Action]]) -> float:
        """Return the seconds of the passes of one iteration without transfers, with images that are shared out evenly.

        A colocated layout of n replicas needs at least `T + max(0, E / n - idle)`. T is the time of 1F1B without
        images, E the time of the images, with one call for each window, and `idle` the idle time of the busiest stage
        in T. `programs` are those of the iteration's workers.
        """
        if self.layout.kind != "colocated":
            return simulate(programs).seconds
        (encoder,), count, stages = self.sampled.encoders, len(batch), self.layout.language.pp
        images = [tokens for microbatch in batch for lane in microbatch for tokens in self._images(lane)]
        windows = count if self.layout.encoder_window is None else len(self._window_schedule(count).windows)
        forward, backward = (self.encoder_s(kind, encoder, images, calls=windows * encoder.dp) / encoder.dp
                             for kind in PASSES)
        encoding = forward * (1 + self.recomputed_images([batch])) + backward
        lengths = max(self._lengths(batch), key=sum)
        passes = [partial(self._stage_s, lengths, stage) for stage in range(stages)]
        alone = simulate({stage: Stage(stage, stages, count, each, *links_of(LANGUAGE, stage, stages)).program()
                          for stage, each in enumerate(passes)})
        busiest = max(sum(each(kind, number) for number in range(count) for kind in PASSES) for each in passes)
        return max(alone.seconds, busiest + encoding)

    def _lengths(self, batch: Microbatches) -> list[list[int]]:
        """Return the lengths of the rows of each microbatch, lane by lane."""
        return [[self._padded(max(sample.num_tokens for sample in rows)) for rows in lane]
                for lane in zip(*batch, strict=True)]

    def _stage_s(self, lengths: Sequence[int], stage: int, kind: str, microbatch: int) -> float:
        return self.language_s(kind, stage, lengths[microbatch])

    def programs(self, batch: Microbatches) -> dict[Hashable, list[Action]]:
        """Return the program of each worker for one iteration."""
        kind, layout = self.layout.kind, self.layout
        if not layout.encoders or kind == "homogeneous":
            return self._homogeneous(batch)
        if kind == "disjoint":
            return self._disjoint(batch)
        if layout.encoder_window is not None:
            return self._windows(batch)
        return self._colocated(batch)

    def transfer_s(self, key: Hashable) -> float:
        """Return the seconds of a transfer of a microbatch's activations or gradients; images take as long here."""
        moved = self.config.train.micro_batch_size * self.config.train.seq_length * self.costs.hidden_size * 2
        across = self.layout.world_size > self.costs.gpu.gpus_per_node
        bandwidth = self.costs.gpu.network_gb_s if across else self.costs.gpu.link_gb_s
        return LATENCY_S + moved / (self.layout.language.tp * self.layout.language.cp) / (bandwidth * 1e9)

    def _images(self, lane: Sequence[SampleSize]) -> list[int]:
        return [tokens for sample in lane for tokens in sample.images]

    def _heaviest(self, batch: Microbatches, group: int) -> list[range]:
        """Return the groups of `group` neighbouring lanes with the most work, few enough to simulate."""
        work = [sum(self.language_s(kind, 0, length) for length in lengths for kind in PASSES)
                + sum(self.encoder_s(kind, encoder, self._images(microbatch[lane])) for kind in PASSES
                      for encoder in self.layout.encoders for microbatch in batch)
                for lane, lengths in enumerate(self._lengths(batch))]
        groups = [range(first, first + group) for first in range(0, self.sampled.num_lanes, group)]
        groups.sort(key=lambda lanes: -sum(work[lane] for lane in lanes))
        return groups[: max(MAX_LANES // group, 1)]

    def _replicas(self, encoder: GridSpec, lanes: Iterable[int]) -> list[int]:
        """Return the replicas of an encoder that encode images of these lanes."""
        num_lanes = self.sampled.num_lanes
        return sorted({lane * encoder.dp // num_lanes + part for lane in lanes
                       for part in range(max(encoder.dp // num_lanes, 1))})

    def _replica_s(self, kind: str, encoder: GridSpec, replica: int, microbatch: Sequence[Sequence[SampleSize]]
                   ) -> float:
        """Return the seconds of a replica's pass over its images of a microbatch, which is given by lanes."""
        shares = lane_shares(encoder.dp, self.sampled.num_lanes, self.config.train.micro_batch_size, replica)
        return self.encoder_s(kind, encoder, [
            tokens for share in shares for tokens in self._images(microbatch[share.lane][share.start:share.stop])])

    def _homogeneous(self, batch: Microbatches) -> dict[Hashable, list[Action]]:
        programs: dict[Hashable, list[Action]] = {}
        stages, lengths = self.layout.language.pp, self._lengths(batch)
        for (lane,) in self._heaviest(batch, 1):
            def first(kind: str, microbatch: int, lane: int = lane) -> float:
                return self._stage_s(lengths[lane], 0, kind, microbatch) + sum(
                    self.encoder_s(kind, encoder, self._images(batch[microbatch][lane]))
                    for encoder in self.layout.encoders)

            for stage in range(stages):
                seconds = partial(self._stage_s, lengths[lane], stage) if stage else first
                programs[lane, stage] = Stage(
                    stage, stages, len(batch), seconds, *links_of(lane, stage, stages)).program()
        return programs

    def _colocated(self, batch: Microbatches) -> dict[Hashable, list[Action]]:
        """Return the programs of a layout whose replicas encode the images of their own lanes in every microbatch.

        Lanes that share a replica wait for each other.
        """
        (encoder,), lengths = self.sampled.encoders, self._lengths(batch)
        programs: dict[Hashable, list[Action]] = {}
        for members in self._heaviest(batch, max(self.sampled.num_lanes // encoder.dp, 1)):
            replicas = self._replicas(encoder, members)
            for lane in members:
                program = programs[lane] = []
                for microbatch in range(len(batch)):
                    for kind in PASSES:
                        slowest_s = max(self._replica_s(kind, encoder, replica, batch[microbatch])
                                        for replica in replicas)
                        images = Action(slowest_s, posts=((members, kind, microbatch),),
                                        awaits=((members, kind, microbatch),), label=ENCODING)
                        own = Action(self._stage_s(lengths[lane], 0, kind, microbatch), label=LANGUAGE)
                        program += [images, own] if kind == FORWARD else [own, images]
        return programs

    def _windows(self, batch: Microbatches) -> dict[Hashable, list[Action]]:
        """Return the programs of a layout in which all replicas encode a window together; a stage is one worker."""
        (encoder,), stages = self.sampled.encoders, self.layout.language.pp
        whole = self._window_schedule(len(batch))
        forward, backward = self._window_seconds(batch, whole)
        lengths = longest_in_windows(self._lengths(batch), whole.windows)
        programs: dict[Hashable, list[Action]] = {}
        for stage in range(stages):
            schedule = replace(whole, stage=stage)
            mine = slice(0, encoder.dp) if whole.together else slice(
                stage * encoder.dp // stages, (stage + 1) * encoder.dp // stages)

            def turn(windows: tuple[list[int], list[int]], stage: int = stage, mine: slice = mine) -> Iterator[Action]:
                finished, encoded = windows
                # Seconds of work that each replica has left before the replicas wait for each other.
                left = [0.0] * len(forward[0][mine])
                for window in finished:
                    key = ("gradients", window)
                    yield Action(max(left, default=0.0), (key,) if stage == 0 else (), (key,), ENCODING)
                    left = backward[window][mine]
                if finished and not encoded:
                    yield Action(max(left, default=0.0), label=ENCODING)
                for window in encoded:
                    key = ("features", window)
                    left = [before + own for before, own in zip(left, forward[window][mine], strict=True)]
                    yield Action(max(left, default=0.0), (key,), (key,) if stage == 0 else (), ENCODING)
                    left = [0.0] * len(left)

            def at(due: Callable[[int], tuple[list[int], list[int]]], take: Callable[..., Iterator[Action]] = turn
                   ) -> Callable[[int], Iterator[Action]]:
                return lambda microbatch: take(due(microbatch))

            passes = Stage(
                stage, stages, len(batch), partial(self._stage_s, lengths, stage), *links_of(0, stage, stages),
                label=LANGUAGE,
                before_forward=at(schedule.before), after_forward=at(schedule.after),
                after_backward=at(schedule.after_backward), before_backward=at(schedule.before_backward)).program()
            programs[stage] = [*turn(([], schedule.at_start())), *passes, *turn((schedule.at_end(), []))]
        return programs

    def _window_schedule(self, count: int) -> WindowSchedule:
        """Return the first stage's windows of an iteration of `count` microbatches."""
        return WindowSchedule(self.layout.encoder_window or count, 0, self.layout.language.pp, count,
                              together=self.layout.encoder_spans_stages)

    def _window_seconds(self, batch: Microbatches, schedule: WindowSchedule) -> tuple[list[list[float]], ...]:
        """Return the seconds of the forward and of the backward passes of each window, by replica."""
        (encoder,), chunk = self.sampled.encoders, self.config.layout.encoder_chunk
        cost, again = self.costs.encoder(encoder.name, encoder.tp), self.recomputed_images([batch])
        windows = [[image for microbatch in window for lane in batch[microbatch] for sample in lane
                    for image in sample.whole_images] for window in schedule.windows]
        each = {image: tuple(self.encoder_s(kind, encoder, image, calls=0) for kind in PASSES)
                for image in {image for images in windows for image in images}}
        costs = [[each[image][0] for image in images] for images in windows]
        if self.config.layout.encoder_balance:
            owners = deal_iteration(costs, schedule, encoder.dp,
                                    backward=BACKWARD_COST if self.costs.trains(encoder.name) else 0.0)
        else:
            owners = [deal_in_order(images, encoder.dp) for images in costs]
        found: tuple[list[list[float]], ...] = [], []
        for images, replicas in zip(windows, owners, strict=True):
            forward, backward, count = ([0.0] * encoder.dp for _ in range(3))
            for image, replica in zip(images, replicas, strict=True):
                forward[replica] += each[image][0]
                backward[replica] += each[image][1] + again * each[image][0]
                count[replica] += 1
            calls = [math.ceil(mine / chunk) if chunk else bool(mine) for mine in count]
            for seconds, call_s, into in ((forward, cost.call_forward_s, found[0]),
                                          (backward, cost.call_backward_s, found[1])):
                into.append([own + number * call_s for own, number in zip(seconds, calls, strict=True)])
        return found

    def _disjoint(self, batch: Microbatches) -> dict[Hashable, list[Action]]:
        """Return the programs of a layout in which the encoder's stages precede those of the language model."""
        (encoder,), language, count = self.sampled.encoders, self.layout.language, len(batch)
        stages, ahead = encoder.pp + language.pp, self.config.layout.encoder_run_ahead
        trains = self.costs.trains(encoder.name) or self.costs.trains("projector")
        programs: dict[Hashable, list[Action]] = {}
        lengths = self._lengths(batch)
        for members in self._heaviest(batch, max(self.sampled.num_lanes // encoder.dp, 1)):
            replicas = self._replicas(encoder, members)
            links = {(replica, lane): ("bridge", replica, lane) for replica in replicas for lane in members}
            for replica in replicas:
                for stage in range(encoder.pp):
                    def encode(kind: str, microbatch: int, replica: int = replica) -> float:
                        return self._replica_s(kind, encoder, replica, batch[microbatch])

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
                        encoder.pp + stage, stages, count, partial(self._stage_s, lengths[lane], stage), into, after,
                        label=LANGUAGE, sends_gradients=trains or stage > 0,
                        buffered=into if ahead and stage == 0 else ()).program()
        return programs

    # Time after the passes.

    def optimizer_s(self) -> float:
        """Return the seconds of the optimizer step on the rank that updates most parameters."""
        is_sharded = self.config.optim.use_distributed_optimizer

        def seconds(module: str, grid: GridSpec, stage: int) -> float:
            dense, experts = ((count / (replicas if is_sharded else 1), replicas)
                              for count, replicas in self.parameters(module, grid, stage))
            weights = parameters_per_rank(
                [replace(shape, shape=(1,)) for shape in self.costs.shapes[module] if shape.split == "expert"],
                grid, stage) / (experts[1] if is_sharded else 1)
            return self.costs.optimizer_s(dense[0] + experts[0], weights)

        return self._most_of_a_rank(seconds)

    def reduction_s(self) -> float:
        """Return the seconds of gradient reduction and parameter gather that do not overlap with passes."""
        ddp = self.config.ddp

        def seconds(module: str, grid: GridSpec, stage: int) -> float:
            total = sum(self.costs.reduction_s(count, replicas, grid.tp * grid.dp * grid.cp)
                        for count, replicas in self.parameters(module, grid, stage))
            overlaps = ddp.overlap_grad_reduce if module == LANGUAGE else ddp.encoder_ddp_overlap
            # The last bucket and the gather of parameters remain.
            return total / 2 if overlaps else total

        return self._most_of_a_rank(seconds)

    def _most_of_a_rank(self, seconds: Callable[[str, GridSpec, int], float]) -> float:
        """Return the most seconds that any rank needs for all of its modules that train."""
        return max(sum(seconds(*module) for module in modules if self.costs.trains(module[0]))
                   for _, modules in self.places())

    # Memory.

    def memory(self, batches: Sequence[Microbatches]) -> tuple[float, float, str]:
        """Return the peak bytes of the fullest rank, how many of them are for images, and the name of that rank."""
        found = []
        known: dict[tuple[str, int], float] = {}
        sent, received, features = self._image_bytes(batches)
        for name, modules in self.places():
            total, images = self.costs.profile.base_gib * GIB, 0.0
            for module, grid, stage in modules:
                total += self.state_bytes(module, grid, stage)
                if module == LANGUAGE:
                    total += self._language_bytes(stage)
                    continue
                if (module, stage) not in known:
                    known[module, stage] = max(self._encoder_bytes(grid, stage, batches), default=0.0)
                images += known[module, stage]
            # Only the first stage reads lanes, but every rank encodes.
            images += (sent + features if modules[0][2] == 0 else 0.0) + received
            found.append((total + images, images, name))
        return max(found)

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
        shapes = self.costs.shapes[module]
        experts = [shape for shape in shapes if shape.split == "expert"]
        others = [shape for shape in shapes if shape.split != "expert"]
        return [(parameters_per_rank(others, grid, stage), grid.dp * grid.cp),
                (parameters_per_rank(experts, grid, stage), grid.expt_dp)]

    def state_bytes(self, module: str, grid: GridSpec, stage: int) -> float:
        """Return the bytes of weights, gradients and optimizer state of one module on a rank."""
        bf16, total = self.config.model.bf16, 0.0
        for count, replicas in self.parameters(module, grid, stage):
            total += count * (2 if bf16 else 4)
            if self.costs.trains(module):
                gradients = 4 if self.config.ddp.grad_reduce_in_fp32 or not bf16 else 2
                shards = max(replicas, 1) if self.config.optim.use_distributed_optimizer else 1
                total += count * (gradients + self.config.optim.bytes_per_parameter(bf16) / shards)
        return total

    def _language_bytes(self, stage: int) -> float:
        cost, stages = self.pass_cost, self.layout.language.pp
        if not cost.backward_s:
            return 0.0
        kept = min(self.num_microbatches, stages - stage)
        again = self.recomputed[stage]
        total = kept * ((self.layers[stage] - again) * cost.layer_bytes + again * cost.recomputed_bytes)
        # The layer that is being recomputed has all its activations.
        total += cost.layer_bytes if again else 0.0
        if self.config.model.cuda_graphs:  # input, output and its gradient, for each length of rows
            total += kept * 3 * cost.recomputed_bytes * ((self.config.data.row_lengths or ROW_LENGTHS) + 1) / 2
        return total + (cost.ends_bytes if stage == stages - 1 else 0.0)

    def _encoder_bytes(self, grid: GridSpec, stage: int, batches: Sequence[Microbatches]) -> Iterator[float]:
        """Yield the most bytes that images keep for their backward passes at any moment of each iteration."""
        cost, gib = self.costs.encoder(grid.name, grid.tp), self.config.layout.encoder_activation_gib
        for patches in self._kept_patches(grid, stage, batches):
            kept, inputs = (max(patches) * each / grid.pp for each in (cost.layer_bytes, cost.recomputed_bytes))
            if not self.costs.trains(grid.name):
                yield max(patches) * self.costs.projector_bytes(grid.name)[0]
            elif self.config.model.encoder_recompute == "full":
                yield inputs
            else:
                yield kept if gib is None else min(kept, gib * GIB + inputs)

    def _image_bytes(self, batches: Sequence[Microbatches]) -> tuple[float, float, float]:
        """Return the most bytes of the first windows: pixels of a lane's reader and of a replica, features of a lane.

        Context-parallel ranks divide the features, tensor-parallel ones do not.
        """
        if self.layout.encoder_window is None:
            return 0.0, 0.0, 0.0
        (encoder,), tokens = self.sampled.encoders, self.costs.provider.token_spec(self.config.model_family)
        each = tokens.num_channels * (1 if has_eight_bit_pixels(self.config, self.costs.provider)
                                      else 2 if self.config.model.bf16 else 4)
        _, width = self.costs.projector_bytes(encoder.name)
        sent, received, features, cp = 0.0, 0.0, 0.0, self.layout.language.cp
        for batch in batches:
            schedule = self._window_schedule(len(batch))
            first = [microbatch for window in schedule.first_windows for microbatch in schedule.windows[window]]
            # With a shortened iteration, the whole one has more pixels if all its images travel at the start.
            longer = self.num_microbatches / len(batch) if len(first) == len(batch) else 1.0
            sizes = [[size for microbatch in first for size in self._images(batch[microbatch][lane])]
                     for lane in range(self.sampled.num_lanes)]
            lanes = [sum(each * (math.prod(tokens.image_shape) if tokens.image_size else size * tokens.size_multiple**2)
                         for size in own) * longer for own in sizes]
            sent, received = max(sent, *lanes), max(received, sum(lanes) / encoder.dp)
            features = max(features, *(sum(self.costs.image_patches(encoder.name, size) for size in own)
                                       * longer * width / cp for own in sizes))
        return sent, received, features

    def recomputed_images(self, batches: Sequence[Microbatches]) -> float:
        """Return the share of the encoder's layers that is recomputed because of --encoder-activation-gib."""
        gib = self.config.layout.encoder_activation_gib
        (encoder,) = self.layout.encoders
        if gib is None or self.config.model.encoder_recompute == "full" or not self.costs.trains(encoder.name):
            return 0.0
        each = self.costs.encoder(encoder.name, encoder.tp).layer_bytes
        over = [max(1 - gib * GIB / (kept * each), 0.0) for patches in self._kept_patches(encoder, 0, batches)
                for kept in patches if kept]
        return fmean(over) if over else 0.0

    def _kept_patches(self, grid: GridSpec, stage: int, batches: Sequence[Microbatches]) -> Iterator[list[float]]:
        """Yield the patches whose activations a rank keeps at each moment of each iteration, on its fullest replica."""
        if not self.costs.trains(grid.name) and not self.costs.projector_bytes(grid.name)[0]:
            return
        stages = self.layout.language.pp
        window, lanes, rows = self.layout.encoder_window, self.sampled.num_lanes, self.config.train.micro_batch_size
        replicas, dp = [[(lane, 0, rows)] for lane in range(lanes)], self.sampled.grids[grid.name].dp
        if window is not None:
            size = window or self.num_microbatches
            # Without pipeline stages, a window is finished before the next one is encoded.
            kept = size if stages == 1 else stages + 2 * size - 1
            replicas = [[(lane, 0, rows) for lane in range(lanes)]]
        elif self.layout.kind == "homogeneous":
            kept = stages
        else:
            ahead = self.config.layout.encoder_run_ahead + self.config.train.encoder_prefetch_depth
            kept = grid.pp + stages - stage + ahead if self.layout.kind == "disjoint" else 1
            replicas = [[(share.lane, share.start, share.stop) for share in lane_shares(dp, lanes, rows, replica)]
                        for replica in range(dp)]
        kept = min(kept, self.num_microbatches)
        seen = min(kept, min(map(len, batches)))  # fewer in a shortened iteration
        # Microbatches between two moments; windows without stages do not overlap.
        apart = seen if window is not None and stages == 1 else 1
        sizes = {tokens for batch in batches for microbatch in batch for lane in microbatch for sample in lane
                 for tokens in sample.images}
        lengths = {tokens: self.costs.image_patches(grid.name, tokens) for tokens in sizes}
        for batch in batches:
            # Fused attention keeps nothing that grows with the square of the patches, so bytes grow with their number.
            patches = [[sum(lengths[tokens] for lane, start, stop in replica
                            for tokens in self._images(microbatch[lane][start:stop])) for microbatch in batch]
                       for replica in replicas]
            moments = [max(sum(each[first : first + seen]) for each in patches) * kept / seen
                       for first in range(0, len(batch) - seen + 1, apart)]
            if window is not None:
                # Images are whole, so the fullest replica has up to half an image more than the mean.
                half = max((sum(lengths[tokens] for tokens in image) for microbatch in batch for lane in microbatch
                            for sample in lane for image in sample.whole_images), default=0.0) / 2
                moments = [each / dp + half for each in moments]
            yield moments
