"""Costs of the passes of each module, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LanguageCost:
    """Costs of one microbatch on ranks of one tensor-parallel group.

    Attributes:
        forward_s, backward_s: seconds of the passes of one layer, the mean over the layers.
        ends_forward_s, ends_backward_s: seconds of multi-token prediction, the output layer and the loss.
        layer_bytes: activations that a layer keeps for its backward pass.
        recomputed_bytes: activations that it keeps if it is recomputed.
        ends_bytes: activations that the output layer and the loss keep, for every depth of multi-token prediction.
        mtp_bytes: activations that the layers of multi-token prediction keep.
        launch_s: seconds in which the host launches the passes of one layer; 0 with CUDA graphs.
        mtp_forward_s: seconds of the forward pass of the layers of multi-token prediction, a part of `ends_forward_s`.
        mtp_launch_s: seconds in which the host launches the passes of these layers.
    """

    forward_s: float
    backward_s: float
    ends_forward_s: float
    ends_backward_s: float
    layer_bytes: float
    recomputed_bytes: float
    ends_bytes: float
    mtp_bytes: float
    launch_s: tuple[float, float]
    mtp_forward_s: float
    mtp_launch_s: tuple[float, float]


@dataclass(frozen=True)
class PassCost:
    """Seconds of an encoder's pass: for each call, each FLOP and each patch."""

    call_s: float
    flop_s: float
    patch_s: float

    def image_s(self, flops: float, patches: float) -> float:
        return flops * self.flop_s + patches * self.patch_s


@dataclass(frozen=True)
class EncoderCost:
    """Costs of encoder passes on ranks of one tensor-parallel group.

    Attributes:
        forward, backward: costs of the passes.
        again: costs of a forward pass that is repeated because of recomputation.
        layer_bytes: bytes that all layers together keep for one patch.
        recomputed_bytes: the same if all of them are recomputed.
    """

    forward: PassCost
    again: PassCost
    backward: PassCost
    layer_bytes: float
    recomputed_bytes: float
