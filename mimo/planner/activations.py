"""Memory of activations: what ranks keep at each moment of an iteration, in the order of their work. Plain Python."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from mimo.grid.lanes import has_eight_bit_pixels
from mimo.grid.spec import GridSpec, LaneShare
from mimo.grid.windows import BACKWARD_COST, WindowSchedule, deal_in_order, deal_iteration
from mimo.planner.costs import GIB
from mimo.planner.simulation import BACKWARD, FORWARD, Stage, Work
from mimo.planner.workload import Microbatches
from mimo.protocols import LANGUAGE

if TYPE_CHECKING:
    from mimo.planner.predict import Step

ENCODE, FINISH = "encode", "finish"
# Buffers of the size of a layer's input that graphs keep for each length of rows: input and output of the layers, and
# their gradients.
GRAPH_BUFFERS = 4


@cache
def order_of_work(schedule: WindowSchedule) -> tuple[tuple[str, int], ...]:
    """Return what a rank does in an iteration with encoder windows, in order.

    Returns:
        `(FORWARD or BACKWARD, microbatch)` for each pass of the language model, and `(ENCODE or FINISH, window)`.
    """
    order: list[tuple[str, int]] = []

    def turn(windows: tuple[list[int], list[int]]) -> tuple[()]:
        finished, encoded = windows
        order.extend([*((FINISH, window) for window in finished), *((ENCODE, window) for window in encoded)])
        return ()

    def work(kind: str, microbatch: int) -> Work:
        order.append((kind, microbatch))
        return Work()

    turn(([], schedule.at_start()))
    Stage(schedule.stage, schedule.num_stages, schedule.num_microbatches, work,
          before_forward=lambda microbatch: turn(schedule.before(microbatch)),
          after_forward=lambda microbatch: turn(schedule.after(microbatch)),
          after_backward=lambda microbatch: turn(schedule.after_backward(microbatch)),
          before_backward=lambda microbatch: turn(schedule.before_backward(microbatch))).program()
    turn((schedule.at_end(), []))
    return tuple(order)


class Windows:
    """How the images of an iteration are dealt to encoder replicas, and what each replica does with its own.

    Attributes:
        schedule: windows of the first stage.
        images: images of each window and replica, each as the tokens of its tiles.
    """

    def __init__(self, step: Step, batch: Microbatches) -> None:
        (self._encoder,), costs = step.sampled.encoders, step.costs
        self._step, self._batch, self.schedule = step, batch, step.window_schedule(len(batch))
        self._cost, self._trains = costs.encoder(self._encoder.name, self._encoder.tp), costs.trains(self._encoder.name)
        windows = [[image for microbatch in window for lane in batch[microbatch] for sample in lane
                    for image in sample.whole_images] for window in self.schedule.windows]
        # Seconds of each kind of image: forward pass, its layers only, backward pass.
        self._seconds = {image: [sum(each) for each in zip(*(
            costs.image_s(self._encoder.name, self._encoder.tp, tokens) for tokens in image), strict=True)]
            for image in {image for images in windows for image in images}}
        forward = [[self._seconds[image][0] for image in images] for images in windows]
        if step.config.layout.encoder_balance:
            owners = deal_iteration(forward, self.schedule, self._encoder.dp,
                                    backward=BACKWARD_COST if self._trains else 0.0)
        else:
            owners = [deal_in_order(images, self._encoder.dp) for images in forward]
        self.images: list[list[list[tuple[int, ...]]]] = []
        for images, replicas in zip(windows, owners, strict=True):
            self.images.append([[] for _ in range(self._encoder.dp)])
            for image, replica in zip(images, replicas, strict=True):
                self.images[-1][replica].append(image)

    def work(self) -> tuple[list[list[Work]], list[list[Work]]]:
        """Return the forward and the backward passes of each window, by replica."""
        chunk, name = self._step.config.layout.encoder_chunk, self._encoder.name
        launch_s = self._step.costs.encoder_launch_s(name, self._encoder.tp)
        found: tuple[list[list[Work]], list[list[Work]]] = [], []
        for window, shares in zip(self.recomputed, self.images, strict=True):
            calls = [math.ceil(len(images) / chunk) if chunk else int(bool(images)) for images in shares]
            forward, again, backward = ([sum(self._seconds[image][kind] for image in images) for images in shares]
                                        for kind in range(3))
            found[0].append([Work(number * self._cost.forward.call_s + own, number * launch_s[0])
                             for number, own in zip(calls, forward, strict=True)])
            found[1].append([
                Work(number * self._trains * self._cost.backward.call_s + own + share * repeated,
                     number * (launch_s[1] + share * launch_s[0]))
                for number, own, share, repeated in zip(calls, backward, window, again, strict=True)])
        return found

    def again_s(self) -> float:
        """Return the seconds of layers that are recomputed, the sum over all replicas."""
        return sum(share * self._seconds[image][1] for window, shares in zip(self.recomputed, self.images, strict=True)
                   for share, images in zip(window, shares, strict=True) for image in images)

    @cached_property
    def recomputed(self) -> list[list[float]]:
        """Share of the layers that is recomputed, by window and replica.

        With --encoder-activation-gib, a replica keeps as much of a window as there is room for beside what it keeps of
        the windows that it has not finished (`mimo.training.encoder_activations`).
        """
        config, full = self._step.config, 1.0 if self._step.config.model.encoder_recompute == "full" else 0.0
        found = [[full * self._trains] * self._encoder.dp for _ in self.images]
        if config.layout.encoder_activation_gib is None or full or not self._trains:
            return found
        budget = config.layout.encoder_activation_gib * GIB
        for replica, stage in enumerate(self.stages):
            held: dict[int, float] = {}
            for kind, window in order_of_work(replace(self.schedule, stage=stage)):
                if kind == FINISH:
                    del held[window]
                elif kind == ENCODE:
                    whole = self.patches[window][replica] * self._cost.layer_bytes
                    held[window] = min(whole, max(budget - sum(held.values()), 0.0))
                    found[window][replica] = 1 - held[window] / whole if whole else 0.0
        return found

    @cached_property
    def patches(self) -> list[list[float]]:
        """Patches of each window and replica. Those of a shortened iteration stand for a whole one."""
        step, stages = self._step, self.schedule.num_stages
        size = step.layout.encoder_window or step.num_microbatches
        kept = min(size if stages == 1 else stages + 2 * size - 1, step.num_microbatches)
        longer = kept / min(kept, len(self._batch))
        lengths = {image: longer * sum(step.costs.image_patches(self._encoder.name, tokens) for tokens in image)
                   for image in self._seconds}
        return [[sum(lengths[image] for image in images) for images in shares] for shares in self.images]

    @cached_property
    def bytes(self) -> list[list[float]]:
        """Bytes that each window and replica keeps until it is finished.

        The budget is for the layers alone. What is outside of them counts as if all layers kept their inputs besides.
        """
        kept, inputs = _patch_bytes(self._step, self._encoder)
        return [[patches * min(kept, (1 - again) * kept + inputs) for patches, again in zip(*each, strict=True)]
                for each in zip(self.patches, self.recomputed, strict=True)]

    @property
    def stages(self) -> list[int]:
        """Stage of the language model on the ranks of each replica; the first one if a replica spans them all."""
        count = self.schedule.num_stages
        return [0 if self.schedule.together else replica * count // self._encoder.dp
                for replica in range(self._encoder.dp)]


def peak(step: Step, batches: Sequence[Microbatches]) -> tuple[float, float, str]:
    """Return the peak bytes of the fullest rank, how many of them are for images, and the name of that rank."""
    rows = [step.lengths(batch) for batch in batches]
    lengths = {length for lanes in rows for lane in lanes for length in lane}
    graphs = step.config.model.cuda_graphs
    if graphs:
        # The graphs of a microbatch in flight share memory of their own, enough for the longest rows.
        rows = [[[max(lengths)] * len(lane) for lane in lanes] for lanes in rows]
    sent, received, features = image_bytes(step, batches)
    found = []
    for name, modules in step.places():
        module, _, stage = modules[0]
        total = step.costs.profile.base_gib * GIB + sum(step.state_bytes(*module) for module in modules)
        # Updates have no activations.
        updated = sum(step.update_bytes(*module) for module in modules)
        # Only the first stage reads lanes, but every rank encodes.
        pixels = (sent + features if stage == 0 else 0.0) + received
        if module != LANGUAGE:
            kept = max(_encoder_peak(step, batch, stage) for batch in batches)
            found.append((total + max(kept + pixels, updated), kept + pixels, name))
            continue
        if graphs and step.pass_cost.backward_s:
            total += GRAPH_BUFFERS * step.in_flight(stage) * sum(
                step.language_cost(length).recomputed_bytes for length in lengths)
        own = {length: _row_bytes(step, stage, length) for length in lengths}
        moments = (_moment(step, batch, [[own[length] for length in lane] for lane in lanes], stage,
                           encodes=len(modules) > 1) for batch, lanes in zip(batches, rows, strict=True))
        both, images = max(moments)
        found.append((total + max(pixels + both, updated), pixels + images, name))
    return max(found)


def _row_bytes(step: Step, stage: int, length: int) -> tuple[float, float]:
    """Return the bytes of a microbatch's rows on a stage: kept in flight, and further ones in its backward pass."""
    cost, again = step.language_cost(length), step.recomputed[stage]
    if not cost.backward_s:
        return 0.0, 0.0
    # The layer that is being recomputed has all its activations.
    further = cost.layer_bytes if again else 0.0
    if stage == len(step.layers) - 1:
        # Layers of multi-token prediction are recomputed with the decoder's.
        further += cost.ends_bytes + (0.0 if step.config.model.recompute == "full" else cost.mtp_bytes)
    return (step.layers[stage] - again) * cost.layer_bytes + again * cost.recomputed_bytes, further


def _moment(step: Step, batch: Microbatches, rows: Sequence[Sequence[tuple[float, float]]], stage: int, *,
            encodes: bool) -> tuple[float, float]:
    """Return the bytes that a rank of the language model keeps at the fullest moment, and those of images among them.

    `rows` has what `_row_bytes` says of each lane and microbatch; `encodes` says whether the rank encodes images, too.
    """
    if encodes and step.layout.encoder_window is not None:
        # Lanes wait for each other at windows, so one with the longest rows stands for all.
        return _window_moment(step.windows(batch), [max(lanes) for lanes in zip(*rows, strict=True)], stage)
    kept, nothing = step.in_flight(stage), [0.0] * len(batch)
    return max(_fullest(own, images, kept) for lane, own in enumerate(rows)
               for images in (_images_beside(step, batch, lane) if encodes else [nothing]))


def _fullest(rows: Sequence[tuple[float, float]], images: Sequence[float], kept: int) -> tuple[float, float]:
    """Return the bytes of the fullest `kept` microbatches that follow each other, and those of their images."""
    sums = list(accumulate((own for own, _ in rows), initial=0.0))
    beside = list(accumulate(images, initial=0.0))
    found = []
    for first in range(len(rows) - kept + 1):
        own, further = sums[first + kept] - sums[first], max(each for _, each in rows[first : first + kept])
        found.append((own + further + beside[first + kept] - beside[first], beside[first + kept] - beside[first]))
    return max(found)


def _window_moment(windows: Windows, rows: Sequence[tuple[float, float]], stage: int) -> tuple[float, float]:
    """Return the fullest moment on the ranks of a stage, after a pass or an encoding, on the fullest replica."""
    replicas = [replica for replica, there in enumerate(windows.stages) if there == stage or windows.schedule.together]
    in_flight, images, most, found = 0.0, [0.0] * len(replicas), 0.0, [(0.0, 0.0)]
    for kind, index in order_of_work(replace(windows.schedule, stage=stage)):
        if kind == FORWARD:
            in_flight += rows[index][0]
            found.append((in_flight + rows[index][1] + most, most))
        elif kind == BACKWARD:
            in_flight -= rows[index][0]
        else:
            sign = 1 if kind == ENCODE else -1
            images = [before + sign * windows.bytes[index][replica]
                      for before, replica in zip(images, replicas, strict=True)]
            most = max(images)
            found.append((in_flight + most, most))
    return max(found)


def _images_beside(step: Step, batch: Microbatches, lane: int) -> Iterator[list[float]]:
    """Yield the bytes of each microbatch's images on the replicas of the encoder that share ranks with a lane."""
    (encoder,) = step.sampled.encoders
    for replica in range(encoder.dp):
        shares = step.shares(encoder, replica)
        if any(share.lane == lane for share in shares):
            yield _bytes_of_shares(step, encoder, batch, shares)


def _encoder_peak(step: Step, batch: Microbatches, stage: int) -> float:
    """Return the bytes that a rank of an encoder on a grid of its own keeps at the fullest moment."""
    (encoder,), config = step.sampled.encoders, step.config
    kept = min(encoder.pp + step.layout.language.pp - stage + config.layout.encoder_run_ahead
               + config.train.encoder_prefetch_depth, step.num_microbatches)
    # A shortened iteration has fewer microbatches than are kept of a whole one.
    seen, nothing = min(kept, len(batch)), [(0.0, 0.0)] * len(batch)
    return kept / seen * max(_fullest(nothing, _bytes_of_shares(step, encoder, batch, step.shares(encoder, replica)),
                                      seen)[0] for replica in range(encoder.dp))


def _bytes_of_shares(step: Step, encoder: GridSpec, batch: Microbatches, shares: Sequence[LaneShare]) -> list[float]:
    """Return the bytes that a rank keeps of the images of some lanes, for each microbatch."""
    kept, inputs = _patch_bytes(step, encoder)
    each, costs = inputs if step.config.model.encoder_recompute == "full" else kept, step.costs
    return [each * sum(costs.image_patches(encoder.name, tokens) for share in shares
                       for sample in microbatch[share.lane][share.start : share.stop] for tokens in sample.images)
            for microbatch in batch]


def _patch_bytes(step: Step, encoder: GridSpec) -> tuple[float, float]:
    """Return the bytes that a rank keeps for one patch, and those that it keeps if all layers are recomputed."""
    cost = step.costs.encoder(encoder.name, encoder.tp)
    if not step.costs.trains(encoder.name):
        return (step.costs.projector_bytes(encoder.name)[0],) * 2
    return cost.layer_bytes / encoder.pp, cost.recomputed_bytes / encoder.pp


def image_bytes(step: Step, batches: Sequence[Microbatches]) -> tuple[float, float, float]:
    """Return the most bytes of the first windows: pixels of a lane's reader and of a replica, features of a lane.

    Context-parallel ranks divide the features, tensor-parallel ones do not.
    """
    if step.layout.encoder_window is None:
        return 0.0, 0.0, 0.0
    (encoder,), tokens = step.sampled.encoders, step.costs.provider.token_spec(step.config.model_family)
    each = tokens.num_channels * (1 if has_eight_bit_pixels(step.config, step.costs.provider)
                                  else 2 if step.config.model.bf16 else 4)
    _, width = step.costs.projector_bytes(encoder.name)
    sent, received, features, cp = 0.0, 0.0, 0.0, step.layout.language.cp
    for batch in batches:
        schedule = step.window_schedule(len(batch))
        first = [microbatch for window in schedule.first_windows for microbatch in schedule.windows[window]]
        # With a shortened iteration, the whole one has more pixels if all its images travel at the start.
        longer = step.num_microbatches / len(batch) if len(first) == len(batch) else 1.0
        sizes = [[size for microbatch in first for size in step.images(batch[microbatch][lane])]
                 for lane in range(step.sampled.num_lanes)]
        lanes = [sum(each * (math.prod(tokens.image_shape) if tokens.image_size else size * tokens.size_multiple**2)
                     for size in own) * longer for own in sizes]
        sent, received = max(sent, *lanes), max(received, sum(lanes) / encoder.dp)
        features = max(features, *(sum(step.costs.image_patches(encoder.name, size) for size in own)
                                   * longer * width / cp for own in sizes))
    return sent, received, features
