"""Copy folders and files to the node's own disk: list, compare, check space, copy, remove leftovers."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from stage_files.children import Children, Progress, StageError, Task, format_gb
from stage_files.record import Recorded, StagedSource
from stage_files.worker import PART, is_part


@dataclass(frozen=True)
class Options:
    """Options of a copy.

    Attributes:
        include: patterns of names; empty for all files.
        block_bytes: bytes between two syncs to the disk.
        limit_bytes_s: bytes per second of each copying process; 0 for no limit.
        verify: whether to compare checksums of files that are there.
    """

    include: tuple[str, ...]
    block_bytes: int
    limit_bytes_s: int
    verify: bool


@dataclass
class Listing:
    """A source and its target.

    Attributes:
        source: absolute path of the source.
        place: the file or folder that becomes its copy.
        files: size, time and mode bits by name relative to the source ("" if the source is a file).
        folders: mode bits by relative name.
        real: the source's path without links.
    """

    source: str
    place: Path
    files: dict[str, tuple[Recorded, int]] = field(default_factory=dict)
    folders: dict[str, int] = field(default_factory=dict)
    real: str = ""

    def wanted(self, include: tuple[str, ...]) -> dict[str, tuple[Recorded, int]]:
        """Return the files that patterns choose. Raises StageError if there is none."""
        name = Path(self.source).name
        chosen = {file: found for file, found in self.files.items() if is_chosen(file or name, include)}
        if not chosen:
            given = " ".join(f"--include {pattern}" for pattern in include)
            raise StageError(f"{self.source}: has {len(self.files)} files, none of them for {given}" if include
                             else f"{self.source} is an empty folder")
        return chosen


@dataclass
class Copy:
    """A file to copy.

    Attributes:
        listing: the listing that has it.
        name: its name relative to the source.
        source: path of the original.
        target: path of the copy.
        wanted: size and time of the original.
        mode: mode bits of the original.
    """

    listing: Listing
    name: str
    source: str
    target: Path
    wanted: Recorded
    mode: int

    @property
    def part(self) -> Path:
        """Path of the unfinished copy. Another version of the source has another path."""
        key = f"{self.source}\n{self.name}\n{self.wanted.size}\n{self.wanted.mtime_ns}"
        return self.target.parent / PART.format(hashlib.sha256(key.encode()).hexdigest()[:16])

    def task(self, options: Options) -> Task:
        return Task(self.source, {
            "do": "copy", "source": self.source, "part": str(self.part), "target": str(self.target),
            "size": self.wanted.size, "mtime_ns": self.wanted.mtime_ns, "mode": self.mode,
            "block": options.block_bytes, "limit": options.limit_bytes_s})


def is_chosen(name: str, include: tuple[str, ...]) -> bool:
    """Whether a relative name matches one of the patterns, as in the client of the Hugging Face Hub."""
    return not include or any(fnmatch(name, f"{pattern}*" if pattern.endswith("/") else pattern)
                              for pattern in include)


def at(root: Path | str, name: str) -> str:
    """Return the path of a relative name."""
    return f"{root}/{name}" if name else str(root)


def list_sources(children: Children, places: dict[str, Path]) -> list[Listing]:
    """List the current content of each source.

    Args:
        children: child processes, which may hang on a source.
        places: targets by absolute path of the source.

    Raises:
        StageError: a source does not exist, cannot be read or makes no progress, or source and copy contain each other.
    """
    listings = {source: Listing(source, place) for source, place in places.items()}
    tasks = [Task(source, {"do": "list", "source": source}) for source in places]
    for task, answer in children.run(tasks):
        listing = listings[task.name]
        if "again" in answer:
            listing.files.clear()
            listing.folders.clear()
        for name, is_folder, size, mtime_ns, mode in answer.get("entries", ()):
            if is_folder:
                listing.folders[name] = mode
            else:
                listing.files[name] = Recorded(size, mtime_ns), mode
        if "done" in answer:
            listing.real = answer["done"]["real"]
    for listing in listings.values():
        _check_apart(listing)
    return list(listings.values())


def _check_apart(listing: Listing) -> None:
    place = listing.place
    if place.is_symlink():
        raise StageError(f"{place} is a link; a copy cannot be made there")
    real, target = Path(listing.real), Path(os.path.realpath(place))
    if real.is_relative_to(target) or target.is_relative_to(real):
        raise StageError(f"{listing.source} and its copy {place} contain each other")


def missing(listings: list[Listing], options: Options) -> tuple[list[Copy], list[Copy]]:
    """Return the files to copy, and those that are there with the right size and time."""
    absent, there = [], []
    for listing in listings:
        for name, (wanted, mode) in listing.wanted(options.include).items():
            target = Path(at(listing.place, name))
            copy = Copy(listing, name, at(listing.source, name), target, wanted, mode)
            (there if wanted.is_at(target) else absent).append(copy)
    return absent, there


def damaged(children: Children, there: list[Copy], known: dict[str, StagedSource], progress: Progress) -> list[Copy]:
    """Return the copies whose content is wrong, by their recorded checksum, or else by that of the source."""
    expected: dict[str, str] = {}
    tasks, found = [], {}
    for copy in there:
        recorded = known.get(copy.listing.place.name, StagedSource("")).files.get(copy.name)
        if recorded is not None and recorded.sha256 and recorded.mtime_ns == copy.wanted.mtime_ns:
            expected[str(copy.target)] = recorded.sha256
        else:
            tasks.append(Task(copy.source, {"do": "checksum", "source": copy.source}))
        tasks.append(Task(str(copy.target), {"do": "checksum", "source": str(copy.target)}))
    for task, answer in progress.follow(children.run(tasks)):
        if "done" in answer:
            found[task.name] = answer["done"]["sha256"]
    return [copy for copy in there
            if found[str(copy.target)] != expected.get(str(copy.target), found.get(copy.source))]


def check_space(folder: Path, copies: list[Copy]) -> None:
    """Raise StageError, with numbers, if the copies do not fit on the disk."""
    needed = sum(max(copy.wanted.size - (copy.part.stat().st_size if copy.part.exists() else 0), 0) for copy in copies)
    free = shutil.disk_usage(existing(folder)).free
    if needed > free:
        raise StageError(f"{folder}: {format_gb(needed)} to copy, {format_gb(free)} free")


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(each for each in (folder, *folder.parents) if each.is_dir())


def make_folders(listings: list[Listing], copies: list[Copy], options: Options) -> None:
    """Make the folders of the copies with the permissions of the source."""
    needed = {str(copy.target.parent) for copy in copies}
    for listing in listings:
        for name, mode in listing.folders.items():
            path = Path(at(listing.place, name))
            if path.is_dir() or (options.include and not any(each == str(path) or each.startswith(f"{path}/")
                                                             for each in needed)):
                continue
            path.mkdir(parents=True)
            path.chmod(stat.S_IMODE(mode) & 0o777 | stat.S_IRWXU)


def remove_parts(listings: list[Listing], copies: list[Copy]) -> None:
    """Delete unfinished copies of other versions."""
    expected = {copy.part for copy in copies}
    for listing in listings:
        folders = {Path(at(listing.place, name)) for name in listing.folders} or {listing.place.parent}
        for folder in folders:
            if not folder.is_dir():
                continue
            for path in folder.iterdir():
                # Unfinished copies of single files lie beside the targets of other sources.
                if is_part(path.name) and path not in expected and listing.folders:
                    path.unlink()


def remove_gone(listing: Listing, earlier: StagedSource) -> int:
    """Delete copies whose source is gone, and return their number."""
    gone = [name for name in earlier.files if name not in listing.files]
    for name in gone:
        path = Path(at(listing.place, name))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
        for folder in path.parents:
            if folder == listing.place or not folder.is_relative_to(listing.place):
                break
            try:
                folder.rmdir()
            except OSError:  # it is not empty, or gone already
                break
    return len(gone)


def copy_all(children: Children, copies: list[Copy], options: Options, progress: Progress,
             copied: Callable[[Copy, str], None]) -> None:
    """Copy, and call `copied` with each finished file and its SHA-256. Raises StageError, which names the file."""
    by_source = {copy.source: copy for copy in copies}
    # The largest files come first, so that no process is left alone with one at the end.
    tasks = [copy.task(options) for copy in sorted(copies, key=lambda copy: (-copy.wanted.size, copy.source))]
    answers: Iterator[tuple[Task, dict[str, Any]]] = progress.follow(children.run(tasks))
    for task, answer in answers:
        if "done" in answer:
            copied(by_source[task.name], answer["done"]["sha256"])
