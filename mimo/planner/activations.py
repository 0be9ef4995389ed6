"""Memory of activations: what ranks keep at each moment of an iteration, in the order of their work."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mimo.config.validate import overlaps_beside_graphs
from mimo.grid.lanes import has_eight_bit_pixels
from mimo.grid.spec import GridSpec, LaneShare
from mimo.grid.windows import BACKWARD_COST, WindowSchedule, deal_in_order, deal_iteration
from mimo.planner.costs import GIB
from mimo.planner.shapes import num_layers
from mimo.planner.simulation import BACKWARD, FORWARD, Stage, Work
from mimo.planner.workload import Microbatches
from mimo.protocols import LANGUAGE

if TYPE_CHECKING:
    from mimo.planner.predict import Step

# A number for each encoder replica, of which there may be thousands.
Array = npt.NDArray[np.float64]
ENCODE, FINISH = "encode", "finish"
# Buffers of the size of a layer's input that graphs keep for each length of rows: input and output of the layers, and
# their gradients.
GRAPH_BUFFERS = 4
# Gradients in the backward pass of a layer, as a share of what the layer keeps: those of the inner tensors of its MLP,
# before and after the activation function.
LAYER_GRADIENTS = 0.5


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
        chunk, launch_s = self._chunk, self._step.costs.encoder_launch_s(self._encoder.name, self._encoder.tp)
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
        """Share of the layers that is recomputed, by window and replica, after the start of a run."""
        return self.share_recomputed()

    def share_recomputed(self, largest: list[float] | None = None) -> list[list[float]]:
        """Return the share of the layers that is recomputed, by window and replica.

        With --encoder-activation-gib, a replica keeps as much of a window as there is room for beside what it keeps of
        the windows that it has not finished (`mimo.training.encoder_activations`).

        Args:
            largest: at the start of a run, the patches of the largest call of each replica so far; changed in place. A
                larger call recomputes all layers, because it is not known yet what they keep. None: all are known.
        """
        config, full = self._step.config, 1.0 if self._step.config.model.encoder_recompute == "full" else 0.0
        found = [[full * self._trains] * self._encoder.dp for _ in self.images]
        if config.layout.encoder_activation_gib is None or full or not self._trains:
            return found
        budget = config.layout.encoder_activation_gib * GIB
        kept, least = _patch_bytes(self._step, self._encoder)
        beyond, layers = kept - least, num_layers(self._step.costs.shapes[self._encoder.name])
        patches, calls = ([each.tolist() for each in arrays] for arrays in (self.patches, self._shares_of_calls))
        for replica, stage in enumerate(self.stages):
            held: dict[int, float] = {}
            for kind, window in order_of_work(replace(self.schedule, stage=stage)):
                if kind == FINISH:
                    del held[window]
                elif kind == ENCODE:
                    whole, room = patches[window][replica] * beyond, budget - sum(held.values())
                    # Each call keeps whole layers.
                    call = patches[window][replica] * calls[window][replica]
                    if largest is not None and call > largest[replica]:
                        largest[replica], room = call, 0.0
                    layer = call * beyond / layers
                    held[window] = min(whole, max(room, 0.0) // layer * layer) if layer else 0.0
                    found[window][replica] = 1 - held[window] / whole if whole else 0.0
        return found

    @cached_property
    def _shares_of_calls(self) -> list[Array]:
        """Share of a window's images on a replica that run through the encoder at once, by window and replica."""
        counts = [self._longer * np.array([len(images) for images in shares]) for shares in self.images]
        chunk = self._chunk
        return [chunk / np.maximum(each, chunk) if chunk else np.ones(len(each)) for each in counts]

    @property
    def _chunk(self) -> int | None:
        return self._step.config.layout.encoder_chunk

    @cached_property
    def _longer(self) -> float:
        """How many times as many images a window of a whole iteration has, if the batch is a shortened one."""
        step, stages = self._step, self.schedule.num_stages
        size = step.layout.encoder_window or step.num_microbatches
        kept = min(size if stages == 1 else stages + 2 * size - 1, step.num_microbatches)
        return kept / min(kept, len(self._batch))

    @cached_property
    def patches(self) -> list[Array]:
        """Patches of each window and replica. Those of a shortened iteration stand for a whole one."""
        lengths = {image: self._longer * sum(self._step.costs.image_patches(self._encoder.name, tokens)
                                             for tokens in image) for image in self._seconds}
        return [np.array([sum(lengths[image] for image in images) for images in shares], dtype=np.float64)
                for shares in self.images]

    @cached_property
    def bytes(self) -> tuple[list[Array], list[Array]]:
        """Bytes that are kept, and more in backward passes, after the start of a run; see `bytes_of`."""
        return self.bytes_of(self.recomputed)

    def first_bytes(self, largest: list[float]) -> tuple[list[Array], list[Array]]:
        """Return `bytes` at the start of a run; `share_recomputed` explains `largest`."""
        if self._step.config.layout.encoder_activation_gib is None:
            return self.bytes
        return self.bytes_of(self.share_recomputed(largest))

    def bytes_of(self, recomputed: Sequence[Sequence[float]]) -> tuple[list[Array], list[Array]]:
        """Return the bytes that each window keeps on each replica until it is finished, and more in its backward pass.

        The backward pass needs gradients, and a layer that is being recomputed. The layers that keep their activations
        are the last ones (`mimo.training.encoder_activations`). Their backward passes come first, and free the
        activations before a layer is recomputed.
        """
        kept, least = _patch_bytes(self._step, self._encoder)
        gradients, whole = (_backward_bytes(self._step, self._encoder, recomputes) for recomputes in (False, True))
        found: tuple[list[Array], list[Array]] = [], []
        for patches, calls, window in zip(self.patches, self._shares_of_calls, recomputed, strict=True):
            shares = np.array(window)
            freed = (1 - shares) * (kept - least)
            found[0].append(patches * (least + freed))
            found[1].append(patches * np.maximum(calls * gradients,
                                                 np.where(shares > 0, calls * whole - freed, 0.0)))
        return found

    @cached_property
    def stages(self) -> list[int]:
        """Stage of the language model on the ranks of each replica; the first one if a replica spans them all."""
        count = self.schedule.num_stages
        return [0 if self.schedule.together else replica * count // self._encoder.dp
                for replica in range(self._encoder.dp)]


def peak(step: Step, batches: Sequence[Microbatches]) -> tuple[tuple[float, float, str], tuple[float, float, str]]:
    """Compute `Step.memory`: of iterations in the middle of a run, and of the first ones."""
    lengths = [step.lengths(batch) for batch in batches]
    sent, received, features = image_bytes(step, batches)
    found: tuple[list[tuple[float, float, str]], ...] = [], []
    for name, modules in step.places():
        module, _, stage = modules[0]
        total = step.costs.profile.base_gib * GIB + sum(step.state_bytes(*module) for module in modules)
        # Updates have no activations.
        updated = sum(step.update_bytes(*module) for module in modules)
        # Only the first stage reads lanes, but every rank encodes.
        pixels = (sent + features if stage == 0 else 0.0) + received
        if module != LANGUAGE:
            kept = max(_encoder_peak(step, batch, stage) for batch in batches)
            for each in found:
                each.append((total + max(kept + pixels, updated), kept + pixels, name))
            continue
        own = {length: _row_bytes(step, stage, length)
               for length in {length for lanes in lengths for lane in lanes for length in lane}}
        slots = step.in_flight(stage) if step.config.model.cuda_graphs else 0
        if step.pass_cost.backward_s:
            total += GRAPH_BUFFERS * slots * sum(step.language_cost(length).recomputed_bytes for length in own)
        # Less a byte, so that rounding does not lead to more than there is.
        start = Start(step.costs.gpu.usable_bytes - total - pixels - 1.0,
                      sum(step.moment_bytes(*module) for module in modules))
        kinds = [_fullest(*moments, own, slots, start)
                 for moments in _moments(step, batches, lengths, stage, encodes=len(modules) > 1)]
        for each, (both, images) in zip(found, map(max, zip(*kinds, strict=True)), strict=True):
            each.append((total + max(pixels + both, updated), pixels + images, name))
    later, first = map(max, found)
    return later, first


@dataclass(frozen=True)
class RowBytes:
    """Bytes of a microbatch's rows on a stage.

    Attributes:
        kept: activations in flight.
        recomputed: activations of the layer that is being recomputed.
        gradients: those inside of a layer, in its backward pass.
        ends: activations and gradients in the backward pass of the output layer and the loss.
    """

    kept: float
    recomputed: float
    gradients: float
    ends: float


def _row_bytes(step: Step, stage: int, length: int) -> RowBytes:
    cost, again = step.language_cost(length), step.recomputed[stage]
    if not cost.backward_s:
        return RowBytes(0.0, 0.0, 0.0, 0.0)
    ends = 0.0
    if stage == len(step.layers) - 1:
        # Layers of multi-token prediction are recomputed with the decoder's.
        ends = cost.ends_bytes + (0.0 if step.config.model.recompute == "full" else cost.mtp_bytes)
    return RowBytes((step.layers[stage] - again) * cost.layer_bytes + again * cost.recomputed_bytes,
                    cost.layer_bytes if again else 0.0, LAYER_GRADIENTS * cost.layer_bytes, ends)


class _Rows:
    """Bytes of the language model's activations on a rank, from pass to pass.

    With graphs, the memory of a slot stays taken, enough for both passes of the layers with its longest rows. Passes of
    a new length run without graphs, beside that memory (`mimo.model.cuda_graphs`).

    Args:
        own: bytes of the rows of each length.
        graphs: whether passes of lengths that have been through both passes are captured.

    Attributes:
        own: bytes of the rows of each length.
    """

    def __init__(self, own: Mapping[int, RowBytes], *, graphs: bool = False) -> None:
        self.own, self._graphs = own, graphs
        self._in_flight: deque[tuple[int, bool, int | None]] = deque()  # length, whether it may have graphs, and slot
        self._warm: set[int] = set()
        self._slots: dict[int, int] = {}  # the longest rows of each

    @property
    def bytes(self) -> float:
        """Bytes of all microbatches in flight and of all graphs."""
        captured = (self.own[length] for length in self._slots.values())
        return (sum(each.kept + each.recomputed + each.gradients for each in captured)
                + sum(self.own[length].kept for length, _, slot in self._in_flight if slot is None))

    @property
    def further(self) -> float:
        """Further bytes in the backward pass of one of the microbatches in flight."""
        pairs = ((self.own[length], slot) for length, _, slot in self._in_flight)
        return max(own.ends if slot is not None else own.recomputed + max(own.gradients, own.ends)
                   for own, slot in pairs)

    @property
    def in_flight(self) -> int:
        """Number of microbatches between their two passes."""
        return len(self._in_flight)

    def forward(self, length: int, may_replay: bool) -> None:
        """Run a microbatch's forward pass."""
        slot = None
        if self._graphs and may_replay and length in self._warm:
            busy = {slot for _, _, slot in self._in_flight}
            slot = next(each for each in range(len(busy) + 1) if each not in busy)
            self._slots[slot] = max(self._slots.get(slot, 0), length)
        self._in_flight.append((length, may_replay, slot))

    def backward(self) -> None:
        """Run the backward pass of the microbatch that has waited longest."""
        length, may_replay, _ = self._in_flight.popleft()
        if may_replay:
            self._warm.add(length)

    def capture_all(self, kept: int) -> None:
        """Take graphs of all lengths, for so many microbatches in flight."""
        self._warm.update(self.own)
        self._slots.update(dict.fromkeys(range(kept), max(self.own)))


# Runs an iteration, and returns the bytes of activations and those of images at its fullest moment.
Moment = Callable[[_Rows], tuple[float, float]]


@dataclass(frozen=True)
class Start:
    """Memory on a rank while a run does its first iterations.

    Attributes:
        room: bytes for activations.
        later: bytes that the optimizer takes only from the second iteration on.
    """

    room: float
    later: float


def _moments(step: Step, batches: Sequence[Microbatches], lengths: Sequence[Sequence[Sequence[int]]], stage: int, *,
             encodes: bool) -> Iterator[tuple[list[Moment], list[Moment]]]:
    """Yield one `Moment` for each iteration, for each kind of rank of a stage of the language model.

    `lengths` has those of rows by iteration, lane and microbatch; `encodes` says whether ranks encode images, too. The
    second list has the same iterations at the start of a run.
    """
    without_graphs = set(overlaps_beside_graphs(step.config).values())

    def rows(lengths: Sequence[int]) -> list[tuple[int, bool]]:
        """Return arguments of `_Rows.forward` for each microbatch."""
        return [(length, without_graphs.isdisjoint((index, index - len(lengths))))
                for index, length in enumerate(lengths)]

    if encodes and step.layout.encoder_window is not None:
        # Lanes wait for each other at windows, so one with the longest rows stands for all.
        longest = [[max(each) for each in zip(*lanes, strict=True)] for lanes in lengths]
        largest = [0.0] * step.sampled.encoders[0].dp
        pairs = [(step.windows(batch), rows(own)) for batch, own in zip(batches, longest, strict=True)]
        yield ([partial(_window_moment, windows, None, own, stage) for windows, own in pairs],
               [partial(_window_moment, windows, largest, own, stage) for windows, own in pairs])
        return
    for lane in range(len(lengths[0])):
        # What each replica beside the lane keeps, by iteration.
        images = [list(_images_beside(step, batch, lane)) if encodes else [[(0.0, 0.0)] * len(batch)]
                  for batch in batches]
        for replica in zip(*images, strict=True):
            moments: list[Moment] = [partial(_moment, rows(lanes[lane]), each, step.in_flight(stage))
                                     for lanes, each in zip(lengths, replica, strict=True)]
            yield moments, moments


def _fullest(moments: Sequence[Moment], first: Sequence[Moment], own: Mapping[int, RowBytes], slots: int,
             start: Start) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the bytes of activations at the fullest of all moments, and those of images; then those from the start.

    Args:
        moments: those of consecutive iterations.
        first: the same at the start of a run.
        own: bytes of the rows of each length.
        slots: microbatches in flight that have graphs; 0 without graphs.
        start: memory if a run starts with these iterations.
    """
    if not slots:
        return (max(moment(_Rows(own)) for moment in moments),) * 2
    captured = _Rows(own, graphs=True)
    captured.capture_all(slots)
    fullest = max(moment(captured) for moment in moments)
    rows, later, found = _Rows(own, graphs=True), start.later, [fullest]
    for moment in first:
        both, images = moment(rows)
        found.append((min(both - later, start.room), images))
        later = 0.0
    return fullest, max(found)


def _moment(microbatches: Sequence[tuple[int, bool]], images: Sequence[tuple[float, float]], kept: int, rows: _Rows
            ) -> tuple[float, float]:
    """Return the bytes of an iteration's fullest moment if a rank has `kept` microbatches in flight at most.

    `images` has the pair of `_bytes_of_shares` for each microbatch.
    """
    found, most = [], 0.0

    def backward(index: int) -> None:
        nonlocal most
        rows.backward()
        own, further = images[index]
        found.append((rows.bytes + most + further, most + further))
        most -= own

    for index, microbatch in enumerate(microbatches):
        if rows.in_flight == kept:
            backward(index - kept)
        rows.forward(*microbatch)
        most += images[index][0]
        found.append((rows.bytes + rows.further + most, most))
    for index in range(len(microbatches) - rows.in_flight, len(microbatches)):
        backward(index)
    return max(found)


def _window_moment(windows: Windows, largest: list[float] | None, microbatches: Sequence[tuple[int, bool]], stage: int,
                   rows: _Rows) -> tuple[float, float]:
    """Return the fullest moment on the ranks of a stage, after a pass or an encoding, on the fullest replica.

    `Windows.share_recomputed` explains `largest`.
    """
    replicas = [replica for replica, there in enumerate(windows.stages) if there == stage or windows.schedule.together]
    images, most, found = np.zeros(len(replicas)), 0.0, [(0.0, 0.0)]
    all_kept, all_further = windows.bytes if largest is None else windows.first_bytes(largest)
    for kind, index in order_of_work(replace(windows.schedule, stage=stage)):
        if kind == FORWARD:
            rows.forward(*microbatches[index])
            found.append((rows.bytes + rows.further + most, most))
        elif kind == BACKWARD:
            rows.backward()
        else:
            kept = all_kept[index][replicas]
            if kind == ENCODE:
                images = images + kept
                most = float(images.max())
            else:
                most = float((images + all_further[index][replicas]).max())
            found.append((rows.bytes + most, most))
            if kind == FINISH:
                images = images - kept
                most = float(images.max())
    return max(found)


def _images_beside(step: Step, batch: Microbatches, lane: int) -> Iterator[list[tuple[float, float]]]:
    """Yield `_bytes_of_shares` of each replica of the encoder that shares ranks with a lane."""
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
    seen, found = min(kept, len(batch)), 0.0
    for replica in range(encoder.dp):
        images = _bytes_of_shares(step, encoder, batch, step.shares(encoder, replica))
        found = max(found, *(kept / seen * sum(own for own, _ in images[first : first + seen]) + images[first][1]
                             for first in range(len(images) - seen + 1)))
    return found


def _bytes_of_shares(step: Step, encoder: GridSpec, batch: Microbatches, shares: Sequence[LaneShare]
                     ) -> list[tuple[float, float]]:
    """Return the bytes that a rank keeps of the images of some lanes, and further ones in their backward pass.

    There is one pair for each microbatch.
    """
    kept, least = _patch_bytes(step, encoder)
    again = step.config.model.encoder_recompute == "full"
    own, further = least if again else kept, _backward_bytes(step, encoder, again)
    patches = [sum(step.costs.image_patches(encoder.name, tokens) for share in shares
                   for sample in microbatch[share.lane][share.start : share.stop] for tokens in sample.images)
               for microbatch in batch]
    return [(each * own, each * further) for each in patches]


def _patch_bytes(step: Step, encoder: GridSpec) -> tuple[float, float]:
    """Return the bytes that a rank keeps for one patch, and those that it keeps if all layers are recomputed."""
    cost = step.costs.encoder(encoder.name, encoder.tp)
    if not step.costs.trains(encoder.name):
        return (step.costs.projector_bytes(encoder.name)[0],) * 2
    outside = step.costs.outside_bytes(encoder.name)
    return (max(cost.layer_bytes, cost.recomputed_bytes + outside) / encoder.pp,
            (cost.recomputed_bytes + outside) / encoder.pp)


def _backward_bytes(step: Step, encoder: GridSpec, recomputes: bool) -> float:
    """Return the further bytes of one patch in an encoder's backward pass: gradients, and a layer if it recomputes."""
    if not step.costs.trains(encoder.name):
        return 0.0
    layer = step.costs.encoder(encoder.name, encoder.tp).layer_bytes / num_layers(step.costs.shapes[encoder.name])
    return layer * (LAYER_GRADIENTS + recomputes)


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
