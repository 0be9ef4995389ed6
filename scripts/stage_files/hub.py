"""Download models and data sets of the Hugging Face Hub, at one commit, to the node's own disk.

As a program, this is the child process that asks the Hub. Its tasks and answers have the form of worker.py.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stage_files.children import Children, Progress, StageError, Task, format_gb
from stage_files.folders import existing, is_chosen
from stage_files.record import Recorded, StagedSource
from stage_files.worker import Refusal, Teller, serve

PREFIX = "hf://"
DOWNLOADING = (sys.executable, __file__)
# Seconds between two looks at how many bytes have arrived.
WATCH_S = 0.5
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


def stage_hub(source: HubSource, folder: Path, include: tuple[str, ...], known: dict[str, StagedSource],
              progress: Progress, *, workers: int, timeout_s: float, retries: int, dry_run: bool,
              verify: bool) -> Counter[str]:
    """Download a repository to `folder/name`, put its record into `known`, and count files and bytes.

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
    return Counter({"copied": len(absent), "copied_bytes": needed, "there": len(files) - len(absent),
                    "there_bytes": sum(files.values()) - needed})


def _last(children: Children, task: Task, progress: Progress) -> dict[str, object]:
    for _, answer in progress.follow(children.run([task])):
        if "done" in answer:
            found: dict[str, object] = answer["done"]
    return found


def _is_staged(earlier: StagedSource | None, source: str, place: Path, include: tuple[str, ...], verify: bool) -> bool:
    """Whether all files of a commit are there. With --verify, the Hub's client checks them instead."""
    return (not verify and earlier is not None and (earlier.source, earlier.include) == (source, list(include))
            and all(recorded.is_at(place / name) for name, recorded in earlier.files.items()))


def _there(earlier: StagedSource) -> Counter[str]:
    return Counter({"there": len(earlier.files), "there_bytes": sum(each.size for each in earlier.files.values())})


def _record(source: str, place: Path, include: tuple[str, ...], files: dict[str, int]) -> StagedSource:
    recorded = {}
    for name in files:
        if not (place / name).is_file():
            raise StageError(f"{source}: {name} is not there after the download")
        status = (place / name).stat()
        recorded[name] = Recorded(status.st_size, status.st_mtime_ns)
    return StagedSource(source, list(include), recorded)


def resolve(task: dict[str, Any], tell: Teller) -> dict[str, Any]:
    """Return the commit of a revision, and its files with their sizes."""
    import huggingface_hub

    found = huggingface_hub.HfApi().repo_info(task["repo"], repo_type=task["type"], revision=task["revision"],
                                              files_metadata=True)
    return {"sha": found.sha, "files": {each.rfilename: each.size or 0 for each in found.siblings or ()}}


def download(task: dict[str, Any], tell: Teller) -> dict[str, Any]:
    """Download the files of a commit that match the patterns into `target`. Continues an interrupted download."""
    import huggingface_hub

    target, over = Path(task["target"]), threading.Event()
    watcher = threading.Thread(target=_watch, args=(target, tell, over), daemon=True)
    watcher.start()
    try:
        huggingface_hub.snapshot_download(task["repo"], repo_type=task["type"], revision=task["sha"], local_dir=target,
                                          allow_patterns=task["include"] or None, max_workers=task["workers"])
    finally:
        over.set()
        watcher.join()
    return {}


def explained(act: Callable[[dict[str, Any], Teller], dict[str, Any]]) -> Callable[[dict[str, Any], Teller],
                                                                                   dict[str, Any]]:
    """Return a task whose errors of the library are one line that says what to do."""
    def run(task: dict[str, Any], tell: Teller) -> dict[str, Any]:
        # Progress bars of every file on every node would fill the log.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        try:
            import httpx
            from huggingface_hub import constants
            from huggingface_hub.errors import OfflineModeIsEnabled
        except ImportError as missing:
            raise Refusal(f"hf:// needs the package huggingface_hub: {missing}") from missing
        name = f"hf://{'datasets/' if task['type'] == 'dataset' else ''}{task['repo']}"
        try:
            return act(task, tell)
        # The library raises an OSError, of the network or of its own, or one of the others.
        except (OSError, httpx.HTTPError, ValueError) as error:
            text = " ".join(str(error).split())
            if isinstance(error, OfflineModeIsEnabled):
                reason = ("HF_HUB_OFFLINE is set, so nothing can be downloaded. Unset it, or give a folder that has "
                          "the files instead")
            elif isinstance(error, (httpx.TransportError, ConnectionError, TimeoutError)):
                reason = (f"the Hub at {constants.ENDPOINT} cannot be reached from here ({text}). Download on a "
                          "machine that can, and give the folder instead")
            else:
                reason = f"{type(error).__name__}: {text}"
            raise Refusal(f"{name}: {reason}") from error

    return run


def _watch(target: Path, tell: Teller, over: threading.Event) -> None:
    before = _size(target)
    while not over.wait(WATCH_S):
        now = _size(target)
        if now != before:
            tell(bytes=max(now - before, 0))
            before = now


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue  # renamed since it was listed
    return total


if __name__ == "__main__":
    serve({"resolve": explained(resolve), "download": explained(download)}, __doc__)
