"""Loads a checkpoint in place, after checking everything against its index, and checks the loaded values."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from mimo import registry
from mimo.checkpoint import paths
from mimo.checkpoint.differences import config_differences, data_differences, flat_config, model_differences, refused
from mimo.checkpoint.entries import PROJECTOR, Optimized, Saved, broadcast_from_writers, differing, take_weights
from mimo.checkpoint.reader import (
    DataOnlyLoadStrategy,
    damage_of,
    is_covered,
    read_common,
    read_index,
    require_checksums,
)
from mimo.checkpoint.state import (
    FORMAT,
    Progress,
    RunState,
    Source,
    is_imported,
    model_entries,
    optimizer_entries,
    restore_rng,
    rng_objects,
    stream_object,
)
from mimo.comm import broadcast_object, broadcast_result, gather, raise_known_errors, raise_on_any_rank
from mimo.config.optim import OptimConfig
from mimo.config.trainer import CheckpointConfig, RunConfig
from mimo.protocols import LANGUAGE
from mimo.watchdog.watchdog import Watchdog
from mimo.weights.rules import global_name

logger = logging.getLogger(__name__)

# Largest checkpoint that is read in full to find out whether it is undamaged.
COMPARED_BYTES = 32 << 30
# Keys of the layers of multi-token prediction.
MTP = f"{LANGUAGE}.mtp."


@dataclass
class Loaded:
    """Result of a load.

    Attributes:
        weights_only: whether nothing else was loaded (--finetune, and imported weights).
        progress: progress of the checkpoint's run; the beginning with `weights_only`.
        streams: state for the data loader; None if the data starts anew.
        notes: lines for the log on what differs from the checkpoint.
    """

    weights_only: bool
    progress: Progress
    streams: dict[str, Any] | None
    notes: list[str]


def find_checkpoint(state: RunState) -> Source | None:
    """Find the checkpoint that a run with --load starts from, the same on every rank; None if it starts fresh.

    If --save is another folder than --load and already has a checkpoint of this run, the run continues from that one.
    So a job that was stopped continues when the same command starts it again.

    Raises:
        ValueError: --load has no checkpoint, or --save has checkpoints of another run.
    """
    flags = state.config.checkpoint
    if flags.load is None:
        return None
    root = Path(flags.load)
    # The saver, which is made before, has the lock of --save by now. So no other run is saving there.
    return broadcast_result(state.grids, lambda: find_source(flags, root, repair=flags.save is not None))


def find_source(flags: CheckpointConfig, root: Path, *, repair: bool) -> Source | None:
    """Find the checkpoint that a run starts from, as `find_checkpoint` does, on one rank and without a model.

    With `repair`, which is for the owner of the lock, an interrupted publication in --save is undone. In a folder of
    --load that is not that of --save, nothing is ever changed, because another run may be saving there.

    Raises:
        ValueError: --load has no checkpoint, --save has checkpoints of another run, or the latest one is not complete.
    """
    if flags.starts_elsewhere:
        assert flags.load is not None and flags.save is not None
        own_root = Path(flags.save)
        own = paths.find(own_root, None, "--save", repair=repair)
        # Imported weights are not a result of this run.
        if own is not None and own.name != paths.RELEASE:
            began: str | None = flat_config(read_common(own).get("config", "")).get("load")
            # It may also have been started again with --load and --save the same folder.
            before = replace(flags, load=began)
            if began is None or (before.starts_elsewhere and os.path.realpath(began) != os.path.realpath(flags.load)):
                raise ValueError(
                    f"--load {flags.load} with --save {own_root}: {own.name} there is of a run that began "
                    f"{'without --load' if began is None else f'with --load {began}'}. To go on from it give --load "
                    f"{own_root}, to start from {flags.load} give --save another folder")
            return Source(own, "--save", True)
    folder = paths.find(root, flags.ckpt_step, repair=repair and flags.load_is_save)
    if folder is not None:
        return Source(folder, "--load", flags.save is not None and not flags.starts_elsewhere)
    if not flags.load_is_save:
        what = "holds no checkpoint" if root.is_dir() else "does not exist"
        raise ValueError(f"--load {root} {what}; a run starts from scratch only if --save names the same folder")
    return None


def load_checkpoint(state: RunState, folder: Path, watchdog: Watchdog, flag: str = "--load") -> Loaded:
    """Load what the flags ask for, in place. Collective over the world.

    `flag` names the folder, as in `Source`. With `--save`, the run continues from its own checkpoint and loads all of
    it, because flags such as --no-load-optim are about --load.

    Raises:
        ValueError: tensors are missing, left over or of another shape or dtype, all of which the message lists, or
            something is damaged. Nothing was changed unless the checkpoint is damaged.
    """
    with watchdog.on_files("checkpoint to load", folder=str(folder)):
        common, index, notes = _open(state, folder, flag)
        flags = state.config.checkpoint
        if flag != "--load":  # the run continues from its own checkpoint
            flags = replace(flags, finetune=False, load_optim=True, load_scheduler=True, load_rng=True, load_data=True)
        weights_only = flags.finetune or is_imported(common)
        saved = state.saved()
        held = state.held(saved)
        wants_optimizer = flags.load_optim and not weights_only
        fresh = _fresh_parts(state, common, held, flag) if wants_optimizer else None
        continued = [one for one in held if fresh is not None and one.saved.part not in fresh[one.saved.module]]
        entries = {"model": model_entries(state, saved), "optimizer": optimizer_entries(continued)}
        notes += _check(state, folder, common, index, entries, wants_optimizer=wants_optimizer, flag=flag,
                        weights_only=weights_only)
        if not is_imported(common):  # imported weights have no run whose flags could differ
            notes += config_differences(common["config"], state.config)
        objects = {} if weights_only else _objects(state, flags, index, notes)
        if "loader" in objects:
            notes += _check_data(state, common, f"{flag} {folder}")
        loaded = _load(state, folder, saved, {**entries, **objects}, flag)
        _finish_optimizer(state, common, held, continued, folder)
    for module, parts in sorted((fresh or {}).items()):
        notes += [f"{part} ({module}) did not train before: its optimizer starts fresh" for part in sorted(parts)]
    # Each rank has notes on its own modules.
    notes = list(dict.fromkeys(note for of_rank in gather(state.grids, notes) for note in of_rank))
    progress, streams = Progress(), None
    if not weights_only:
        progress, streams = _restore(state, flags, common, loaded, has_streams="loader" in objects)
        # One rank looks, because all of them have to agree on whether an evaluation is due.
        if broadcast_object(state.grids, (folder / paths.EVALUATED).exists()):
            progress.evaluated_iteration = progress.iteration
    return Loaded(weights_only, progress, streams, notes)


def load_weights(state: RunState, folder: Path, watchdog: Watchdog, flag: str) -> None:
    """Load only weights and buffers, in place. Optimizers keep their copies. Collective over the world.

    Raises:
        ValueError: as `load_checkpoint`.
    """
    with watchdog.on_files("weights to load", folder=str(folder)):
        common, index, notes = _open(state, folder, flag)
        saved = state.saved()
        entries = {"model": model_entries(state, saved)}
        notes += _check(state, folder, common, index, entries, wants_optimizer=False, flag=flag, weights_only=True)
        for note in notes:
            logger.info("%s: %s", flag, note)
        _load(state, folder, saved, entries, flag)


def _open(state: RunState, folder: Path, flag: str) -> tuple[dict[str, Any], Metadata, list[str]]:
    """Read the checkpoint's common state and index, with notes on how its model differs from the run's.

    Raises:
        ValueError: the checkpoint cannot be read, or its model computes something else.
    """
    error, common, index, notes = None, {}, None, list[str]()
    try:
        common, index = read_common(folder), read_index(folder)
        if not {"iteration", "config", "frozen", "optimizer_steps"} <= common.keys():
            error = f"{folder}: common.pt is not that of a checkpoint of this trainer"
        elif common.get("format", FORMAT) != FORMAT:
            error = (f"{flag} {folder}: it has format {common['format']}, and this version reads format {FORMAT}; load "
                     "it with the version that saved it")
        elif state.config.checkpoint.ckpt_verify:
            require_checksums(folder)
    except (ValueError, OSError) as problem:
        error = str(problem)
    _stop_for_damage(state, folder, error, flag)
    assert index is not None, "raised above"
    # Tensors of the right shapes may still be of a model that computes something else, such as one with another rotary
    # base. No error would show that.
    config = state.config
    if not common.get("model"):
        notes = ["the checkpoint is of an older version, which did not store the model's configuration: whether flags "
                 "such as --norm-epsilon and --rotary-base are the same was not checked"]
    else:
        modules = [module for module in state.grids.layout.grids if module in common["grids"]]
        try:
            differences = model_differences(common["model"], registry.model_provider(config.model.model_provider),
                                            config.model_family, modules)
        except ValueError as problem:
            error = str(problem)
        else:
            lines, notes = refused(differences, config.checkpoint.allowed_differences)
            if lines:
                error = "\n  ".join([
                    f"{flag} {folder}: its weights belong to a model that computes something else. Give the "
                    "checkpoint's values or, if the weights fit this model all the same, --allow-difference with the "
                    "name of the flag:", *lines])
    raise_on_any_rank(state.grids, error)
    return common, index, notes


def _check_data(state: RunState, common: dict[str, Any], source: str) -> list[str]:
    """Compare the data with the checkpoint's and return notes. Collective.

    Raises:
        ValueError: the streams cannot continue without losing or repeating samples.
    """
    error, notes = None, list[str]()
    if state.grids.rank == 0 and not common.get("data"):
        notes = ["the checkpoint is of an older version, which did not store the flags of the data: whether they are "
                 "the same was not checked"]
    elif state.grids.rank == 0:
        lines, notes = refused(data_differences(common["data"], state.data),
                               state.config.checkpoint.allowed_differences)
        if lines:
            error = "\n  ".join([
                f"{source}: the data cannot go on where it was, samples would be lost, repeated or changed; give the "
                "checkpoint's values, --no-load-data to start the data anew, or --allow-difference with the name of "
                "the flag to go on at the same place", *lines])
    raise_on_any_rank(state.grids, error)
    return notes


def _fresh_parts(state: RunState, common: dict[str, Any], held: list[Optimized], flag: str) -> dict[str, set[str]]:
    """Return the parts that train now and were frozen when the checkpoint was made, by module.

    Raises:
        ValueError: the checkpoint has no optimizer, or lacks that of a part which trained.
    """
    steps = common["optimizer_steps"]
    wanted: dict[str, set[str]] = {}
    for one in held:
        wanted.setdefault(one.saved.module, set()).add(one.saved.part)
    error = None
    fresh: dict[str, set[str]] = {module: set() for module in wanted}
    if steps is None:
        error = (f"{flag} {state.config.checkpoint.load}: the checkpoint holds no optimizer (--no-save-optim): give "
                 "--no-load-optim, or --finetune")
        if flag != "--load":
            error = (f"{flag}: the run cannot go on in full from its own checkpoint, which holds no optimizer "
                     "(--no-save-optim): give --load the folder of --save, with --no-load-optim")
    elif dtypes := _other_dtypes(common, state.config):
        error = (f"{flag}: the checkpoint's optimizer state was saved with {dtypes[0]}, and this run has {dtypes[1]}: "
                 "give the checkpoint's flags, or start with fresh optimizer state (--load with --no-load-optim)")
    else:
        for module, parts in wanted.items():
            fresh[module] = parts - steps.get(module, {}).keys()
            strange = sorted(part for part in fresh[module] if part not in common["frozen"])
            if strange:
                error = (f"{flag}: the checkpoint has no optimizer state of {', '.join(strange)} ({module}), which "
                         "trained then")
    raise_on_any_rank(state.grids, error)
    return fresh


def _other_dtypes(common: dict[str, Any], config: RunConfig) -> tuple[str, str] | None:
    """Return the flags of the checkpoint and of the run for dtypes of optimizer state, where they differ."""
    own = config.optim.saved_dtypes
    # Checkpoints of older versions do not say: they have the dtypes that are the defaults.
    stored = common.get("optimizer_dtypes") or OptimConfig().saved_dtypes

    def words(flags: dict[str, Any]) -> str:
        return " ".join(f"--no-{name[2:]}" if value is False else name if value is True else f"{name} {value}"
                        for name, value in flags.items() if own[name] != stored[name])

    return None if own == stored else (words(stored), words(own))


def _check(state: RunState, folder: Path, common: dict[str, Any], index: Metadata,
           entries: dict[str, dict[str, ShardedTensor]], *, wants_optimizer: bool, weights_only: bool,
           flag: str) -> list[str]:
    """Compare what this run loads with what the checkpoint holds. One error lists everything that does not fit.

    Returns:
        Notes on ignored tensors, on the first rank.
    """
    missing, clashes, notes = set(), set(), []
    metadata = index.state_dict_metadata
    stored = {key: value for key, value in metadata.items() if isinstance(value, TensorStorageMetadata)}
    requested = {entry.key: entry for group in entries.values() for entry in group.values()}
    for key, entry in requested.items():
        if key not in stored:
            missing.add(key)
            continue
        shape, dtype = tuple(stored[key].size), stored[key].properties.dtype
        if shape != tuple(entry.global_shape) and not entry.allow_shape_mismatch:
            clashes.add(f"{key}: shape {list(shape)} in the checkpoint, {list(entry.global_shape)} in this run")
        if dtype != entry.dtype:
            clashes.add(f"{key}: {dtype} in the checkpoint, {entry.dtype} in this run")
    # Each rank knows only what it asks for itself. What nobody asks for shows when all requests are together.
    reports = gather(state.grids, (missing, clashes, set(requested)))
    error = None
    if state.grids.rank == 0:
        asked = set().union(*(report[2] for report in reports))
        left = {key for key in stored if key not in asked and _concerns(key, state, common, wants_optimizer)}
        # Weights may come from a run with multi-token prediction, without which the model works as well.
        if weights_only and not any(key.startswith(MTP) for key in asked):
            passed_over = {key for key in left if key.startswith(MTP)}
            left -= passed_over
            if passed_over:
                notes.append(f"multi-token prediction ({len(passed_over)} tensors) is passed over: this run has none")
        gaps = {f"{key}: its pieces leave something out or overlap" for key in asked
                if key in stored and not is_covered(stored[key])}
        lines: list[str] = []
        for title, found in (("missing in the checkpoint", set().union(*(report[0] for report in reports))),
                             ("of another shape or dtype", set().union(*(report[1] for report in reports))),
                             ("in the checkpoint, but not in this run", left), ("incomplete in the checkpoint", gaps)):
            if found:
                lines += [f"{title} ({len(found)}):", *(f"  {name}" for name in sorted(found))]
        if lines:
            error = "\n".join([f"{flag} {folder} does not fit this run; nothing was loaded", *lines])
    raise_on_any_rank(state.grids, error)
    return notes


def _concerns(key: str, state: RunState, common: dict[str, Any], wants_optimizer: bool) -> bool:
    """Whether a stored tensor belongs to something that this run loads, so that it must not be left over.

    Optimizer state of parts that are frozen now may be left over, and so may modules that this run does not have.
    """
    modules = state.grids.layout.grids
    if key.startswith("mimo."):
        module = key.split(".")[1]
        if module not in modules:
            return module not in common["grids"]
        part = PROJECTOR if ".input_projections." in key else module
        return wants_optimizer and part not in state.config.model.frozen
    return key.split(".")[0] in modules or key.split(".")[0] not in common["grids"]


def _objects(state: RunState, flags: CheckpointConfig, index: Metadata, notes: list[str]) -> dict[str, Any]:
    """Return entries for the states of generators and data streams that the checkpoint has for this rank."""
    stored, objects = set(index.state_dict_metadata), {}
    if flags.load_rng:
        wanted = rng_objects(None, state.grids)
        objects["rng"] = {name: one for name, one in wanted.items() if one.unique_key in stored}
        lacking = [name for name in wanted if name not in objects["rng"]]
        if lacking:
            notes.append(f"random generators of {', '.join(lacking)} start from --seed: the checkpoint has none for a "
                         "grid of this size")
    lanes = sorted(ShardedObject.empty_from_unique_key(key).key.split(".")[2:] for key in stored
                   if key.startswith("mimo.loader."))
    names = ["/".join(lane) for lane in lanes] if flags.load_data else []
    if not flags.load_data:
        notes.append("the data starts at its beginning: --no-load-data")
    elif not names:
        notes.append("the data starts at its beginning: the checkpoint holds no state of data streams")
    if names:
        streams = _wanted_streams(list(state.streams["streams"]), names, state.grids.layout.num_lanes)
        objects["loader"] = {name: stream_object(name, None, main=False) for name in streams}
    return objects


def _wanted_streams(own: list[str], stored: list[str], num_lanes: int) -> list[str]:
    """Return the stored streams from which this rank's streams, `own`, can continue.

    All streams of an indexed data set are at the same sample, so any of them can replace a missing one. Lanes that are
    read once for all modules are at different samples. If their number has changed, their reader needs all of them.
    """
    shared = [name for name in stored if name.startswith(f"{paths.SHARED_STREAM}/")]
    if own and shared and len(shared) != num_lanes:
        return stored
    wanted = [name for name in own if name in stored]
    if len(wanted) < len(own):
        wanted.append(next((name for name in stored if name not in wanted), stored[0]))
    return list(dict.fromkeys(wanted))


def _load(state: RunState, folder: Path, saved: list[Saved], entries: dict[str, Any], flag: str) -> dict[str, Any]:
    """Load tensors in place, and check the weights among them, `saved`. Return the loaded objects by group.

    Raises:
        ValueError: the checkpoint is damaged, or weights are not finite.
    """
    strategy = DataOnlyLoadStrategy(state.config.checkpoint.ckpt_verify)
    # One replica reads each weight, just as one wrote it, and sends it to the others.
    read = {name: entry for name, entry in entries["model"].items() if entry.replica_id[-1] == 0}
    error, loaded = None, {}
    try:
        loaded = dist_checkpointing.load(
            {key: value for key, value in (entries | {"model": read}).items() if value}, str(folder), strategy,
            validate_access_integrity=False)
    except (ValueError, OSError, CheckpointingException) as problem:
        error = f"{flag}: {problem}"
    _stop_for_damage(state, folder, error, flag)
    broadcast_from_writers(saved, state.grids)
    check_finite(state, saved, folder)
    return loaded


def _stop_for_damage(state: RunState, folder: Path, error: str | None, flag: str) -> None:
    """Stop every rank if any has an error, and name a checkpoint that can be loaded. Collective over the world."""
    errors: list[str | None] = gather(state.grids, error)
    failed = [rank for rank, message in enumerate(errors) if message is not None]
    if not failed:
        return
    # It may take long to find a whole checkpoint. No rank ends before that, because the launcher would end all others.
    hint: str = broadcast_result(state.grids, lambda: _whole_one_before(folder, flag))
    for rank in failed:
        errors[rank] = f"{errors[rank]}{hint}" if errors[rank] == errors[failed[-1]] else errors[rank]
    raise_known_errors(state.grids, errors)


def _whole_one_before(folder: Path, flag: str) -> str:
    """Name the newest whole checkpoint before a damaged one in the same folder, and the flags that load it."""
    root = folder.parent
    own = [step for step in paths.saved_iterations(root) if paths.iteration_dir(root, step) == folder]
    older = [step for step in paths.saved_iterations(root) if own and step < own[0]]
    for step in reversed(older):
        one = paths.iteration_dir(root, step)
        if damage_of(one, COMPARED_BYTES) is None:
            # --ckpt-step is only for --load.
            given = f"--load {root} --ckpt-step {step}" if flag in ("--load", "--save") else f"{flag} {one}"
            return f"\nThe newest whole checkpoint before it is that of iteration {step}: give {given}"
    return f"\nThere is no whole checkpoint before it in {root}" if own else ""


def check_finite(state: RunState, saved: list[Saved], folder: Path) -> None:
    """Stop every rank if loaded weights are not finite. Collective over the world."""
    wrong = {global_name(piece.key, piece.global_offset[:piece.prepend_axis_num])
             for tensor in saved for piece in tensor.pieces
             if piece.data.is_floating_point() and piece.data.numel()
             # Minimum and maximum are NaN if any value is. On CPUs they take a fraction of the time of `isfinite`.
             and not bool(torch.stack(torch.aminmax(piece.data)).isfinite().all())}
    reports: list[set[str]] = gather(state.grids, wrong)
    names = sorted(set().union(*reports))
    raise_on_any_rank(state.grids,
                      f"{folder}: values that are NaN or infinite in {', '.join(names)}" if names else None)


def _finish_optimizer(state: RunState, common: dict[str, Any], held: list[Optimized], continued: list[Optimized],
                      folder: Path) -> None:
    """Give every optimizer its step count and fp32 copies that equal the weights."""
    steps, known = common["optimizer_steps"] or {}, {id(one) for one in continued}
    for one in held:
        one.set_step(steps[one.saved.module][one.saved.part] if id(one) in known else 0)
    take_weights(one for one in held if id(one) not in known)
    wrong = differing(held)
    error = None
    if wrong:
        listed = ", ".join(wrong)
        error = (f"{folder}: weights are not the rounded fp32 copies of the optimizer: {listed}; the first step would "
                 "change them. The checkpoint is not consistent; --no-load-optim takes the weights")
    raise_on_any_rank(state.grids, error)


def _scheduled_samples(config: RunConfig, common: dict[str, Any]) -> int:
    """Return the samples that the schedule has behind it.

    A schedule in iterations stays at its iteration if --global-batch-size has changed.
    """
    samples, batch = int(common["scheduler"]["num_steps"]), config.train.global_batch_size
    if config.train.train_samples is not None:
        return samples
    return samples * batch // int(flat_config(common["config"]).get("global_batch_size", batch))


def _restore(state: RunState, flags: CheckpointConfig, common: dict[str, Any], loaded: dict[str, Any], *,
             has_streams: bool) -> tuple[Progress, dict[str, Any] | None]:
    """Restore schedule and generators. Return the progress of the run and the state for the data loader."""
    if flags.load_scheduler:
        state.scheduler.step(increment=_scheduled_samples(state.config, common))
    if loaded.get("rng"):
        restore_rng(state.platform, list(loaded["rng"].values())[-1])
    streams = None
    if has_streams:
        # A rank that reads no stream counts samples, too.
        streams = {"consumed_samples": common["loader_samples"], "streams": loaded.get("loader", {})}
    return Progress.of(common), streams
