"""Read and write .staged.json, the record of what has been staged into a folder."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from stage_files.children import StageError

NAME = ".staged.json"
VERSION = 1


@dataclass(frozen=True)
class Recorded:
    """A file that was copied.

    Attributes:
        size: bytes.
        mtime_ns: time of the last change, of the source and of the copy.
        sha256: checksum of the source as it was read; None if it was not read here.
    """

    size: int
    mtime_ns: int
    sha256: str | None = None

    def is_at(self, path: Path) -> bool:
        """Whether a file with this size and time is there. Its content is not compared."""
        try:
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return path.is_file() and (status.st_size, status.st_mtime_ns) == (self.size, self.mtime_ns)


@dataclass
class Place:
    """The files of one source.

    Attributes:
        source: where they come from, with the revision for the Hugging Face Hub.
        include: the requested patterns, which only a download needs.
        files: records by name relative to the place ("" if the source is a file).
    """

    source: str
    include: list[str] = field(default_factory=list)
    files: dict[str, Recorded] = field(default_factory=dict)


def load(folder: Path) -> dict[str, Place]:
    """Load places by name; empty if nothing was staged. Raises StageError for a damaged record."""
    path = folder / NAME
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["version"] != VERSION:
            raise StageError(f"{path} is of version {stored['version']}, this program writes {VERSION}; delete it")
        return {name: Place(place["source"], place["include"],
                            {file: Recorded(**values) for file, values in place["files"].items()})
                for name, place in stored["places"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StageError(f"{path} is damaged ({error}); delete it: what is there is not copied again") from error


def save(folder: Path, places: dict[str, Place]) -> None:
    """Write the record. A crash leaves either the old or the new one."""
    path, temporary = folder / NAME, folder / f"{NAME}.new"
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump({"version": VERSION, "places": {name: asdict(place) for name, place in places.items()}}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
