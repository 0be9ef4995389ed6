"""How a refit runs, as plain data; and what it did."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from mimo.refit.tensor_slices import DTYPE_BYTES

# Routes that may be asked for: each tensor as fast as it can go, or all through the engine's own loading.
ROUTES = ("auto", "loader")
BACKENDS = ("gloo", "nccl", "ipc")


@dataclass(frozen=True)
class RefitOptions:
    """How weights travel.

    Attributes:
        backend: of the wire: `nccl`, `gloo`, or `ipc` for an engine on the trainer's own GPUs.
        dtype: of weights on the wire, the engine's: `bfloat16`, `float16` or `float32`; what must stay float32 does.
        route: `auto`, or `loader` for every tensor.
        chunk_bytes: of whole tensors in one chunk, at most; two chunks are under way at a time.
        timeout_s: seconds that one wait may take.
        verify: compare checksums of every box on both sides, at every sync (`WeightSender.verify` can switch it): as
            sent, as it came, and as read back from where it was written to (see `mimo.refit.messages`).
    """

    backend: str
    dtype: str
    route: str = "auto"
    chunk_bytes: int = 512 << 20
    timeout_s: float = 300.0
    verify: bool = False

    def __post_init__(self) -> None:
        problems = [f"refit {what} {value!r}: known are {', '.join(known)}" for what, value, known in (
            ("backend", self.backend, BACKENDS), ("dtype", self.dtype, tuple(DTYPE_BYTES)),
            ("route", self.route, ROUTES)) if value not in known]
        problems += [f"refit {what} {value}: must be positive" for what, value in (
            ("chunk_bytes", self.chunk_bytes), ("timeout_s", self.timeout_s)) if value <= 0]
        if problems:
            raise ValueError("; ".join(problems))

    def as_json(self) -> dict[str, Any]:
        """Return a dictionary that `RefitOptions` takes."""
        return asdict(self)


@dataclass
class RefitReport:
    """Result of one sync on this rank; seconds are of its own clock.

    Attributes:
        version: policy version that the engine serves now.
        sent_bytes: that this rank sent.
        wire_bytes: that all workers received (on the first rank).
        direct_bytes: of those, written straight into live parameters.
        seconds: by part: `pause` (engine stopped taking requests), `pack`, `wire` (waiting for transfers), `install`
            (the slowest worker's unpacking and loading), `total`.
    """

    version: str
    sent_bytes: int = 0
    wire_bytes: int = 0
    direct_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


# What vLLM loads in each of its processes, by the entry point `vllm.general_plugins` in pyproject.toml.


BACKEND = "mimo"


def register() -> None:
    """Make `WeightTransferConfig(backend="mimo")` known; more than once is as good as once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from mimo.refit.compat import is_engine_registered

    if not is_engine_registered(BACKEND):
        WeightTransferEngineFactory.register_engine(BACKEND, "mimo.refit.receiver", "MimoWeightTransferEngine")
