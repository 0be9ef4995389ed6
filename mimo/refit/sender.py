"""The trainer's end of a refit: every rank of the trainer sends the workers what they want of its own tensors.

The first rank drives the engine through the four calls of vLLM's weight-transfer protocol (`VLLMWeightSyncClient`).
This module does not import vLLM. Every rank plans its own share, from tables that are exchanged once.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch

from mimo.comm import broadcast_object
from mimo.grid.groups import Grids
from mimo.model.build import BuiltModel
from mimo.platform import current_platform
from mimo.protocols import ModelProvider
from mimo.refit import delta
from mimo.refit import plan as planning
from mimo.refit.messages import Part, Views, checksums, pack, parts_of_chunks, torch_dtype
from mimo.refit.options import SETUP, RefitOptions, RefitReport
from mimo.refit.rendezvous import (
    RefitError,
    Rendezvous,
    StoreAddress,
    format_error,
    participants,
    without_collections,
)
from mimo.refit.tensor_slices import (
    Address,
    RecvSpec,
    holders_table,
    meta_as_json,
    recv_spec_from_table,
    wanted_names,
)
from mimo.refit.trainer_shards import ModelWeights
from mimo.refit.transport.base import Opening, Transport
from mimo.watchdog.process_exit import on_daemon_thread

# Number of chunks whose messages may be under way while the next one is packed.
WINDOW = 2
# Extra seconds for indirect waiters, so that the process closest to a failure reports it. These are ranks that wait for
# the first rank, which waits for the engine, and senders that wait for workers, which wait for other senders.
GRACE_S = 3.0


class EngineClient(Protocol):
    """vLLM's weight-transfer calls; all block until every worker has done its part."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Meet the trainer and agree on the plan."""
        ...

    def start_weight_update(self) -> None:
        """Stop serving."""
        ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive the weights that the trainer's ranks send meanwhile."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Serve the new weights."""
        ...


@dataclass(frozen=True)
class Trainer:
    """This rank among the trainer's.

    Attributes:
        rank: rank in the trainer's world.
        world_size: number of ranks of the trainer.
        broadcast: returns the first rank's value on every rank; collective.
        address: name or address under which workers reach the first rank.
        device: device of messages.
    """

    rank: int
    world_size: int
    broadcast: Callable[[Any], Any]
    address: str
    device: torch.device


class WeightSender:
    """Sender on a rank of the trainer. Its construction, `send` and `close` are collective over the trainer.

    Args:
        weights: weights of the ranks.
        trainer: this rank.
        client: the engine, which only the first rank calls; None on other ranks.
        num_workers: number of workers of the engine, over all data-parallel replicas.
        options: options of the refits.

    Raises:
        RefitError: on every rank: the engine did not answer or refused the weights (tensors that it does not know, that
            it lacks or that would be rounded), or some rank failed.

    Attributes:
        verify: compare checksums at the next syncs; the same on every rank. The options give the first value.
        is_changed: whether workers refuse, at the next syncs, tensors that come with the values of the sync before,
            which was verified, too.
        kv_scales: scales of the engine's FP8 cache for the next syncs, on the first rank: number of a layer -> scale of
            its keys, of its values and of its queries. Layers without scales get 1. None: the engine has no such
            cache, or one without scales.
    """

    def __init__(self, weights: ModelWeights, trainer: Trainer, client: EngineClient | None, num_workers: int,
                 options: RefitOptions) -> None:
        self.weights, self.trainer, self.client, self.options = weights, trainer, client, options
        self.num_workers = num_workers
        self._everybody = participants(trainer.world_size, num_workers)
        self.verify = options.verify
        self.is_changed = False
        self.kv_scales: Mapping[int, Sequence[float]] | None = None
        self._syncs = 0
        # Checksums of the boxes for each worker as they were last sent, for delta refits; None before the first sync.
        self._sums: dict[int, list[int]] | None = None
        self._wire: Transport | None = None
        self._opening: Opening | None = None
        self._rendezvous = self._meet()
        self._guarded(SETUP, self._set_up)

    def send(self, version: str) -> RefitReport:
        """Give the engine the current weights. Collective over the trainer.

        Args:
            version: policy version that the engine returns with what it generates from then on.

        Raises:
            RefitError: on every rank: the sync did not happen; the engine refuses to generate until one has.
        """
        self._syncs += 1
        scope = f"sync {self._syncs}"
        report = RefitReport(version)
        self._guarded(scope, lambda: self._sync(scope, version, report))
        return report

    def close(self) -> None:
        """Disconnect from the engine, which keeps its weights."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        elif self._opening is not None:
            self._opening.abandon()

    @property
    def _engine(self) -> EngineClient:
        assert self.client is not None, "the first rank alone calls the engine"
        return self.client

    def _meet(self) -> Rendezvous:
        """Serve the store on the first rank, and connect to it on the others.

        Raises:
            RefitError: on every rank: one of them failed.
        """
        who, limit_s = self._everybody[self.trainer.rank], self.options.timeout_s
        rendezvous: Rendezvous | None = None
        served: StoreAddress | str | None = None
        if self.trainer.rank == 0:
            try:
                rendezvous, served = Rendezvous.host(self.trainer.address, who, limit_s)
            except RefitError as error:
                served = str(error)  # the others wait for it
        served = self.trainer.broadcast(served)
        if not isinstance(served, StoreAddress):
            raise RefitError(f"{SETUP} failed: {served}")
        self._store_address = served
        failed: RefitError | None = None
        try:
            rendezvous = rendezvous or Rendezvous.join(served, who, limit_s)
            rendezvous.arrive(SETUP, "met")
            if self.trainer.rank == 0:
                rendezvous.wait_for(SETUP, "met", self._everybody[:self.trainer.world_size])
        except RefitError as error:
            failed = error
        # The set-up begins with a collective of the trainer's ranks, in which all would wait for one that is not there.
        problem = self.trainer.broadcast("" if failed is None else str(failed))
        if failed is not None:
            raise failed
        if problem:
            raise RefitError(f"{SETUP} failed: {problem}")
        assert rendezvous is not None
        return rendezvous

    def _guarded(self, scope: str, part: Callable[[], None]) -> None:
        """Run a part of the protocol, and tell all other processes if it raises."""
        try:
            part()
        except BaseException as error:
            self._rendezvous.fail(scope, format_error(error))
            self.close()
            difference = self._difference(scope)
            if difference:
                raise RefitError(f"{error}\n{difference}") from error
            raise

    @without_collections()
    def _set_up(self) -> None:
        weights, trainer, rendezvous = self.weights, self.trainer, self._rendezvous
        call = None
        if trainer.rank == 0:
            rendezvous.publish("model", {
                "entries": [meta_as_json(entry) for entry in weights.entries], "spellings": list(weights.schemes),
                "options": asdict(self.options), "num_trainers": trainer.world_size,
                "num_workers": self.num_workers})
            call = self._call(SETUP, self._engine.init_weight_transfer_engine,
                              asdict(self._store_address) | {"timeout_s": self.options.timeout_s})
        self._opening = Opening(rendezvous, SETUP, self.options, trainer.rank, trainer.world_size, trainer.device,
                                self._everybody)
        # The engine's call is under way: its workers trace their loaders, and then publish what they want.
        weights.locate()
        if trainer.rank == 0:
            rendezvous.publish("holders", holders_table(weights.holders))
        specs = self._read_specs()
        operations = planning.send_plan(weights.entries, weights.holders, weights.slices, specs, trainer.rank)
        self._by_worker = planning.grouped(operations, "receiver")
        if self.options.delta:
            # Cut the plan into blocks, and read which tensors each worker's loader has to get together.
            self._loaders = {worker: frozenset(spec.loader) for worker, spec in specs.items()}
            self._by_worker = {worker: delta.cut(own, weights.entries, self._loaders[worker], self.options.block_bytes)
                               for worker, own in self._by_worker.items()}
            self._blocks = self._blocks_of(self._by_worker)
            self._groups = {worker: rendezvous.read(f"groups/{worker}", SETUP, f"the loader of worker {worker}")
                            for worker in self._by_worker}
        self._chunks = self._chunks_of(self._by_worker)
        digests = {worker: planning.digest(weights.entries, operations)
                   for worker, operations in self._by_worker.items()}
        rendezvous.publish(f"plan/{trainer.rank}", {str(worker): digest for worker, digest in digests.items()})
        rendezvous.meet(SETUP, "planned", self._everybody)
        self._wire = self._opening.finish()
        rendezvous.meet(SETUP, "wired", self._everybody)
        if trainer.rank == 0:
            # For each worker, the digests of what each trainer rank sends it.
            plans = [rendezvous.read(f"plan/{rank}", SETUP, f"the plan of trainer rank {rank}")
                     for rank in range(trainer.world_size)]
            self._metadata = [{str(rank): plan[str(worker)] for rank, plan in enumerate(plans) if str(worker) in plan}
                              for worker in range(self.num_workers)]
        self._result(SETUP, call)

    def _chunks_of(self, by_worker: dict[int, list[planning.Op]]) -> list[list[Part]]:
        return parts_of_chunks(self.weights.entries, self.options.chunk_bytes, by_worker, attrgetter("source"))

    def _blocks_of(self, by_worker: dict[int, list[planning.Op]]
                   ) -> tuple[Views, list[torch.dtype], dict[int, list[int]]]:
        """Return this rank's blocks, their dtypes on the wire, and the number of the block of each operation.

        A block that goes to several workers is one block.
        """
        numbers: dict[tuple[Address, tuple[int, ...], int], int] = {}
        places: dict[int, list[int]] = {worker: [] for worker in by_worker}
        for worker, operations in by_worker.items():
            for each in operations:
                assert each.source is not None, "a rank plans where its boxes are"
                places[worker].append(numbers.setdefault((each.source, each.box.sizes, each.entry), len(numbers)))
        views = Views([address for address, _, _ in numbers], [sizes for _, sizes, _ in numbers])
        return views, [torch_dtype(self.weights.entries[entry].dtype) for _, _, entry in numbers], places

    def _read_specs(self) -> dict[int, RecvSpec]:
        """Return what each worker wants of this rank's tensors; equal workers share one object.

        Raises:
            RefitError: on the first rank: nobody takes some of the trainer's tensors.
        """
        tables: dict[str, RecvSpec] = {}
        taken: set[str] = set()
        mine = {part.name for part in self.weights.slices}
        specs = {}
        for worker in range(self.num_workers):
            digest = self._rendezvous.read(f"worker/{worker}", SETUP, f"what worker {worker} wants")["wants"]
            if digest not in tables:
                table = self._rendezvous.read(f"wants/{digest}", SETUP, "a table of wants")
                tables[digest] = recv_spec_from_table(table, mine)
                taken |= wanted_names(table) if self.trainer.rank == 0 else set()
            specs[worker] = tables[digest]
        left = [entry.name for entry in self.weights.entries if entry.name not in taken and self.trainer.rank == 0]
        if left:
            raise RefitError(f"{len(left)} tensors of the trainer are taken by no worker of the engine, which serves "
                             f"another model: {', '.join(left[:10])}{' ...' if len(left) > 10 else ''}")
        return specs

    @torch.no_grad()
    @without_collections()
    def _sync(self, scope: str, version: str, report: RefitReport) -> None:
        started = time.monotonic()
        if self._wire is None:
            raise RefitError(f"{scope}: this sender is closed: an earlier refit failed or it was ended; make a new one")
        tensors = self.weights.prepare()
        # Nothing is left out of a sync that verifies.
        report.is_delta = self._sums is not None and not self.verify and not self.is_changed
        # The engine's call ends when its workers have received everything, which this rank sends meanwhile.
        call = None
        if self.trainer.rank == 0:
            call = self._call(scope, self._update, scope, {
                "sync": self._syncs, "workers": self._metadata, "verify": self.verify,
                "is_changed": self.is_changed, "is_delta": report.is_delta,
                "kv_scales": None if self.kv_scales is None else dict(self.kv_scales)})
        before, sums, chunks = self._sums, self._block_sums(tensors), self._chunks
        if before is not None and sums is not None and report.is_delta:
            chunks = self._changed_chunks(scope, before, sums)
        self._sums = None  # Until the sync has succeeded it is not known what the engine has.
        # Nothing is sent before every worker has stopped serving and agrees with what is to come.
        self._rendezvous.meet(scope, "ready", self._everybody)
        report.seconds["pause"] = time.monotonic() - started
        self._transfer(scope, tensors, chunks, report)
        self._wire.release(partial(self._rendezvous.check, scope), GRACE_S)
        self._rendezvous.arrive(scope, "sent")
        self._result(scope, call)
        if self.trainer.rank == 0:
            reports = [self._rendezvous.read(f"{scope}/report/{worker}", scope, f"the report of worker {worker}")
                       for worker in range(self.num_workers)]
            report.wire_bytes = sum(each["wire_bytes"] for each in reports)
            report.direct_bytes = sum(each["direct_bytes"] for each in reports)
            report.seconds["install"] = max(each["install_s"] for each in reports)
            taken = {layer for each in reports for layer in each["kv_layers"]}
            if self.kv_scales is not None and taken != self.kv_scales.keys():
                raise RefitError(f"{scope}: the trainer has scales of keys and values for layers "
                                 f"{sorted(self.kv_scales)}, and the engine has a cache for {sorted(taken)} of them")
            # With this call the engine serves again. The other ranks wait for it: none goes on after a failed sync.
            self._result(scope, self._call(scope, self._engine.finish_weight_update, version))
            self._rendezvous.arrive(scope, "finished")
            self._forget(self._syncs - 2)
        self._rendezvous.wait_for(scope, "finished", ["trainer rank 0"], GRACE_S)
        self._sums = sums
        report.seconds["total"] = time.monotonic() - started

    def _block_sums(self, tensors: Mapping[str, torch.Tensor]) -> dict[int, list[int]] | None:
        """Return the checksums of all blocks, in the dtype of the wire; None without delta refits."""
        if not self.options.delta:
            return None
        views, dtypes, places = self._blocks
        found = checksums([view.to(dtype) for view, dtype in zip(views.of(tensors), dtypes, strict=True)]
                          ).tolist() if dtypes else []
        return {worker: [found[place] for place in own] for worker, own in places.items()}

    def _changed_chunks(self, scope: str, before: dict[int, list[int]],
                        sums: dict[int, list[int]]) -> list[list[Part]]:
        """Announce which blocks have changed, and return the messages that carry them."""
        loader, own = delta.announce(self._by_worker, self._loaders, sums, before)
        # A worker reads its own part under a key that the next sync writes again, once it knows that it is there.
        self._rendezvous.publish_bytes({delta.key(self.trainer.rank, worker): each.packed()
                                        for worker, each in own.items()})
        self._rendezvous.publish(f"{scope}/delta/{self.trainer.rank}", sorted(loader))
        everyone = [self._rendezvous.read(f"{scope}/delta/{rank}", scope, f"the changes of trainer rank {rank}")
                    for rank in range(self.trainer.world_size)]
        return self._chunks_of({
            worker: delta.select(operations, own[worker].changed, self._loaders[worker],
                                 delta.changed_entries(everyone, self._groups[worker]))
            for worker, operations in self._by_worker.items()})

    def _update(self, scope: str, update_info: dict[str, Any]) -> None:
        self._engine.start_weight_update()
        self._rendezvous.check(scope)  # an engine that was stopped may answer long after this sync was given up
        self._engine.update_weights(update_info)

    def _transfer(self, scope: str, tensors: Mapping[str, torch.Tensor], chunks: Sequence[Sequence[Part]],
                  report: RefitReport) -> None:
        """Send every chunk, and then the running digest of each worker's messages."""
        assert self._wire is not None
        check = partial(self._rendezvous.check, scope)
        running = {worker: hashlib.sha256() for worker in self._by_worker}
        sums: dict[int, dict[int, torch.Tensor]] = {worker: {} for worker in self._by_worker}
        # Transfers that are under way, with their messages, whose memory they need.
        flying: list[tuple[Any, Any]] = []
        report.seconds["pack"] = report.seconds["wire"] = 0.0
        for number, chunk in enumerate(chunks):
            began = time.monotonic()
            messages = []
            for part in chunk:
                message = pack(part.layout, part.views.of(tensors), self.trainer.device)
                messages.append((self.trainer.world_size + part.peer, message))
                running[part.peer].update(part.text)
                if self.verify:
                    sums[part.peer][number] = checksums(part.layout.boxes(message))
            report.sent_bytes += sum(message.numel() for _, message in messages)
            flying.append((self._wire.exchange(messages, []), messages))
            packed = time.monotonic()
            report.seconds["pack"] += packed - began
            # The oldest chunk has to be through before the next one is packed, or messages would fill the memory.
            if len(flying) > WINDOW:
                self._wire.wait(flying.pop(0)[0], check, GRACE_S)
            report.seconds["wire"] += time.monotonic() - packed
        began = time.monotonic()
        for works, _ in flying:
            self._wire.wait(works, check, GRACE_S)
        report.seconds["wire"] += time.monotonic() - began
        if self.verify:
            self._rendezvous.publish(f"{scope}/sums/{self.trainer.rank}", {
                worker: {number: each.tolist() for number, each in own.items()} for worker, own in sums.items()})
        self._rendezvous.publish(f"{scope}/running/{self.trainer.rank}",
                                 {worker: digest.hexdigest() for worker, digest in running.items()})

    def _forget(self, sync: int) -> None:
        """Delete the flags of an earlier sync."""
        scope = f"sync {sync}"
        keys = [f"{scope}/{stage}/{who}" for stage in ("ready", "sent") for who in self._everybody]
        keys += [f"{scope}/{what}/{rank}" for what in ("running", "sums", "delta")
                 for rank in range(self.trainer.world_size)]
        keys += [f"{scope}/report/{worker}" for worker in range(self.num_workers)]
        for key in keys if sync > 0 else ():
            self._rendezvous.store.delete_key(key)

    def _difference(self, scope: str) -> str:
        """Describe the first difference between this rank's plan and that of a worker which refused it."""
        key = f"{scope}/difference/{self.trainer.rank}"
        theirs = self._rendezvous.glimpse(key, 0.0)
        if theirs is None:
            return ""
        mine = planning.described(self.weights.entries, self._by_worker.get(theirs["worker"], []))
        found = planning.first_difference(mine, theirs["operations"],
                                          f"trainer rank {self.trainer.rank}", f"worker {theirs['worker']}")
        found = found or f"trainer rank {self.trainer.rank} and worker {theirs['worker']} plan the same: only the " \
                         "metadata that the worker was given is wrong"
        self._rendezvous.publish(f"{key}/answer", found)
        return found

    def _call(self, scope: str, function: Callable[..., None], *args: Any) -> Future[None]:
        """Call the engine from another thread while this one does its part. All processes learn of its failure."""
        def run() -> None:
            try:
                function(*args)
            except BaseException as error:
                self._rendezvous.fail(scope, f"the engine: {format_error(error)}")
                raise RefitError(f"{scope}: the engine refused: {format_error(error)}") from error

        return on_daemon_thread(run, "refit-client")

    def _result(self, scope: str, call: Future[None] | None) -> None:
        """Wait for the end of a call, as long as nobody has failed. Raises RefitError if it does not end in time."""
        if call is not None:
            self._rendezvous.until(scope, call.done, lambda: f"{scope}: trainer rank {self.trainer.rank} waits for the "
                                                             "engine's answer")
            call.result()


def connect(built: BuiltModel, grids: Grids, provider: ModelProvider, family_config: Any,
            client: EngineClient | None, num_workers: int, options: RefitOptions, address: str = "",
            weights: ModelWeights | None = None) -> WeightSender:
    """Connect a trainer with an engine. Collective over the trainer's world.

    Args:
        built: this rank's model.
        grids: process groups.
        provider: the model family.
        family_config: its configuration.
        client: the engine, which only the first rank calls; None on other ranks.
        num_workers: number of workers of the engine.
        options: options of the refits.
        address: name or address under which workers reach the first rank; empty: this machine's name.
        weights: the model's weights, if they were found before, such as while the engine started.

    Raises:
        ValueError, RefitError: trainer and engine do not fit each other, or one of them did not answer. Or `weights`
            are of another dtype than the options.
    """
    if weights is not None and weights.dtype != options.dtype:
        raise ValueError(f"the weights were found to travel as {weights.dtype}, and the options say {options.dtype}")
    weights = weights or ModelWeights(built, grids, provider, family_config, options.dtype)
    on_gpu = options.backend == "nccl" or (options.backend == "ipc" and current_platform().name == "cuda")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    trainer = Trainer(grids.rank, grids.layout.world_size, lambda value: broadcast_object(grids, value),
                      broadcast_object(grids, address or socket.gethostname()), device)
    return WeightSender(weights, trainer, client, num_workers, options)
