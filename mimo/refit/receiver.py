"""The engine's end of a refit: a vLLM weight-transfer engine, one in each worker, registered as backend `mimo`.

vLLM makes it when the model is loaded and calls it in the four steps of its protocol. What the worker takes in is
learned from the model's own loading code (`mimo.refit.record`), never from a table of ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from mimo.refit import plan as planning
from mimo.refit.guard import Guard
from mimo.refit.loading import LoaderSession
from mimo.refit.meeting import Meeting, RefitError
from mimo.refit.messages import message_bytes, strided, torch_dtype, unpack
from mimo.refit.options import RefitOptions
from mimo.refit.sender import SETUP
from mimo.refit.slots import Wants, entry_from_json, holders_from_json
from mimo.refit.wire import Wire
from mimo.refit.worker_plan import worker_wants

DUMMY_FORMATS = ("dummy",)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where the trainer waits.

    Attributes:
        address, port: of its store.
        timeout_s: seconds that one wait may take.
        first_worker: number of this engine's first worker where several engines are fed together.
    """

    address: str
    port: int
    timeout_s: float
    first_worker: int = 0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Of one sync.

    Attributes:
        sync: its number, from 1.
        version: policy version of the weights.
        workers: of each worker, trainer rank -> digest of what that rank sends it.
    """

    sync: int
    version: str
    workers: list[dict[str, str]] = field(default_factory=list)


class MimoWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives weights from the trainer's ranks; refuses to serve while it has only some of them."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._meeting: Meeting | None = None
        self._wire: Wire | None = None
        self._guard = Guard(model)
        self._loading: LoaderSession | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Meet the trainer, find out what this worker wants, and agree on who sends it.

        Raises:
            ValueError, RefitError: the trainer's weights are not those of this model, or somebody failed; all learn it.
        """
        self.shutdown()
        parallel = self.parallel_config
        self._worker = init_info.first_worker + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._meeting = Meeting.open(init_info.address, init_info.port, f"worker {self._worker}", init_info.timeout_s)
        # Weights made up to start quickly are served to nobody.
        self._guard.arm(complete=self.vllm_config.load_config.load_format not in DUMMY_FORMATS)
        self._guarded(SETUP, self._set_up)

    def start_weight_update(self) -> None:
        """From here on nothing is served, until a whole update has come in."""
        if self._wire is None:
            raise RefitError("this worker has not met a trainer, or lost it: call init_weight_transfer_engine first")
        self._guard.close()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take in what the trainer's ranks send. Raises as `init_transfer_engine`."""
        scope = f"sync {update_info.sync}"
        self._guarded(scope, lambda: self._receive(scope, update_info))

    def finish_weight_update(self) -> None:
        """Serve the new weights. Raises RefitError where not all of them came."""
        self._guard.open()

    def shutdown(self) -> None:
        """Leave the trainer; the weights stay."""
        if self._wire is not None:
            self._wire.close()
        self._wire = self._meeting = None

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        """The trainer's end is `mimo.refit.sender.WeightSender`; vLLM 0.26 asks for this name."""
        raise RefitError("send with mimo.refit.sender.WeightSender")

    def _guarded(self, scope: str, part: Callable[[], None]) -> None:
        """Run a part of the protocol; whatever it raises, all others learn of it."""
        meeting = self._meeting
        assert meeting is not None
        try:
            part()
        except BaseException as error:
            meeting.fail(scope, str(error) or type(error).__name__)
            self.shutdown()
            raise

    def _set_up(self) -> None:
        meeting = self._meeting
        assert meeting is not None
        model = meeting.read("model", SETUP, "the trainer's tensors")
        self._options = RefitOptions(**model["options"])
        self._entries = [entry_from_json(entry) for entry in model["entries"]]
        self._dtypes = [entry.dtype for entry in self._entries]
        self._num_trainers, num_workers = model["num_trainers"], model["num_workers"]
        taken = worker_wants(self.model, self._entries, model["spellings"], self._options.route,
                             lambda value: self._share("probes", value, num_workers))
        wants, self._spelled, self._loader_layers = taken.wants, taken.spelled, taken.loader_layers
        self._publish(wants)
        holders = holders_from_json(model["holders"])
        operations = planning.receive_plan(self._entries, holders, wants, self._worker)
        self._chunks = planning.chunks(self._entries, self._options.chunk_bytes)
        self._by_sender = planning.by_sender(operations)
        self._loader_names = frozenset(wants.loader)
        self._wire = Wire(meeting.store, "weights", self._num_trainers + self._worker, self._num_trainers + num_workers,
                          self._options.backend, self._options.timeout_s)
        self._everybody = [*(f"trainer rank {rank}" for rank in range(self._num_trainers)),
                           *(f"worker {worker}" for worker in range(num_workers))]
        meeting.arrive(SETUP, "wired")
        meeting.wait_for(SETUP, "wired", self._everybody)

    def _share(self, key: str, value: Any, num_workers: int) -> list[Any]:
        """Every worker's plain value, for this worker's own."""
        assert self._meeting is not None
        self._meeting.publish(f"{key}/{self._worker}", value)
        return [self._meeting.read(f"{key}/{worker}", SETUP, f"{key} of worker {worker}")
                for worker in range(num_workers)]

    def _publish(self, wants: Wants) -> None:
        assert self._meeting is not None
        digest = wants.digest()
        self._meeting.publish(f"wants/{digest}", wants.as_json())
        self._meeting.publish(f"worker/{self._worker}", {"wants": digest})

    def _receive(self, scope: str, update_info: UpdateInfo) -> None:
        meeting = self._meeting
        assert meeting is not None
        self._compare(scope, update_info.workers[self._worker])
        # Found before the layers that are reloaded give their parameters away.
        live = dict(self.model.named_parameters(remove_duplicate=False)) | dict(self.model.named_buffers())
        meeting.arrive(scope, "ready")
        meeting.wait_for(scope, "ready", self._everybody)
        self._loading = LoaderSession(self.model, self.model_config, self._loader_layers)
        report = {"wire_bytes": 0, "direct_bytes": 0, "install_s": 0.0}
        try:
            running = self._take_in(scope, live, report)
            self._loading.finish()
        except BaseException:
            self._loading.abandon()
            raise
        finally:
            self._loading = None
        self._compare_running(scope, running)
        meeting.publish(f"{scope}/report/{self._worker}", report)
        self._guard.received()

    def _take_in(self, scope: str, live: dict[str, torch.Tensor], report: dict[str, Any]) -> dict[int, Any]:
        """Receive and install every chunk; returns each sender's running digest."""
        assert self._wire is not None and self._meeting is not None and self._loading is not None
        running = {sender: planning.Running(self._entries) for sender in self._by_sender}
        flying: list[tuple[Any, ...]] = []
        for chunk in self._chunks:
            parts = {sender: part for sender, operations in self._by_sender.items()
                     if (part := planning.within(operations, chunk))}
            messages = {sender: torch.empty(message_bytes(part, self._dtypes), dtype=torch.uint8, device=self.device)
                        for sender, part in parts.items()}
            works = self._wire.exchange([], list(messages.items()))
            flying.append((works, parts, messages))
            for sender, part in parts.items():
                running[sender].add(part)
            if len(flying) > 1:
                self._install(scope, flying.pop(0), live, report)
        for each in flying:
            self._install(scope, each, live, report)
        return running

    def _install(self, scope: str, flying: tuple[Any, ...], live: dict[str, torch.Tensor],
                 report: dict[str, Any]) -> None:
        assert self._wire is not None and self._meeting is not None and self._loading is not None
        works, parts, messages = flying
        meeting = self._meeting
        self._wire.wait(works, lambda: meeting.check(scope))
        began = time.monotonic()
        staged: dict[str, torch.Tensor] = {}
        for sender, part in parts.items():
            targets = [self._target(operation, live, staged) for operation in part]
            unpack(messages[sender], part, self._dtypes, targets)
            report["wire_bytes"] += messages[sender].numel()
            report["direct_bytes"] += message_bytes(
                [operation for operation in part if operation.name not in self._loader_names], self._dtypes)
        self._loading.load([(self._spelled[name], tensor) for name, tensor in staged.items()])
        report["install_s"] += time.monotonic() - began

    def _target(self, operation: planning.Op, live: dict[str, torch.Tensor],
                staged: dict[str, torch.Tensor]) -> torch.Tensor:
        """Where the values of an operation go: a live tensor's box, or the box of a whole tensor to be loaded."""
        if operation.name not in self._loader_names:
            return strided(live.__getitem__, operation.target, operation.box.sizes)
        entry = self._entries[operation.entry]
        if operation.name not in staged:
            staged[operation.name] = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device=self.device)
        slices = tuple(slice(start, stop) for start, stop in
                       zip(operation.box.starts, operation.box.stops, strict=True))
        return staged[operation.name][slices]

    def _compare(self, scope: str, digests: dict[str, str]) -> None:
        """Raise RefitError if a trainer rank is about to send other things than this worker is about to take in."""
        mine = {str(sender): planning.digest(self._entries, operations)
                for sender, operations in self._by_sender.items()}
        wrong = sorted(int(sender) for sender in mine.keys() | digests.keys()
                       if mine.get(sender) != digests.get(sender))
        if not wrong:
            return
        assert self._meeting is not None
        described = planning.described(self._entries, self._by_sender.get(wrong[0], []))
        self._meeting.publish(f"{scope}/difference/{wrong[0]}", {"worker": self._worker, "operations": described})
        raise RefitError(f"worker {self._worker} and trainer rank {wrong[0]} disagree about what is sent (the trainer "
                         f"says {len(digests)} ranks send here, the worker expects {len(mine)}); this worker expects "
                         f"{described[0] if described else 'nothing'} first")

    def _compare_running(self, scope: str, running: dict[int, Any]) -> None:
        assert self._meeting is not None
        for sender, digest in running.items():
            theirs = self._meeting.read(f"{scope}/running/{sender}", scope, f"the end of trainer rank {sender}")
            if theirs[str(self._worker)] != digest.hexdigest():
                raise RefitError(f"trainer rank {sender} sent worker {self._worker} another sequence of tensors than "
                                 "was announced")
