"""Child process of scripts/stage.py for the Hugging Face Hub. Tasks and answers have the form of worker.py."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Progress bars of every file on every node would fill the log.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from stage_files.worker import Refusal, Teller, serve

WATCH_S = 0.5

try:
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import OfflineModeIsEnabled
except ImportError as missing:
    huggingface_hub, reason = None, str(missing)
    ERRORS: tuple[type[Exception], ...] = ()
else:
    # The library raises an OSError, of the network or of its own, or one of these.
    ERRORS = (httpx.HTTPError, ValueError)


def _library() -> Any:
    if huggingface_hub is None:
        raise Refusal(f"hf:// needs the package huggingface_hub: {reason}")
    return huggingface_hub


def _explain(error: Exception, task: dict[str, Any]) -> Refusal:
    """Return an error of the library as one line that says what to do."""
    name = f"hf://{'datasets/' if task['type'] == 'dataset' else ''}{task['repo']}"
    text = " ".join(str(error).split())
    if isinstance(error, OfflineModeIsEnabled):
        return Refusal(f"{name}: HF_HUB_OFFLINE is set, so nothing can be downloaded. Unset it, or give a folder that "
                       "has the files instead")
    if isinstance(error, (httpx.TransportError, ConnectionError, TimeoutError)):
        return Refusal(f"{name}: the Hub at {huggingface_hub.constants.ENDPOINT} cannot be reached from here ({text}). "
                       "Download on a machine that can, and give the folder instead")
    return Refusal(f"{name}: {type(error).__name__}: {text}")


def resolve(task: dict[str, Any], tell: Teller) -> dict[str, Any]:
    """Return the commit of a revision, and its files with their sizes."""
    library = _library()
    try:
        found = library.HfApi().repo_info(task["repo"], repo_type=task["type"], revision=task["revision"],
                                          files_metadata=True)
    except (OSError, *ERRORS) as error:
        raise _explain(error, task) from error
    return {"sha": found.sha, "files": {each.rfilename: each.size or 0 for each in found.siblings or ()}}


def download(task: dict[str, Any], tell: Teller) -> dict[str, Any]:
    """Download the files of a commit that match the patterns into `target`. Continues an interrupted download."""
    library, target, over = _library(), Path(task["target"]), threading.Event()
    watcher = threading.Thread(target=_watch, args=(target, tell, over), daemon=True)
    watcher.start()
    try:
        library.snapshot_download(task["repo"], repo_type=task["type"], revision=task["sha"], local_dir=target,
                                  allow_patterns=task["include"] or None, max_workers=task["workers"])
    except (OSError, *ERRORS) as error:
        raise _explain(error, task) from error
    finally:
        over.set()
        watcher.join()
    return {}


def _watch(target: Path, tell: Teller, over: threading.Event) -> None:
    """Report bytes as they arrive."""
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
    serve({"resolve": resolve, "download": download}, __doc__)
