"""The engine's end of a refit from disk, in each of its workers. Imports vLLM.

`RolloutEngine.load_from_disk` makes three calls, each to all workers before the next. Two of these (`probe_weights` and
`plan_weights`) change nothing, so after an error the engine goes on serving its present weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.v1.worker import gpu_worker

from mimo.refit.compat import unwrapped
from mimo.refit.plan import chunks
from mimo.refit.receiver import LoaderSession, MimoWeightTransferEngine
from mimo.refit.rendezvous import RefitError
from mimo.refit.transport.disk import Manifest, read_manifest
from mimo.refit.worker_plan import Probes, Taken, plan_taken, probe_offered
from mimo.weights.safetensors_io import HfSource

# Size of the tensors that are passed to the model's loading at a time.
CHUNK_BYTES = 512 << 20
NAMED = 10  # most names in an error message


# What each engine takes in, with the sequence of tensors in the files for which it was planned.
_plans: WeakKeyDictionary[MimoWeightTransferEngine, tuple[str, Taken]] = WeakKeyDictionary()


def probe_weights(worker: Any, folder: str) -> Probes:
    """Check the files, and return how this worker's loader responds to each naming scheme.

    Raises:
        ValueError, RefitError: files are missing or truncated, or hold other tensors than the manifest says.
    """
    engine, (manifest, _) = _engine_of(worker), _opened(Path(folder))
    if _known(engine, manifest) is not None:
        return {}
    return probe_offered(engine.model, manifest.entries, manifest.schemes)


def plan_weights(worker: Any, folder: str, probes: Sequence[Probes]) -> list[str]:
    """Return names of the tensors that this worker takes in.

    `probes` are the results of `probe_weights` on every worker.

    Raises:
        ValueError: the tensors do not belong to this engine's model.
    """
    engine, manifest = _engine_of(worker), read_manifest(Path(folder))
    taken = _known(engine, manifest)
    if taken is None:
        taken = plan_taken(engine.model, manifest.entries, manifest.schemes, "loader", probes)
        _plans[engine] = manifest.sequence(), taken
    return list(taken.spec.loader)


def load_weights(worker: Any, folder: str) -> None:
    """Load the tensors that this worker takes in. During this, and after an error, it refuses to serve.

    Raises:
        ValueError, RefitError: files have changed since `probe_weights` and `plan_weights`.
    """
    engine = _engine_of(worker)
    engine.guard.arm()
    engine.guard.close()
    manifest, source = _opened(Path(folder))
    taken = _known(engine, manifest)
    if taken is None:
        raise RefitError(f"the tensors in {folder} have changed since they were checked")
    wanted = set(taken.spec.loader)
    entries = [entry for entry in manifest.entries if entry.name in wanted]
    with gpu_worker.set_current_vllm_config(engine.vllm_config):
        session = LoaderSession(engine.model, engine.model_config, taken.loader_layers)
        try:
            for chunk in chunks(entries, CHUNK_BYTES):
                names = [entries[number].name for number in chunk]
                session.load([(taken.loader_names[name], source.read(name).to(engine.device)) for name in names])
            session.finish()
        except BaseException:
            session.abandon()
            raise
        finally:
            source.close()
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    engine.guard.received()
    engine.guard.open()


def check_all_taken(folder: Path, taken: Iterable[Sequence[str]]) -> None:
    """Raise RefitError if no worker takes some tensors of a version."""
    manifest, found = read_manifest(folder), set().union(*taken)
    left = [entry.name for entry in manifest.entries if entry.name not in found]
    if left:
        raise RefitError(f"{len(left)} tensors of {folder} are taken by no worker of the engine, which serves another "
                         f"model: {', '.join(left[:NAMED])}{' ...' if len(left) > NAMED else ''}")


def _known(engine: MimoWeightTransferEngine, manifest: Manifest) -> Taken | None:
    """Return the plan that was made for the same sequence of tensors."""
    sequence, taken = _plans.get(engine, ("", None))
    return taken if sequence == manifest.sequence() else None


def _opened(folder: Path) -> tuple[Manifest, HfSource]:
    """Open a version after comparing its files with its manifest."""
    manifest = read_manifest(folder)
    absent = [name for name in manifest.file_bytes if not (folder / name).is_file()]
    if absent:
        raise RefitError(f"{folder}: {', '.join(absent)} is in the manifest and does not exist")
    for name, size in manifest.file_bytes.items():
        if (folder / name).stat().st_size != size:
            raise RefitError(f"{folder / name} has {(folder / name).stat().st_size} bytes; its manifest says {size}")
    source = HfSource(folder)
    announced = {entry.name: (entry.dtype, entry.shape) for entry in manifest.entries}
    held = {name: (str(tensor.dtype).removeprefix("torch."), tensor.shape) for name, tensor in source.tensors.items()}
    for name in sorted(announced.keys() | held.keys()):
        if announced.get(name) != held.get(name):
            raise RefitError(f"{folder}: {name} is {_described(announced.get(name))} in the manifest and "
                             f"{_described(held.get(name))} in the files")
    return manifest, source


def _described(what: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if what is None else f"{what[0]} {list(what[1])}"


def _engine_of(worker: Any) -> MimoWeightTransferEngine:
    engine = unwrapped(worker).weight_transfer_engine
    assert isinstance(engine, MimoWeightTransferEngine), type(engine)
    return engine
