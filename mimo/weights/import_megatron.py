"""Loads Megatron-LM's checkpoints of a whole model into the modules of any layout.

Megatron-LM saves a multimodal model as one tree of global tensors (`vision_model.`, `vision_projection.`,
`language_model.`), with equal layers stacked or not, depending on its version and options. A provider says which
prefix belongs to which part of which module (`mimo.protocols.MegatronSource`). Everything else is compared by global
names, one for each tensor of each layer and expert. Only tensors are read, never `common.pt`, objects or optimizers.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from mimo.checkpoint import paths
from mimo.checkpoint.entries import Saved, broadcast_from_writers, differing, spread_replicas
from mimo.checkpoint.load import check_finite
from mimo.checkpoint.reader import DataOnlyLoadStrategy, is_covered, read_index
from mimo.checkpoint.state import RunState, by_index
from mimo.comm import broadcast_object, broadcast_result, gather, raise_on_any_rank, shared_errors
from mimo.protocols import LANGUAGE, MegatronSource
from mimo.watchdog.watchdog import Watchdog
from mimo.weights.rules import StoredTensor, global_name, num_stacked_axes

# Most lines of one kind in an error. In a checkpoint of another size, every tensor differs.
MAX_LINES = 20
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")


@dataclass(frozen=True)
class GlobalTensor:
    """A global tensor of one layer and expert in the checkpoint.

    Attributes:
        stored: key and place on the stacked axes.
        shape: shape without the stacked axes.
        dtype: stored dtype.
    """

    stored: StoredTensor
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Contents:
    """Contents of the checkpoint for this run.

    Attributes:
        root: text before the source's prefixes in every key, such as `module.`; usually empty.
        tensors: tensors by global name, without `root`.
        incomplete: keys of tensors whose pieces overlap or leave gaps.
        passed_over: reason -> number of tensors that the source says are not needed.
    """

    root: str
    tensors: dict[str, GlobalTensor] = field(default_factory=dict)
    incomplete: list[str] = field(default_factory=list)
    passed_over: dict[str, int] = field(default_factory=dict)


@dataclass
class Findings:
    """Findings of a rank, by global name.

    Attributes:
        missing, clashes, unmapped: tensors that do not fit, each with the rest of its line in the error.
        padded: tensors whose number of rows differs only by padding, with their stored rows and those of this run.
        lengths: number of layers or experts of each series of them.
    """

    missing: set[tuple[str, str]] = field(default_factory=set)
    clashes: set[tuple[str, str]] = field(default_factory=set)
    unmapped: set[tuple[str, str]] = field(default_factory=set)
    padded: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=set)
    lengths: dict[str, int] = field(default_factory=dict)


def contents_of(index: Metadata, source: MegatronSource, modules: Iterable[str]) -> Contents:
    """Find the tensors of a checkpoint that a run with these modules needs, by global name.

    Raises:
        ValueError: no tensor has a prefix of the source.
    """
    stored = {key: entry for key, entry in index.state_dict_metadata.items()
              if isinstance(entry, TensorStorageMetadata) and not _OPTIMIZER.match(key)}
    theirs = {module: set(prefixes.values()) for module, prefixes in source.prefixes.items()}
    contents = Contents(_root(stored, source))
    absent = tuple(prefix for module, prefixes in theirs.items() if module not in modules for prefix in prefixes)
    for key, entry in sorted(stored.items()):
        name = key.removeprefix(contents.root)
        reason = next((reason for pattern, reason in source.ignored if re.search(pattern, name)), None)
        if reason is not None:
            contents.passed_over[reason] = contents.passed_over.get(reason, 0) + 1
        elif not (absent and name.startswith(absent)):
            # One stored tensor may stack those of layers and experts. A scalar may only have a name that looks stacked.
            size, stacked_axes = tuple(entry.size), num_stacked_axes(name)
            if stacked_axes >= len(size):
                stacked_axes = 0
            axes, dtype = size[:stacked_axes], entry.properties.dtype
            contents.tensors |= {global_name(name, index) if stacked_axes else name:
                                 GlobalTensor(StoredTensor(key, index, axes), size[stacked_axes:], dtype)
                                 for index in itertools.product(*(range(count) for count in axes))}
            if not is_covered(entry):
                contents.incomplete.append(key)
    return contents


def _root(keys: Iterable[str], source: MegatronSource) -> str:
    """Return the text before the source's prefixes."""
    keys = sorted(keys)
    prefixes = sorted({prefix for of_module in source.prefixes.values() for prefix in of_module.values()})
    pattern = re.compile(rf"(?P<root>(?:[A-Za-z_]\w*\.)*?)(?:{'|'.join(map(re.escape, prefixes))})")
    roots = {found["root"] for found in map(pattern.match, keys) if found is not None}
    if len(roots) == 1 or "" in roots:
        return "" if "" in roots else roots.pop()
    wanted = ", ".join(f"{prefix}*" for prefix in prefixes)
    if roots:
        raise ValueError(f"it holds {wanted} under {', '.join(sorted(roots))}: which of them is the model?")
    if any(key.startswith(f"{module}.") for key in keys for module in source.prefixes):
        raise ValueError("it is a checkpoint of this trainer, with modules of their own: give it as --load, with "
                         "--finetune to take only its weights")
    starts = list(dict.fromkeys(f"{key.partition('.')[0]}.*" for key in keys))
    shown = ", ".join(starts[:5]) + (", ..." if len(starts) > 5 else "") if starts else "no tensors"
    raise ValueError(f"it is not a checkpoint of a whole model with {wanted}: it holds {shown}")


def shape_of(piece: ShardedTensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor, without stacked axes."""
    return tuple(piece.global_shape[piece.prepend_axis_num:])


def clashes_of(piece: ShardedTensor, tensor: GlobalTensor, vocab_size: int | None) -> list[str]:
    """Describe why a stored tensor does not fit a piece of the model.

    Args:
        piece: piece of the model.
        tensor: the stored tensor.
        vocab_size: least number of rows, if further ones are padding; None if every row counts.
    """
    shape, problems = shape_of(piece), []
    if vocab_size is None or len(shape) != len(tensor.shape) or shape[1:] != tensor.shape[1:]:
        if shape != tensor.shape:
            problems.append(f": shape {list(tensor.shape)} in the checkpoint, {list(shape)} in this run")
    elif tensor.shape[0] < vocab_size:
        problems.append(f": shape {list(tensor.shape)} in the checkpoint, {list(shape)} in this run, of which "
                        f"{vocab_size} rows are tokens")
    if piece.dtype != tensor.dtype:
        problems.append(f": {tensor.dtype} in the checkpoint, {piece.dtype} in this run")
    return problems


def count_series(name: str, lengths: dict[str, int]) -> None:
    """Update the lengths of the series of layers and experts that a name is part of.

    >>> lengths = {}
    >>> count_series("decoder.layers.7.mlp.experts.3.weight", lengths); lengths
    {'decoder.layers': 8, 'decoder.layers.*.mlp.experts': 4}
    """
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal() and index:
            series = ".".join("*" if earlier.isdecimal() else earlier for earlier in parts[:index])
            lengths[series] = max(lengths.get(series, 0), int(part) + 1)


def listing(what: str, contents: Contents, reports: list[Findings], left: set[tuple[str, str]]) -> str | None:
    """Return one error message with everything that does not fit; None if everything does."""
    found = {
        "names of this run that the model provider does not map": set().union(*(one.unmapped for one in reports)),
        "missing in the checkpoint": set().union(*(one.missing for one in reports)),
        "of another shape or dtype": set().union(*(one.clashes for one in reports)),
        "in the checkpoint, but not in this run": left,
        "incomplete in the checkpoint": {(key, ": its pieces leave something out or overlap")
                                         for key in contents.incomplete},
    }
    if not any(found.values()):
        return None
    stored, own = dict[str, int](), dict[str, int]()
    for name in contents.tensors:
        count_series(name, stored)
    for report in reports:
        for series, count in report.lengths.items():
            own[series] = max(own.get(series, 0), count)
    lines = [f"{series}: {stored[series]} in the checkpoint, {own[series]} in this run"
             for series in sorted(stored.keys() & own.keys()) if stored[series] != own[series]]
    for title, problems in found.items():
        if problems:
            lines += [f"{title} ({len(problems)}):", *(f"  {line}" for line in grouped(problems))]
    return "\n".join([what, *lines])


def grouped(problems: Iterable[tuple[str, str]]) -> list[str]:
    """Return one line for the same problem of all layers and experts, and after MAX_LINES one that counts the rest."""
    def order(problem: tuple[str, str]) -> tuple[list[tuple[int, str]], str]:
        """Sort layer 2 before layer 10."""
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in problem[0].split(".")], problem[1]

    alike: dict[tuple[str, str], list[str]] = {}
    for name, text in sorted(problems, key=order):
        alike.setdefault((re.sub(r"\.\d+(?=\.)", ".*", name), text), []).append(name)
    lines = [names[0] + text + (f", and {len(names) - 1} like it in other layers or experts" if len(names) > 1 else "")
             for (_, text), names in alike.items()]
    return lines if len(lines) <= MAX_LINES else [*lines[:MAX_LINES], f"... and {len(lines) - MAX_LINES} more"]


FORMAT = "torch_dist"


def load_single_model(state: RunState, source: MegatronSource, vocab_size: int, watchdog: Watchdog) -> list[str]:
    """Fill the modules of every rank, and the optimizers' fp32 copies, from a checkpoint. Collective over the world.

    See `load_single_weights` for arguments, result and errors.
    """
    lines = load_single_weights(state, source, vocab_size, watchdog)
    state.optimizer.reload_model_params()
    wrong = differing(state.held(state.saved()))
    raise_on_any_rank(state.grids, f"{source.flag} {source.path}: the optimizer's fp32 copies are not the loaded "
                                   f"weights: {', '.join(wrong)}" if wrong else None)
    return lines


@torch.no_grad()
def load_single_weights(state: RunState, source: MegatronSource, vocab_size: int, watchdog: Watchdog) -> list[str]:
    """Fill the modules of every rank from a checkpoint; optimizers keep their copies. Collective over the world.

    Args:
        state: state of the run. Its iteration, schedule, generators and data are not changed.
        source: place of the checkpoint, and rules for its names.
        vocab_size: number of tokens. Further rows of embedding and output layer are padding, whose number depends on
            the layout. Padding that the checkpoint lacks is set to zero.
        watchdog: told about the wait.

    Returns:
        Lines for the log that say what was loaded.

    Raises:
        ValueError: on the first rank: there is no such checkpoint, or a file is damaged, or checkpoint and model do not
            fit. Then the message lists every tensor that is missing, left over, incomplete, or of another shape or
            dtype, and nothing is changed.
        ReportedElsewhereError: the same, on the other ranks.
    """
    with watchdog.on_files("checkpoint to load", folder=source.path):
        folder = broadcast_result(state.grids, lambda: _folder(Path(source.path), source.flag))
        contents = _read(state, source, folder)
        saved = state.saved()
        entries, notes = _check(state, source, folder, contents, saved, vocab_size)
        error = None
        try:
            if entries:
                DataOnlyLoadStrategy(state.config.checkpoint.ckpt_verify).load(by_index(entries), folder)
        except (ValueError, OSError, CheckpointingException) as problem:
            error = f"{source.flag}: {problem}"
        raise_on_any_rank(state.grids, error)
        broadcast_from_writers(saved, state.grids)
        check_finite(state, saved, folder)
    notes += [f"passed over: {count} {'tensors' if count > 1 else 'tensor'}, {reason}"
              for reason, count in contents.passed_over.items()]
    notes.append("the checkpoint's own arguments are not read: check that flags such as --norm-epsilon, "
                 "--moe-router-topk-scaling-factor and --vision-hidden-act are those that it was trained with")
    return [f"weights from {folder}", *(f"  {note}" for note in notes)]


def _folder(root: Path, flag: str) -> Path:
    """Find the checkpoint's own folder. Nothing in it is changed."""
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
        raise ValueError(f"{flag}: {folder / paths.METADATA} does not say which format the checkpoint has: "
                         f"{problem!r}") from problem
    if backend != FORMAT:
        raise ValueError(f"{flag} {folder} is of format {backend}; only {FORMAT} is loaded")
    return folder


def _read(state: RunState, source: MegatronSource, folder: Path) -> Contents:
    """Read the checkpoint's index on every rank, and check that all ranks have read the same."""
    with shared_errors(state.grids):
        try:
            contents = contents_of(read_index(folder), source, state.grids.layout.grids)
        except (ValueError, OSError) as problem:
            raise ValueError(f"{source.flag} {folder}: {problem}") from problem
    digest = zlib.crc32("\n".join(contents.tensors).encode())
    is_same = digest == broadcast_object(state.grids, digest)
    raise_on_any_rank(state.grids, None if is_same else (
        f"{source.flag} {folder}: rank {state.grids.rank} finds another index there than rank 0"))
    return contents


def _check(state: RunState, source: MegatronSource, folder: Path, contents: Contents, saved: list[Saved],
           vocab_size: int) -> tuple[list[ShardedTensor], list[str]]:
    """Plan this rank's reads. Return them with notes for the log. Raises ValueError if something does not fit."""
    findings, entries, used = Findings(), [], set()
    # One replica of each weight reads it and sends it to the others.
    for module, piece in zip((one.module for one in saved for _ in one.pieces), spread_replicas(saved, state.grids),
                             strict=True):
        name = _theirs(piece, module, source)
        if name is None:
            findings.unmapped.add((piece.key, " has no counterpart in the checkpoint's names"))
            continue
        count_series(name, findings.lengths)
        tensor = contents.tensors.get(name)
        if tensor is None:
            findings.missing.add((name, f" {list(shape_of(piece))}"))
            continue
        used.add(name)
        rows = vocab_size if module == LANGUAGE and piece.allow_shape_mismatch else None
        findings.clashes |= {(name, text) for text in clashes_of(piece, tensor, rows)}
        if shape_of(piece) != tensor.shape:
            findings.padded.add((name, tensor.shape[:1], shape_of(piece)[:1]))
        if piece.replica_id[-1] == 0:
            entries.append((piece, tensor))
    # Stored tensors of which no rank has a piece. Every rank has the same list of them, so a mask is enough.
    mask = torch.tensor([name in used for name in contents.tensors], dtype=torch.uint8)
    if len(mask):
        dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=state.grids.host)
    left = {(name, f" {list(tensor.shape)}") for (name, tensor), found in
            zip(contents.tensors.items(), mask.tolist(), strict=True) if not found}
    reports: list[Findings] = gather(state.grids, findings)
    error = None
    if state.grids.rank == 0:
        error = listing(f"{source.flag} {folder} does not fit the model; nothing was loaded", contents, reports, left)
    raise_on_any_rank(state.grids, error)
    notes = [f"{name}: {theirs[0]} rows in the checkpoint, {ours[0]} in this run; those beyond {vocab_size} are padding"
             for name, theirs, ours in sorted(set().union(*(report.padded for report in reports)))]
    return [entry for piece, tensor in entries for entry in _entry(piece, tensor)], notes


def _theirs(piece: ShardedTensor, module: str, source: MegatronSource) -> str | None:
    """Return the checkpoint's global name of a piece; None if the source has no prefix for it."""
    own = global_name(piece.key, piece.global_offset[:piece.prepend_axis_num]).removeprefix(f"{module}.")
    prefixes = [prefix for prefix in source.prefixes.get(module, {}) if own.startswith(prefix)]
    if not prefixes:
        return None
    longest = max(prefixes, key=len)
    return source.prefixes[module][longest] + own.removeprefix(longest)


def _entry(piece: ShardedTensor, tensor: GlobalTensor) -> list[ShardedTensor]:
    """Return the entries to read for a piece. Padding that the checkpoint lacks is set to zero and not read."""
    assert piece.data is not None
    data, offset = piece.data, tuple(piece.global_offset[piece.prepend_axis_num:])
    if shape_of(piece) != tensor.shape:
        known = min(max(tensor.shape[0] - offset[0], 0), data.shape[0])
        data[known:].zero_()
        data = data[:known]
    if not math.prod(data.shape):
        return []
    ones, stored = (1,) * len(tensor.stored.axes), tensor.stored
    return [ShardedTensor(
        key=stored.key, data=data.view(*ones, *data.shape), dtype=piece.dtype, local_shape=(*ones, *data.shape),
        global_shape=(*stored.axes, *tensor.shape), global_offset=(*stored.index, *offset), axis_fragmentations=None,
        replica_id=piece.replica_id)]
