"""What a Megatron checkpoint of the whole model holds, by global name, and what of it does not fit this run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from mimo.checkpoint.reader import is_covered
from mimo.protocols import MegatronSource
from mimo.weights.keys import StoredTensor, global_name, num_stacked_axes

# Lines of one kind in an error; a checkpoint of another size differs in everything.
MAX_LINES = 20
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")


@dataclass(frozen=True)
class Place:
    """A global tensor of one layer and expert in the checkpoint.

    Attributes:
        stored: key and place on the stacked axes.
        shape: without those.
        dtype: as it is stored.
    """

    stored: StoredTensor
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Contents:
    """What the checkpoint holds for this run.

    Attributes:
        root: what stands before the source's prefixes in every key (`module.`), mostly nothing.
        places: by global name, without `root`.
        incomplete: keys whose pieces leave something out or overlap.
        passed_over: number of tensors that the source says are not needed, by the reason.
    """

    root: str
    places: dict[str, Place] = field(default_factory=dict)
    incomplete: list[str] = field(default_factory=list)
    passed_over: dict[str, int] = field(default_factory=dict)


@dataclass
class Findings:
    """What a rank finds, by global name.

    Attributes:
        missing, clashes, unmapped: what does not fit, with what is said of it.
        padded: tensors with other numbers of rows, stored and here; no clash where those rows are padding.
        lengths: how long series of layers and experts are.
    """

    missing: set[tuple[str, str]] = field(default_factory=set)
    clashes: set[tuple[str, str]] = field(default_factory=set)
    unmapped: set[tuple[str, str]] = field(default_factory=set)
    padded: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=set)
    lengths: dict[str, int] = field(default_factory=dict)


def contents_of(index: Metadata, source: MegatronSource, modules: Iterable[str]) -> Contents:
    """The tensors of a checkpoint that concern a run with these modules, by global name.

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
        reason = _ignored(name, source)
        if reason is not None:
            contents.passed_over[reason] = contents.passed_over.get(reason, 0) + 1
        elif not (absent and name.startswith(absent)):
            contents.places |= _places(name, key, entry)
            if not is_covered(entry):
                contents.incomplete.append(key)
    return contents


def _root(keys: Iterable[str], source: MegatronSource) -> str:
    """What stands before the source's prefixes."""
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
                         "--finetune where only its weights are wanted")
    starts = list(dict.fromkeys(f"{key.partition('.')[0]}.*" for key in keys))
    shown = ", ".join(starts[:5]) + (", ..." if len(starts) > 5 else "") if starts else "no tensors"
    raise ValueError(f"it is not a checkpoint of the model as one, {wanted}: it holds {shown}")


def _ignored(name: str, source: MegatronSource) -> str | None:
    return next((reason for pattern, reason in source.ignored if re.search(pattern, name)), None)


def _places(name: str, key: str, entry: TensorStorageMetadata) -> dict[str, Place]:
    """The tensors of every layer and expert that are stacked in one stored tensor, by global name."""
    size, stacked = tuple(entry.size), num_stacked_axes(name)
    if stacked >= len(size):
        stacked = 0  # a scalar under a name that looks stacked
    axes, dtype = size[:stacked], entry.properties.dtype
    return {global_name(name, index) if stacked else name: Place(StoredTensor(key, index, axes), size[stacked:], dtype)
            for index in itertools.product(*(range(count) for count in axes))}


def shape_of(piece: ShardedTensor) -> tuple[int, ...]:
    """The whole tensor's, without stacked axes."""
    return tuple(piece.global_shape[piece.prepend_axis_num:])


def clashes_of(piece: ShardedTensor, place: Place, vocab_size: int | None) -> list[str]:
    """What is wrong with a stored tensor for a piece of the model.

    Args:
        piece: of the model.
        place: where its tensor is stored.
        vocab_size: rows that it must have at least, where others are padding; None where every row counts.
    """
    shape, problems = shape_of(piece), []
    if vocab_size is None or len(shape) != len(place.shape) or shape[1:] != place.shape[1:]:
        if shape != place.shape:
            problems.append(f": shape {list(place.shape)} in the checkpoint, {list(shape)} in this run")
    elif place.shape[0] < vocab_size:
        problems.append(f": shape {list(place.shape)} in the checkpoint, {list(shape)} in this run, of which "
                        f"{vocab_size} rows are tokens")
    if piece.dtype != place.dtype:
        problems.append(f": {place.dtype} in the checkpoint, {piece.dtype} in this run")
    return problems


def count_series(name: str, lengths: dict[str, int]) -> None:
    """Note how many layers, and experts a layer, a name speaks of.

    >>> lengths = {}
    >>> count_series("decoder.layers.7.mlp.experts.3.weight", lengths); lengths
    {'decoder.layers': 8, 'decoder.layers.*.mlp.experts': 4}
    """
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal() and place:
            series = ".".join("*" if earlier.isdecimal() else earlier for earlier in parts[:place])
            lengths[series] = max(lengths.get(series, 0), int(part) + 1)


def listing(what: str, contents: Contents, reports: list[Findings], left: set[tuple[str, str]]) -> str | None:
    """One error with everything that does not fit; None where all of it does."""
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
    for name in contents.places:
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
    """One line for the same problem of all layers and experts, at most MAX_LINES and one that counts the others."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, text in sorted(problems, key=lambda problem: (_natural(problem[0]), problem[1])):
        alike.setdefault((re.sub(r"\.\d+(?=\.)", ".*", name), text), []).append(name)
    lines = [names[0] + text + (f", and {len(names) - 1} like it in other layers or experts" if len(names) > 1 else "")
             for (_, text), names in alike.items()]
    return lines if len(lines) <= MAX_LINES else [*lines[:MAX_LINES], f"... and {len(lines) - MAX_LINES} more"]


def _natural(name: str) -> list[tuple[int, str]]:
    """For sorting: layer 2 before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
