"""Options and report of a refit, as plain data."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from mimo.refit.tensor_slices import DTYPE_BYTES

# Known routes: `auto` sends each tensor the fastest way, `loader` sends all through the engine's own loading.
ROUTES = ("auto", "loader")
BACKENDS = ("gloo", "nccl", "ipc")
# Name of the first phase of a refit, in keys of the store and in messages.
SETUP = "set-up"


@dataclass(frozen=True)
class RefitOptions:
    """Options that say how weights travel.

    Attributes:
        backend: `nccl`, `gloo`, or `ipc` for an engine on the trainer's own GPUs.
        dtype: dtype of weights on the wire, which is the engine's: `bfloat16`, `float16` or `float32`. Tensors that
            must stay float32 keep it.
        route: `auto`, or `loader` for every tensor.
        chunk_bytes: largest size of the whole tensors in one chunk. Two chunks are under way at a time.
        timeout_s: seconds that one wait may take.
        verify: compare checksums of every box at every sync, as it was sent, as it arrived, and as it is read back
            from its target (see `mimo.refit.messages`). `WeightSender.verify` can switch it later.
        delta: send only blocks that have changed since the last sync (see `mimo.refit.delta`). The first sync, and
            those with `verify`, send everything.
        block_bytes: largest size of such a block.
    """

    backend: str
    dtype: str
    route: str = "auto"
    chunk_bytes: int = 512 << 20
    timeout_s: float = 300.0
    verify: bool = False
    delta: bool = False
    block_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        problems = [f"refit {what} {value!r}: known are {', '.join(known)}" for what, value, known in (
            ("backend", self.backend, BACKENDS), ("dtype", self.dtype, tuple(DTYPE_BYTES)),
            ("route", self.route, ROUTES)) if value not in known]
        problems += [f"refit {what} {value}: must be positive" for what, value in (
            ("chunk_bytes", self.chunk_bytes), ("timeout_s", self.timeout_s), ("block_bytes", self.block_bytes))
                     if value <= 0]
        if self.delta and self.backend == "ipc":
            problems.append("refit delta with backend 'ipc' is not supported: an engine on the trainer's GPUs loses "
                            "its weights when it sleeps, so that each refit has to send all of them")
        if problems:
            raise ValueError("; ".join(problems))


@dataclass
class RefitReport:
    """Result of one sync on this rank, with seconds of its own clock.

    Attributes:
        version: policy version that the engine serves now.
        sent_bytes: bytes that this rank sent.
        wire_bytes: bytes that all workers received (on the first rank).
        direct_bytes: the part of `wire_bytes` that was written directly into live parameters.
        is_delta: whether only what had changed was sent.
        seconds: seconds by part: `pause` (until the engine has stopped taking requests), `pack`, `wire` (waiting for
            transfers), `install` (the slowest worker's unpacking and loading; with NCCL, the time in which its host
            launches them), `total`.
    """

    version: str
    sent_bytes: int = 0
    wire_bytes: int = 0
    direct_bytes: int = 0
    is_delta: bool = False
    seconds: dict[str, float] = field(default_factory=dict)


BACKEND = "mimo"
# Environment variable of an engine's processes. If it is 1, vLLM gives blocks of weights the scales that the trainer's
# blockwise products use. vLLM quantises while it loads, and has no option for this.
TRAINER_SCALES = "MIMO_FP8_TRAINER_SCALES"


def register() -> None:
    """Register the backend `mimo` of `WeightTransferConfig`. Later calls do nothing.

    vLLM calls this in each of its processes, through the entry point `vllm.general_plugins` in pyproject.toml.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from mimo.refit.compat import count_workers_as_cpu_devices, is_engine_registered, use_trainer_scales

    count_workers_as_cpu_devices()
    if os.environ.get(TRAINER_SCALES) == "1":
        use_trainer_scales()
    if not is_engine_registered(BACKEND):
        WeightTransferEngineFactory.register_engine(BACKEND, "mimo.refit.receiver", "MimoWeightTransferEngine")
