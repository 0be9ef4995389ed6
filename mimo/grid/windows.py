"""Windows of microbatches whose images all encoder replicas encode together, as plain data without torch.

In a colocated layout with windows, the images of some consecutive microbatches of all lanes are dealt to all encoder
replicas by cost, no matter which rank read them. `WindowSchedule` also decides when a rank encodes them between the
passes of the language model's pipeline. This follows BigMac (arXiv:2605.25451), which nests the encoder in the language
model's schedule so that its activations do not grow with the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace

from mimo.visual import Normalisation

# Cost of an image's backward pass, in units of its forward pass. The backward pass has twice the FLOPs, but on an H200
# it took only 1.3 to 1.5 times as long, because small kernels slow the forward pass more.
BACKWARD_COST = 1.5


@dataclass(frozen=True)
class Image:
    """One image of an iteration, described so that every rank can plan with it.

    Attributes:
        lane: the lane whose reader holds its pixels and whose text it belongs to.
        microbatch: index in the iteration.
        tokens: rows of encoder output.
        size: height and width in pixels.
        shape: shape of its pixels as the encoder takes them: `(C, H, W)`, `(tiles, C, H, W)`, or packed `(patches, C *
            P * P)`.
        owners: context-parallel rank that has the token of each row, a byte each; empty if one rank has all of them.
        normalisation: how its encoder's rank normalises its 8-bit pixels; None if they are floats.
    """

    lane: int
    microbatch: int
    tokens: int
    size: tuple[int, int]
    shape: tuple[int, ...]
    owners: bytes = b""
    normalisation: Normalisation | None = None

    def tokens_of(self, cp: int) -> int:
        """Count the rows of a context-parallel rank."""
        return self.owners.count(cp) if self.owners else self.tokens

    @property
    def num_patches(self) -> int:
        """Length of the image's sequence in the encoder. Unpacked images all have the same length and count as 1.

        So do tiles, of which an image may have several.
        """
        return 1 if len(self.shape) == 3 else self.shape[0]


def encoding_cost(image: Image, hidden_size: int) -> float:
    """Return the relative time of an image: FLOPs of a ViT layer, `72 h^2 n + 12 h n^2`, over `72 h^2`.

    Unpacked images and tiles are sequences of one length, so their number is their relative time.
    """
    patches = image.num_patches
    return float(patches) if len(image.shape) > 2 else patches + patches**2 / (6 * hidden_size)


def deal(costs: Sequence[float], loads: list[float]) -> list[int]:
    """Give each image to a replica, the most expensive first, always to the one with the least to do (LPT).

    From equal loads, the busiest of m replicas gets at most 4/3 - 1/(3 m) times the best possible load (Graham 1969).

    Args:
        costs: cost of each image.
        loads: cost that each replica has been given already; updated in place.

    Returns:
        The replica of each image. Ties are resolved by index, so that all ranks find the same.
    """
    owners = [0] * len(costs)
    heap = [(load, replica) for replica, load in enumerate(loads)]
    heapify(heap)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, owner = heap[0]
        owners[index] = owner
        loads[owner] = load + costs[index]
        heapreplace(heap, (loads[owner], owner))
    return owners


def deal_in_order(costs: Sequence[float], num_replicas: int) -> list[int]:
    """Give each replica the same number of consecutive images, whatever they cost; return each image's replica."""
    return [index * num_replicas // len(costs) for index in range(len(costs))]


@dataclass(frozen=True)
class WindowSchedule:
    """When one rank encodes each window and runs its backward pass, between its passes of the language model.

    To finish a window is to run its backward pass. A turn is a point at which a rank may finish windows and encode
    others.

    Without pipeline stages, the first window is encoded before the passes start. Each later one is encoded just before
    the forward pass of its first microbatch, when the windows before it have been finished.

    With p stages, a window is encoded after the first stage's forward pass of the microbatch before the window, and
    finished p forward passes after its last microbatch. So a rank keeps the activations of at most p + 2 size - 1
    microbatches' images, shared out over all replicas.

    The windows of the first p + 1 and of the last p microbatches use the time in which the pipeline fills and drains:

    - Stage s would wait for s forward passes at first, so it encodes the windows of the first s + 1 microbatches then.
      It encodes each further one of the first p before the forward pass that it runs when the first stage is at that
      microbatch.
    - After those it would wait for gradients, so it encodes the window of microbatch p there. Only the last stage,
      which does not wait, has encoded it at the start.
    - While the pipeline drains, it finishes one window before it receives each of the last p - s - 1 gradients, and the
      rest when its own passes are over.

    Ranks exchange pixels, features and gradients in an order in which nothing would stop even if every sender waited
    for its receiver. Usually none does, but a device that allocates memory or loads a kernel may have to finish
    everything first, and messages that exceed NCCL's buffers finish when they are received. So a later stage sends the
    features that the first stage takes between its first passes not before it has received what the first stage has to
    send until then (`sends_before`, `sends_after`). It receives the gradients of the last windows before it sends the
    gradient that the first stage awaits next, and runs their backward passes afterwards (`takes_after_backward`).

    All stages take their turns at the same time, because an encoder may be split over stages, and because features and
    gradients pass between them. In 1F1B a stage's forward pass ends when the backward pass of the next stage ends,
    because they exchange their results then. So when the first of two stages has just run its forward pass of
    microbatch m, the second one has just run the backward pass of m - 1, and neither waits for the other. A turn at any
    other time would leave a stage idle for the difference between a forward and a backward pass. At a turn, an even
    stage s of p has run the forward pass of m - s / 2, and an odd one the backward pass of m - p + (s + 1) / 2. Neither
    has sent its result, because the other side may be at its turn, too. Without backward passes, stage s is about to
    run the forward pass of m - s.

    Attributes:
        size: microbatches of a window. Windows that are encoded while the pipeline fills or finished while it drains
            have one microbatch, unless there is only one window. The last of the others may have fewer than `size`.
        stage, num_stages: this rank's stage and the stages of the language model's pipeline.
        num_microbatches: microbatches of the iteration.
        forward_only: whether no backward passes follow.
        together: whether an encoder is split over stages, so that all stages encode each window at the same time. No
            stage can then use the time in which the pipeline fills and drains: the first windows are encoded before the
            passes, and the last ones are finished after them.
    """

    size: int
    stage: int
    num_stages: int
    num_microbatches: int
    forward_only: bool = False
    together: bool = False

    @cached_property
    def windows(self) -> tuple[range, ...]:
        """Microbatches of each window."""
        count = self.num_microbatches
        edge = min(self.num_stages, count // 2) if self._fills and self.size < count else 0
        inner = range(edge, count - edge, self.size)
        return (*(range(each, each + 1) for each in range(edge)),
                *(range(start, min(start + self.size, count - edge)) for start in inner),
                *(range(each, each + 1) for each in range(count - edge, count)))

    @cached_property
    def window_of(self) -> tuple[int, ...]:
        """Window of each microbatch."""
        return tuple(window for window, members in enumerate(self.windows) for _ in members)

    @cached_property
    def turns(self) -> tuple[tuple[int, int], ...]:
        """Turn at which each window is encoded, and turn at which it is finished.

        Turn 0 is while the pipeline fills, turn m when the first stage is at its forward pass of microbatch m, and turn
        `num_microbatches` while the pipeline drains.
        """
        ahead = 0 if self._before_forward else 1
        return tuple((0 if each.start < self.num_stages + ahead else each.start - ahead,
                      min(each.stop - 1 + self.num_stages, self.num_microbatches)) for each in self.windows)

    @cached_property
    def first_windows(self) -> list[int]:
        """Windows that are encoded while the pipeline fills."""
        return [window for window, (encoded, _) in enumerate(self.turns) if not encoded]

    def at_start(self) -> list[int]:
        """Windows that this stage encodes before the pipeline starts."""
        if not self._fills or self.stage == self.num_stages - 1:
            return self.first_windows
        return [window for window in self.first_windows if self.windows[window].start <= self.stage]

    @cached_property
    def sent_later(self) -> list[int]:
        """Windows that this stage encodes before the pipeline starts and whose features it sends between its passes."""
        if not self._fills or not self.stage:
            return []
        return [window for window in self.at_start() if self.windows[window].start >= self.stage]

    def sends_before(self, forward: int) -> list[int]:
        """Windows of `sent_later` whose features are sent once the input of a forward pass has been received."""
        microbatch = forward + self.stage
        return [window for window in self.sent_later
                if self.windows[window].start == microbatch < self.num_stages]

    def sends_after(self, forward: int) -> list[int]:
        """Windows of `sent_later` whose features are sent after a forward pass and before its output is sent."""
        return [window for window in self.sent_later
                if self.windows[window].start == self.num_stages == forward + self.stage + 1]

    def before(self, forward: int) -> tuple[list[int], list[int]]:
        """Windows to finish, then windows to encode, once the input of a forward pass has been received."""
        if self._before_forward:
            return self._turn(forward + self.stage)
        return [], self._while_filling(forward + self.stage) if 0 < forward < self.num_stages - self.stage else []

    def after(self, forward: int) -> tuple[list[int], list[int]]:
        """Windows to finish, then windows to encode, after a forward pass and before its output is sent."""
        if self._before_forward:
            return [], []
        if forward == self.num_stages - 1 - self.stage:
            return [], self._while_filling(self.num_stages)
        return ([], []) if self.stage % 2 else self._turn(forward + self.stage // 2)

    def after_backward(self, backward: int) -> tuple[list[int], list[int]]:
        """Windows to finish, then windows to encode, after a backward pass and before its gradient is sent."""
        if self._before_forward or self.stage % 2 == 0:
            return [], []
        return self._turn(backward + self.num_stages - (self.stage + 1) // 2)

    def takes_after_backward(self, backward: int) -> list[int]:
        """Windows whose gradients a later stage receives after a backward pass, before its gradient is sent."""
        return [window for window in self._last_windows
                if self._fills and self.stage and self.windows[window].stop + self.stage - 1 == backward]

    def before_backward(self, backward: int) -> tuple[list[int], list[int]]:
        """Windows to finish, and an empty list, before a gradient is received while the pipeline drains."""
        return [window for window in self._last_windows
                if self._fills and self.windows[window].stop + self.stage == backward], []

    def at_end(self) -> list[int]:
        """Windows whose backward pass is left after all passes of the language model."""
        return [window for window in self._last_windows
                if not self._fills or self.windows[window].stop + self.stage >= self.num_microbatches]

    @cached_property
    def _last_windows(self) -> list[int]:
        return [window for window, (_, finished) in enumerate(self.turns) if finished == self.num_microbatches]

    def _while_filling(self, microbatch: int) -> list[int]:
        """Windows that begin at a microbatch and that a stage encodes while it would otherwise wait."""
        if not self._fills or self.stage == self.num_stages - 1:
            return []
        return [window for window in self.first_windows if self.windows[window].start == microbatch]

    @property
    def _before_forward(self) -> bool:
        return self.forward_only or self.num_stages == 1

    @property
    def _fills(self) -> bool:
        return not (self._before_forward or self.together)

    def _turn(self, forward: int) -> tuple[list[int], list[int]]:
        """Windows to finish and to encode when the first stage is at a forward pass."""
        return self._steady_turns.get(forward, ([], []))

    @cached_property
    def _steady_turns(self) -> dict[int, tuple[list[int], list[int]]]:
        found: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for window, (encoded, finished) in enumerate(self.turns):
            found[finished][0].append(window)
            found[encoded][1].append(window)
        return {turn: windows for turn, windows in found.items() if self.num_stages <= turn < self.num_microbatches}


def deal_iteration(costs: Sequence[Sequence[float]], schedule: WindowSchedule, num_replicas: int, *,
                   backward: float) -> list[list[int]]:
    """Deal the images of an iteration to the replicas of an encoder, by cost.

    Replicas wait for each other at every turn, in which one window is finished and another encoded. Filling the
    pipeline counts as one turn, and so does draining it. The images of each window are therefore divided into shares of
    as equal cost as possible, and the largest share of a window goes to the replica that has the least to do in the
    turn in which the window is encoded. Unequal shares could even out that turn, but backward passes take longer, so
    later turns would differ by more.

    Args:
        costs: cost of each image's forward pass, by window.
        schedule: the windows; of any stage.
        num_replicas: replicas of the encoder.
        backward: cost of an image's backward pass, in units of that of its forward pass.

    Returns:
        The replica of each image, by window.
    """
    turns: dict[int, list[float]] = defaultdict(lambda: [0.0] * num_replicas)
    totals, found = [0.0] * num_replicas, []
    for window, each in enumerate(costs):
        shares = [0.0] * num_replicas
        members = deal(each, shares)
        encoded, finished = (turns[turn] for turn in schedule.turns[window])
        least_busy = sorted(range(num_replicas), key=lambda replica: (encoded[replica], totals[replica], replica))
        largest = sorted(range(num_replicas), key=lambda share: (-shares[share], share))
        replica_of = dict(zip(largest, least_busy, strict=True))
        found.append([replica_of[share] for share in members])
        for share, replica in replica_of.items():
            encoded[replica] += shares[share]
            finished[replica] += shares[share] * backward
            totals[replica] += shares[share]
    return found


def busiest_turns(costs: Sequence[Sequence[float]], owners: Sequence[Sequence[int]], schedule: WindowSchedule,
                  num_replicas: int, *, backward: float) -> float:
    """Return the cost of the busiest replica in each turn, summed over all turns.

    `owners` is what `deal_iteration` returned for the other arguments.
    """
    turns: dict[int, list[float]] = defaultdict(lambda: [0.0] * num_replicas)
    for window, (each, replicas) in enumerate(zip(costs, owners, strict=True)):
        encoded, finished = schedule.turns[window]
        for cost, replica in zip(each, replicas, strict=True):
            turns[encoded][replica] += cost
            turns[finished][replica] += cost * backward
    return sum(map(max, turns.values()))
