"""Download models and data sets of the Hugging Face Hub, at one commit, to the node's own disk."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from stage_files.children import HERE, Children, Progress, StageError, Task, format_gb
from stage_files.folders import existing, is_chosen
from stage_files.record import Recorded, StagedSource

PREFIX = "hf://"
DOWNLOADING = (sys.executable, str(HERE / "hub_worker.py"))
COMMIT = re.compile(r"[0-9a-f]{40}")
PATTERN = re.compile(r"hf://(?P<datasets>datasets/)?(?P<repo>[\w.-]+/(?P<name>[\w.-]+))(?:@(?P<revision>[^@\s]+))?")


@dataclass(frozen=True)
class HubSource:
    """A repository of the Hub.

    Attributes:
        repo: `organisation/name`.
        name: name of the repository.
        kind: `model` or `dataset`.
        revision: branch, tag or commit.
    """

    repo: str
    name: str
    kind: str
    revision: str

    def at(self, commit: str) -> str:
        """Return the name of this source at a commit."""
        return f"{PREFIX}{'datasets/' if self.kind == 'dataset' else ''}{self.repo}@{commit}"


def parse(source: str) -> HubSource:
    """Parse `hf://[datasets/]organisation/name[@revision]`. Raises ValueError."""
    match = PATTERN.fullmatch(source)
    if not match:
        raise ValueError(f"{source}: write hf://organisation/name or hf://datasets/organisation/name, followed by "
                         "@revision unless you want the main branch")
    return HubSource(match["repo"], match["name"], "dataset" if match["datasets"] else "model",
                     match["revision"] or "main")


@dataclass(frozen=True)
class HubCounts:
    """Files and bytes of a source.

    Attributes:
        copied: number of files downloaded.
        copied_bytes: their size.
        there: number of files that were there already.
        there_bytes: their size.
    """

    copied: int = 0
    copied_bytes: int = 0
    there: int = 0
    there_bytes: int = 0


def stage_hub(source: HubSource, folder: Path, include: tuple[str, ...], known: dict[str, StagedSource],
              progress: Progress, *, workers: int, timeout_s: float, retries: int, dry_run: bool,
              verify: bool) -> HubCounts:
    """Download a repository to `folder/name` and put its record into `known`.

    A commit that is there needs no network. A branch is looked up every time.

    Raises:
        StageError: the Hub cannot be reached or has no such repository, or there is no space or no progress.
    """
    place, earlier = folder / source.name, known.get(source.name)
    if COMMIT.fullmatch(source.revision) and _is_staged(earlier, source.at(source.revision), place, include, verify):
        assert earlier is not None
        return _there(earlier)
    with Children(1, timeout_s, retries, DOWNLOADING) as children:
        request = {"repo": source.repo, "type": source.kind}
        try:
            found = _last(children, Task(source.at(source.revision),
                                         request | {"do": "resolve", "revision": source.revision}), progress)
        except StageError as error:
            staged = f"; {earlier.source} is staged and needs no network" if earlier and earlier.source.startswith(
                source.at("")) else ""
            raise StageError(f"{error}{staged}") from error
        commit = str(found["sha"])
        if _is_staged(earlier, source.at(commit), place, include, verify):
            assert earlier is not None
            return _there(earlier)
        files = {name: int(size) for name, size in found["files"].items() if is_chosen(name, include)}
        if not files:
            raise StageError(f"{source.at(commit)} has {len(found['files'])} files, none of them for --include "
                             f"{' '.join(include)}")
        absent = {name: size for name, size in files.items()
                  if not (place / name).is_file() or (place / name).stat().st_size != size}
        needed, free = sum(absent.values()), shutil.disk_usage(existing(folder)).free
        if needed > free:
            raise StageError(f"{folder}: {format_gb(needed)} to download, {format_gb(free)} free")
        if not dry_run:
            progress.total += needed
            place.mkdir(parents=True, exist_ok=True)
            _last(children, Task(source.at(commit), request | {
                "do": "download", "sha": commit, "include": list(include), "target": str(place), "workers": workers}),
                progress)
            known[source.name] = _record(source.at(commit), place, include, files)
    return HubCounts(len(absent), needed, len(files) - len(absent), sum(files.values()) - needed)


def _last(children: Children, task: Task, progress: Progress) -> dict[str, object]:
    """Run one task and return its last answer."""
    for _, answer in progress.follow(children.run([task])):
        if "done" in answer:
            found: dict[str, object] = answer["done"]
    return found


def _is_staged(earlier: StagedSource | None, source: str, place: Path, include: tuple[str, ...], verify: bool) -> bool:
    """Whether all files of a commit are there. With --verify, the Hub's client checks them instead."""
    return (not verify and earlier is not None and (earlier.source, earlier.include) == (source, list(include))
            and all(recorded.is_at(place / name) for name, recorded in earlier.files.items()))


def _there(earlier: StagedSource) -> HubCounts:
    return HubCounts(there=len(earlier.files), there_bytes=sum(each.size for each in earlier.files.values()))


def _record(source: str, place: Path, include: tuple[str, ...], files: dict[str, int]) -> StagedSource:
    recorded = {}
    for name in files:
        if not (place / name).is_file():
            raise StageError(f"{source}: {name} is not there after the download")
        status = (place / name).stat()
        recorded[name] = Recorded(status.st_size, status.st_mtime_ns)
    return StagedSource(source, list(include), recorded)
