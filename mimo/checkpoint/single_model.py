"""Megatron's own checkpoints of the whole model as one, into the modules of any layout.

Megatron-LM saves a multimodal model as one tree of global tensors (`vision_model.`, `vision_projection.`,
`language_model.`), with equal layers stacked or not, depending on its version and options. A provider says which
prefix belongs to which part of which module (`mimo.protocols.MegatronSource`); everything else is compared by global
names, one for each tensor of each layer and expert. Only tensors are read: never `common.pt`, objects or optimizers.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from mimo.checkpoint import paths
from mimo.checkpoint.agree import from_first_rank, gather, raise_together
from mimo.checkpoint.entries import Saved, broadcast_from_writers, spread_replicas
from mimo.checkpoint.load import check_finite
from mimo.checkpoint.optimizer_state import differing
from mimo.checkpoint.reader import DataOnlyLoadStrategy, read_index
from mimo.checkpoint.single_contents import (
    Contents,
    Findings,
    Place,
    clashes_of,
    contents_of,
    count_series,
    listing,
    shape_of,
)
from mimo.checkpoint.state import RunState, by_index
from mimo.observe.watchdog import Watchdog
from mimo.protocols import LANGUAGE, MegatronSource
from mimo.weights.keys import global_name

FORMAT = "torch_dist"


def load_single_model(state: RunState, source: MegatronSource, vocab_size: int, watchdog: Watchdog) -> list[str]:
    """Fill the modules of every rank, and the optimizers' fp32 copies, from a checkpoint. Collective over the world.

    Args, result and errors as `load_single_weights`.
    """
    lines = load_single_weights(state, source, vocab_size, watchdog)
    state.optimizer.reload_model_params()
    wrong = differing(state.held(state.saved()))
    raise_together(state.grids, f"{source.flag} {source.path}: the optimizer's fp32 copies are not the loaded weights: "
                                f"{', '.join(wrong)}" if wrong else None)
    return lines


@torch.no_grad()
def load_single_weights(state: RunState, source: MegatronSource, vocab_size: int, watchdog: Watchdog) -> list[str]:
    """Fill the modules of every rank from a checkpoint; optimizers keep their copies. Collective over the world.

    Args:
        state: the run; its iteration, schedule, generators and data stay as they are.
        source: where the checkpoint is and how its names are made.
        vocab_size: tokens; rows of embedding and output beyond it are padding, which each layout has its own number
            of. Padding that the checkpoint lacks is set to zero.
        watchdog: told about the wait.

    Returns:
        Lines that tell a person what was loaded.

    Raises:
        ValueError: on the first rank: there is no such checkpoint, or it and the model do not fit (all that is missing,
            left over, of another shape or dtype, or stored in part; nothing is changed then), or a file is damaged.
        ReportedElsewhereError: on the other ranks then.
    """
    with watchdog.on_files("checkpoint to load", folder=source.path):
        folder = _find(state, source)
        contents = _read(state, source, folder)
        saved = state.saved()
        entries, notes = _check(state, source, folder, contents, saved, vocab_size)
        _fill(state, source, folder, entries)
        broadcast_from_writers(saved, state.grids)
        check_finite(state, saved, folder)
    notes += [f"passed over: {count} {'tensors' if count > 1 else 'tensor'}, {reason}"
              for reason, count in contents.passed_over.items()]
    notes.append("the checkpoint's own arguments are not read: check that flags such as --norm-epsilon, "
                 "--moe-router-topk-scaling-factor and --vision-hidden-act are those that it was trained with")
    return [f"weights from {folder}", *(f"  {note}" for note in notes)]


def _find(state: RunState, source: MegatronSource) -> Path:
    """The checkpoint's own folder, found by the first rank; nothing in there is changed."""
    error, folder = None, None
    if state.grids.rank == 0:
        try:
            folder = _folder(Path(source.path), source.flag)
        except (ValueError, OSError) as problem:
            error = str(problem)
    raise_together(state.grids, error)
    found: Path = from_first_rank(state.grids, folder)
    return found


def _folder(root: Path, flag: str) -> Path:
    if not root.is_dir():
        raise ValueError(f"{flag} {root}: there is no such folder")
    old = sorted([*root.glob("mp_rank_*"), *root.glob("*/mp_rank_*")])
    if old:
        raise ValueError(f"{flag} {root} is of Megatron's old format, one file a rank ({old[0].name}); only {FORMAT} "
                         f"is loaded: save it again with --ckpt-format {FORMAT}")
    folder = paths.find(root, None, flag, repair=False)
    if folder is None:
        raise ValueError(f"{flag} {root} holds no checkpoint: neither {paths.METADATA}, nor {paths.TRACKER}, nor a "
                         "complete folder iter_*")
    try:
        backend = json.loads((folder / paths.METADATA).read_bytes())["sharded_backend"]
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"{flag}: {folder / paths.METADATA} does not say of what format the checkpoint is: "
                         f"{problem!r}") from problem
    if backend != FORMAT:
        raise ValueError(f"{flag} {folder} is of format {backend}; only {FORMAT} is loaded")
    return folder


def _read(state: RunState, source: MegatronSource, folder: Path) -> Contents:
    """The checkpoint's index, read by every rank, the same for all of them."""
    contents, error, digest = None, None, 0
    try:
        contents = contents_of(read_index(folder), source, state.grids.layout.grids)
        digest = zlib.crc32("\n".join(contents.places).encode())
    except (ValueError, OSError) as problem:
        error = f"{source.flag} {folder}: {problem}"
    raise_together(state.grids, error)
    if digest != from_first_rank(state.grids, digest):
        error = f"{source.flag} {folder}: rank {state.grids.rank} finds another index there than rank 0"
    raise_together(state.grids, error)
    assert contents is not None, "raised above"
    return contents


def _check(state: RunState, source: MegatronSource, folder: Path, contents: Contents, saved: list[Saved],
           vocab_size: int) -> tuple[list[ShardedTensor], list[str]]:
    """What this rank reads, and notes for a person, once everything has its place and nothing is left over."""
    findings, entries, used = Findings(), [], set()
    # One replica of each weight reads it, and the network carries it to the others.
    for module, piece in zip((one.module for one in saved for _ in one.pieces), spread_replicas(saved, state.grids),
                             strict=True):
        name = _theirs(piece, module, source)
        if name is None:
            findings.unmapped.add((piece.key, " has no counterpart in the checkpoint's names"))
            continue
        count_series(name, findings.lengths)
        place = contents.places.get(name)
        if place is None:
            findings.missing.add((name, f" {list(shape_of(piece))}"))
            continue
        used.add(name)
        rows = vocab_size if module == LANGUAGE and piece.allow_shape_mismatch else None
        findings.clashes |= {(name, text) for text in clashes_of(piece, place, rows)}
        if shape_of(piece) != place.shape:
            findings.padded.add((name, place.shape[:1], shape_of(piece)[:1]))
        if piece.replica_id[-1] == 0:
            entries.append((piece, place))
    left = _left_over(state, contents, used)
    reports: list[Findings] = gather(state.grids, findings)
    error = None
    if state.grids.rank == 0:
        error = listing(f"{source.flag} {folder} does not fit the model; nothing was loaded", contents, reports, left)
    raise_together(state.grids, error)
    notes = [f"{name}: {theirs[0]} rows in the checkpoint, {ours[0]} in this run; those beyond {vocab_size} are padding"
             for name, theirs, ours in sorted(set().union(*(report.padded for report in reports)))]
    return [entry for piece, place in entries for entry in _entry(piece, place)], notes


def _theirs(piece: ShardedTensor, module: str, source: MegatronSource) -> str | None:
    """The checkpoint's global name of a piece; None where the source has no prefix for it."""
    own = global_name(piece.key, piece.global_offset[:piece.prepend_axis_num]).removeprefix(f"{module}.")
    prefixes = [prefix for prefix in source.prefixes.get(module, {}) if own.startswith(prefix)]
    if not prefixes:
        return None
    longest = max(prefixes, key=len)
    return source.prefixes[module][longest] + own.removeprefix(longest)


def _left_over(state: RunState, contents: Contents, used: set[str]) -> set[tuple[str, str]]:
    """Stored tensors that no rank has a piece of. Collective."""
    mask = torch.tensor([name in used for name in contents.places], dtype=torch.uint8)
    if len(mask):
        dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=state.grids.host)
    return {(name, f" {list(place.shape)}") for (name, place), found in
            zip(contents.places.items(), mask.tolist(), strict=True) if not found}


def _entry(piece: ShardedTensor, place: Place) -> list[ShardedTensor]:
    """What is read for a piece: none where all of it is padding that the checkpoint lacks, which is zero then."""
    assert piece.data is not None
    data, offset = piece.data, tuple(piece.global_offset[piece.prepend_axis_num:])
    if shape_of(piece) != place.shape:
        known = min(max(place.shape[0] - offset[0], 0), data.shape[0])
        data[known:].zero_()
        data = data[:known]
    if not math.prod(data.shape):
        return []
    ones, stored = (1,) * len(place.stored.axes), place.stored
    return [ShardedTensor(
        key=stored.key, data=data.view(*ones, *data.shape), dtype=piece.dtype, local_shape=(*ones, *data.shape),
        global_shape=(*stored.axes, *place.shape), global_offset=(*stored.index, *offset), axis_fragmentations=None,
        replica_id=piece.replica_id)]


def _fill(state: RunState, source: MegatronSource, folder: Path, entries: list[ShardedTensor]) -> None:
    """Read everything in place. A damaged file stops every rank."""
    error = None
    try:
        if entries:
            DataOnlyLoadStrategy(state.config.checkpoint.ckpt_verify).load(by_index(entries), folder)
    except (ValueError, OSError, CheckpointingException) as problem:
        error = f"{source.flag}: {problem}"
    raise_together(state.grids, error)
