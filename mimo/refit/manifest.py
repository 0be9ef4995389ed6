"""A folder of weights for engines elsewhere: one subfolder for each policy version, complete once it has a manifest.

The manifest is the chunk plan of `mimo.refit.holdings` as a file. It is written last and appears at once, so what has
one is whole; it says what the files beside it hold, so that an engine can refuse them before it touches its weights.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from mimo.checkpoint.paths import write_file
from mimo.refit.meeting import RefitError
from mimo.refit.slots import Entry, entry_as_json, entry_from_json

MANIFEST = "refit_manifest.json"
FORMAT = 1
POLL_S = 0.05
_NUMBERED = re.compile(r"weights_(\d{7,})")


@dataclass(frozen=True)
class Manifest:
    """What one subfolder holds.

    Attributes:
        version: policy version of the weights.
        entries: every tensor, in the order of the chunk plan.
        spellings: see `mimo.refit.trainer.module_spellings`.
        file_bytes: size of each file of weights.
    """

    version: str
    entries: tuple[Entry, ...]
    spellings: Sequence[Mapping[str, Any]]
    file_bytes: Mapping[str, int]

    def sequence(self) -> str:
        """Checksum of names, dtypes and shapes in their order, and of how else they may be spelled."""
        return _digest([[entry_as_json(entry) for entry in self.entries], list(self.spellings)])

    def as_json(self) -> dict[str, Any]:
        """As plain lists, with a checksum of everything."""
        content = {"format": FORMAT, "version": self.version, "files": dict(self.file_bytes),
                   "entries": [entry_as_json(entry) for entry in self.entries], "spellings": list(self.spellings)}
        return content | {"checksum": _digest(content)}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """The other way. Raises ValueError for anything else, and where the checksum is another."""
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ValueError(f"it is no manifest of format {FORMAT}")
        content = {key: part for key, part in value.items() if key != "checksum"}
        if _digest(content) != value.get("checksum"):
            raise ValueError("its checksum is not that of its contents")
        return cls(value["version"], tuple(map(entry_from_json, value["entries"])), value["spellings"], value["files"])


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make a subfolder complete, in one step. Raises OSError."""
    temporary = folder / f".{MANIFEST}.writing"
    write_file(temporary, json.dumps(manifest.as_json()).encode())
    temporary.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a subfolder. Raises RefitError where there is none, or it is damaged."""
    path = folder / MANIFEST
    try:
        return Manifest.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise RefitError(f"{path} cannot be read, the weights are incomplete or deleted: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise RefitError(f"{path} is damaged: {error}") from error


def subfolders(root: Path) -> list[Path]:
    """Those of all versions, complete or not, in the order in which they were begun."""
    if not root.is_dir():
        return []
    numbered = [(int(match[1]), path) for path in root.iterdir() if (match := _NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def is_complete(folder: Path) -> bool:
    """Whether a subfolder has its manifest."""
    return (folder / MANIFEST).is_file()


def next_subfolder(root: Path) -> Path:
    """The name for the weights to be written now."""
    begun = subfolders(root)
    number = int(begun[-1].name.rpartition("_")[2]) + 1 if begun else 1
    return root / f"weights_{number:07d}"


def prune(root: Path, keep: int) -> None:
    """Delete all but the last `keep` complete versions, and what was begun before the last and never finished."""
    begun = subfolders(root)
    kept = [path for path in begun if is_complete(path)][-keep:]
    for path in begun[:begun.index(kept[-1])] if kept else ():
        if path not in kept:
            (path / MANIFEST).unlink(missing_ok=True)  # first: a folder that has one is whole
            shutil.rmtree(path)


def wait_for_weights(root: Path, version: str | None, timeout_s: float) -> Path:
    """The newest complete subfolder; of a version if one is given.

    Args:
        root: the folder that a trainer writes into; it may not be there yet.
        version: policy version to wait for; None: any.
        timeout_s: seconds to wait.

    Raises:
        RefitError: there is none in time, with what is there instead; or the manifest of the newest is damaged.
    """
    deadline = time.monotonic() + timeout_s
    versions: dict[Path, str | None] = {}
    while True:
        for folder in reversed(subfolders(root)):
            if folder not in versions and is_complete(folder):
                versions[folder] = _version_of(folder)
            if folder in versions and versions[folder] is not None and version in (None, versions[folder]):
                return folder
        if time.monotonic() > deadline:
            raise RefitError(f"no complete weights{f' of version {version!r}' if version is not None else ''} in "
                             f"{root} within {timeout_s:g} s: {_described(root)}")
        time.sleep(POLL_S)


def _version_of(folder: Path) -> str | None:
    """Of a complete subfolder; None where it has been deleted meanwhile."""
    try:
        return read_manifest(folder).version
    except RefitError:
        if is_complete(folder):
            raise
        return None


def _described(root: Path) -> str:
    if not root.is_dir():
        return "there is no such folder"
    begun = subfolders(root)
    if not begun:
        return "no trainer has written there"
    told = [f"{path.name} has version {read_manifest(path).version!r}" if is_complete(path)
            else f"{path.name} has no {MANIFEST} yet, it is being written or was given up" for path in begun[-3:]]
    return ", ".join(told)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
