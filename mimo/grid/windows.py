"""Windows of microbatches whose images all encoder replicas encode together. Pure: no torch.

In a colocated layout with windows the images of some consecutive microbatches of all lanes are dealt to all encoder
replicas by cost, whoever read them. The order in which a rank encodes them between the passes of the language model's
pipeline is decided here, too (after BigMac, arXiv:2605.25451, whose encoder is nested in the language model's schedule
so that its activations do not grow with the batch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Image:
    """One image of an iteration, as every rank knows it.

    Attributes:
        lane: the lane whose reader holds its pixels and whose text it belongs to.
        microbatch: index in the iteration.
        tokens: rows of encoder output.
        size: height and width in pixels.
        shape: shape of its pixels as the encoder takes them: `(C, H, W)`, or packed `(patches, C * P * P)`.
    """

    lane: int
    microbatch: int
    tokens: int
    size: tuple[int, int]
    shape: tuple[int, ...]

    @property
    def num_patches(self) -> int:
        """Length of its sequence in the encoder, up to a factor that all whole images share."""
        return self.shape[0] if len(self.shape) == 2 else 1


def encoding_cost(image: Image, hidden_size: int) -> float:
    """Relative time of an image: FLOPs of a ViT layer, `72 h^2 n + 12 h n^2`, over `72 h^2`.

    Args:
        image: the image, of n patches.
        hidden_size: width h of the encoder.
    """
    patches = image.num_patches
    return patches + patches**2 / (6 * hidden_size)


def deal(costs: Sequence[float], totals: list[float]) -> list[int]:
    """Give each image of a window to a replica, the most expensive first, always to the one with the least to do (LPT).

    The busiest replica gets at most 4/3 - 1/(3 m) times the best possible load of m replicas (Graham 1969). Replicas
    wait for each other in every window, so earlier windows only decide between replicas that have as much in this one.

    Args:
        costs: cost of each image.
        totals: cost that each replica has got in all windows so far; updated in place.

    Returns:
        The replica of each image. Ties are resolved by index, so all ranks find the same.
    """
    owners, loads = [0] * len(costs), [0.0] * len(totals)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owner = min(range(len(loads)), key=lambda replica: (loads[replica], totals[replica], replica))
        owners[index] = owner
        loads[owner] += costs[index]
        totals[owner] += costs[index]
    return owners


def deal_in_order(costs: Sequence[float], totals: list[float]) -> list[int]:
    """Give each replica a run of consecutive images, the same number of them, whatever they cost.

    Takes and returns the same as `deal`.
    """
    owners = [index * len(totals) // len(costs) for index in range(len(costs))]
    for owner, cost in zip(owners, costs, strict=True):
        totals[owner] += cost
    return owners


@dataclass(frozen=True)
class WindowSchedule:
    """When one rank encodes each window and runs its backward pass, between its passes of the language model.

    Without pipeline stages, the first window is encoded before the passes start, and each later one just before the
    forward pass of its first microbatch, when the windows before it have been finished.

    With p stages, windows of the first p + 1 microbatches are encoded before the pipeline starts. Every later one has
    its turn after the first stage's forward pass of the microbatch before its first one, and its backward pass p
    forward passes after its last one; those of the last windows come after all passes. So a rank keeps the activations
    of at most p + 2 size - 1 microbatches' images, shared out over all replicas.

    All stages take their turns at the same time, as an encoder may be split over stages, and features and gradients
    pass between them. In 1F1B a stage's forward pass ends when the backward pass of the stage after it ends, because
    their results are exchanged then. So when the first of two stages has just run its forward pass of microbatch m, the
    second one has just run the backward pass of m - 1, and neither waits for the other. A turn between other passes
    would leave a stage idle for the difference between a forward and a backward pass. Of p stages an even stage s has
    then run the forward pass of m - s / 2 and an odd one the backward pass of m - p + (s + 1) / 2; neither has sent the
    result, as the other side may be at its turn, too. Without backward passes stage s is about to run the forward pass
    of m - s.

    Attributes:
        size: microbatches of a window; the last one may have fewer.
        stage, num_stages: of the language model's pipeline.
        num_microbatches: of the iteration.
        forward_only: no backward passes follow.
    """

    size: int
    stage: int
    num_stages: int
    num_microbatches: int
    forward_only: bool = False

    @property
    def num_windows(self) -> int:
        """Windows of the iteration."""
        return -(-self.num_microbatches // self.size)

    def microbatches(self, window: int) -> range:
        """Microbatches of a window."""
        return range(window * self.size, min((window + 1) * self.size, self.num_microbatches))

    def at_start(self) -> list[int]:
        """Windows that are encoded before the pipeline starts."""
        count = self.num_stages + (0 if self._before_forward else 1)
        return [window for window in range(self.num_windows) if self.microbatches(window).start < count]

    def before(self, forward: int) -> tuple[list[int], list[int]]:
        """Windows to finish, then windows to encode, once the input of a forward pass has been received."""
        return self._turn(forward + self.stage, forward + self.stage) if self._before_forward else ([], [])

    def after(self, forward: int) -> tuple[list[int], list[int]]:
        """Windows to finish, then windows to encode, after a forward pass and before its output is sent."""
        if self._before_forward or self.stage % 2:
            return [], []
        first_stage = forward + self.stage // 2
        return self._turn(first_stage, first_stage + 1)

    def after_backward(self, backward: int) -> tuple[list[int], list[int]]:
        """Windows to finish, then windows to encode, after a backward pass and before its gradient is sent."""
        if self._before_forward or self.stage % 2 == 0:
            return [], []
        first_stage = backward + self.num_stages - (self.stage + 1) // 2
        return self._turn(first_stage, first_stage + 1)

    def at_end(self) -> list[int]:
        """Windows whose backward pass is left after all passes of the language model."""
        return [window for window in range(self.num_windows)
                if self.microbatches(window).stop - 1 + self.num_stages >= self.num_microbatches]

    @property
    def _before_forward(self) -> bool:
        return self.forward_only or self.num_stages == 1

    def _turn(self, forward: int, coming: int) -> tuple[list[int], list[int]]:
        """Windows to finish and to encode.

        Args:
            forward: the forward pass that the first stage is at.
            coming: microbatch whose features are needed next.
        """
        if not self.num_stages <= forward < self.num_microbatches:
            return [], []
        windows = range(self.num_windows)
        return ([window for window in windows if self.microbatches(window).stop - 1 + self.num_stages == forward],
                [window for window in windows if self.microbatches(window).start == coming])
