"""Every byte of a checkpoint against its checksums, and its index against itself."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from tqdm import tqdm

from mimo.checkpoint.paths import METADATA
from mimo.checkpoint.reader import CHECKSUMS, is_covered
from mimo.checkpoint.writer import crc32_of
from mimo.commands.contents import Contents
from mimo.commands.rows import WEIGHTS


def damage(contents: Contents) -> tuple[list[str], list[str]]:
    """Read a whole checkpoint.

    Returns:
        A line for everything that is damaged, missing or left over, with the names of the tensors; and notes on what
        could not be checked.
    """
    problems, notes = [*_incomplete(contents.index), *_uneven_optimizer(contents)], []
    read: dict[str, Any] = {}
    for name in (METADATA, CHECKSUMS):
        try:
            read[name] = json.loads((contents.folder / name).read_bytes())
        except FileNotFoundError:
            # A checkpoint of this trainer has both.
            problems.append(f"{name} is missing")
        except ValueError as error:
            problems.append(f"{name} is damaged: {error}")
    checksums = read.get(CHECKSUMS)
    if checksums is None:
        notes.append("without checksums only the lengths of the files were compared")
    return problems + list(_damaged_items(contents.folder, contents.index, checksums)), notes


def _incomplete(index: Metadata) -> Iterator[str]:
    """Objects and tensors of which something is in no file."""
    stored = {(place.fqn, place.offset) for place in index.storage_data}
    for key, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            if (key, None) not in stored:
                yield f"{key} is in the index and in no file"
            continue
        lacking = [chunk for chunk in entry.chunks if (key, chunk.offsets) not in stored]
        for chunk in lacking:
            yield f"{key}: the piece at {list(chunk.offsets)} of {list(chunk.sizes)} is in no file"
        if not is_covered(entry):
            yield f"{key}: its pieces leave something out or overlap"


def _uneven_optimizer(contents: Contents) -> Iterator[str]:
    """Optimizer state of tensors that lack another kind of it, or of tensors that are not there."""
    for module in contents.modules:
        names: dict[str, set[str]] = defaultdict(set)
        for tensor in contents.of(module):
            names[tensor.kind].add(tensor.name)
        weights = names.pop(WEIGHTS, set())
        moments = {kind: held for kind, held in names.items() if kind.startswith("exp_avg")}
        for name in sorted(set().union(*names.values())):
            if name not in weights:
                yield f"{module}.{name} has optimizer state and no weights"
            for kind in (kind for kind, held in moments.items() if name not in held):
                yield f"{module}.{name} has optimizer state, but no {kind}"


def _damaged_items(folder: Path, index: Metadata, checksums: dict[str, dict[str, int]] | None) -> Iterator[str]:
    by_file: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    for place, stored in index.storage_data.items():
        by_file[stored.relative_path].append((place.fqn, stored))
    total = sum(stored.length for items in by_file.values() for _, stored in items)
    with tqdm(total=total, unit="B", unit_scale=True, desc="verifying", leave=False, disable=None) as bar:
        for name, items in sorted(by_file.items()):
            path = folder / name
            if not path.is_file():
                yield f"{name} is missing; it holds {', '.join(sorted({key for key, _ in items}))}"
                continue
            with path.open("rb") as file:
                size = path.stat().st_size
                for key, stored in sorted(items, key=lambda item: item[1].offset):
                    bar.update(stored.length)
                    wrong = _wrong(file, size, stored, None if checksums is None else checksums.get(name, {}))
                    if wrong:
                        yield f"{key} in {name}: {wrong}"


def _wrong(file: Any, size: int, stored: Any, checksums: dict[str, int] | None) -> str | None:
    """What is wrong with one stored item, or None."""
    if size < stored.offset + stored.length:
        return f"the file ends {stored.offset + stored.length - size} bytes early"
    if checksums is None:
        return None
    if str(stored.offset) not in checksums:
        return "it has no checksum"
    if crc32_of(file, stored.offset, stored.length) != checksums[str(stored.offset)]:
        return "the bytes are not those that were saved (checksum)"
    return None
