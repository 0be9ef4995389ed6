"""What of a rank's training state has its memory, and what is offloaded and must not be touched."""

from __future__ import annotations

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
KINDS = (WEIGHTS, GRADIENTS, OPTIMIZER)


class OffloadedError(RuntimeError):
    """Something is asked of a trainer whose memory lies on the host."""


class Residency:
    """Says what of one rank is offloaded.

    Attributes:
        offloaded: those of `KINDS` that have no memory on the device.
    """

    def __init__(self) -> None:
        self.offloaded: set[str] = set()

    def require(self, what: str, *kinds: str) -> None:
        """Raise OffloadedError where some of `kinds` are offloaded; `what` needs them."""
        missing = [kind for kind in KINDS if kind in kinds and kind in self.offloaded]
        if missing:
            raise OffloadedError(f"{what}: {', '.join(missing)} of this trainer are offloaded to the host; bring them "
                                 "back first (mimo.training.offload.Offload.bring_back)")
