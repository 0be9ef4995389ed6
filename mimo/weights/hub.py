"""Models of the Hugging Face hub, in the cache of huggingface_hub. Importing this needs no torch.

A flag that takes the folder of a model also takes `organisation/name` or `organisation/name@revision`. When flags are
read, every process of a node asks for the small files (configuration, tokenizer, image processor), and the first one
downloads them. The weights follow when a run loads them: the first rank of each node downloads, and the others wait.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[^@\s]+))?")
# Files of a model besides its weights: configurations, tokenizers, chat templates.
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
# Files in folders of a repository are other formats of the same model, or copies of its code.
IN_FOLDERS = ("*/*",)
WEIGHTS = ("*.safetensors",)
INDEX = "model.safetensors.index.json"
# A folder in the cache of huggingface_hub.
SNAPSHOT = re.compile(r"models--(?P<organisation>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/(?P<commit>[0-9a-f]{40})")
_STARTED_S = time.time()


class Model(NamedTuple):
    """A model of the hub at one commit."""

    repo: str
    commit: str


def local_folder(flag: str, path: str) -> str:
    """Return the local folder of a model, with its small files; a path that is no id of the hub is returned unchanged.

    An existing file or folder always wins over a model of the hub with the same name. Processes that start together on
    a node ask the hub once. Messages name `flag`, which gave the path.

    Raises:
        ValueError: it is an id, and neither the hub nor the cache has the model.
    """
    found = ID.fullmatch(path)
    if found is None or os.path.lexists(path) or path.endswith(".json"):
        return path
    from filelock import FileLock
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

    revision = found["revision"] or constants.DEFAULT_REVISION
    name = f"models--{found['repo'].replace('/', '--')}--{revision.replace('/', '--')}"
    locks = Path(constants.HF_HUB_CACHE) / ".locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
        with FileLock(locks / f"{name}.mimo.lock"):
            record = locks / f"{name}.mimo.json"
            if record.is_file() and record.stat().st_mtime >= _STARTED_S:
                folder = json.loads(record.read_text())
                if Path(folder).is_dir():
                    return str(folder)
            folder = _download(f"{flag} {path}", found["repo"], revision, SMALL_FILES, "there is no such folder, and ")
            record.write_text(json.dumps(folder))
    except OSError as error:
        try:
            # A shared cache that only its owner writes may have the model.
            folder = snapshot_download(found["repo"], revision=revision, allow_patterns=list(SMALL_FILES),
                                       ignore_patterns=list(IN_FOLDERS), local_files_only=True)
        except (LocalEntryNotFoundError, IncompleteSnapshotError, OSError):
            cache = f"the cache {constants.HF_HUB_CACHE} (HF_HOME)"
            raise ValueError(f"{flag} {path}: {cache} cannot be written: {error}") from error
    return str(folder)


def check_folder(flag: str, folder: Path) -> None:
    """Raise ValueError if a folder, which `local_folder` has returned, does not exist."""
    if not folder.is_dir():
        raise ValueError(f"{flag} {folder}: there is no such folder; a model of the Hugging Face hub is named "
                         "organisation/name or organisation/name@revision")


def model_of(folder: str | Path) -> Model | None:
    """Return the model that a folder of the cache belongs to; None for any other folder."""
    # Most folders are not in the cache: they are told apart without the import.
    found = SNAPSHOT.search(str(folder))
    if found is None:
        return None
    from huggingface_hub import constants

    if Path(folder).resolve().parents[2] != Path(constants.HF_HUB_CACHE).expanduser().resolve():
        return None
    return Model(f"{found['organisation']}/{found['name']}", found["commit"])


def weights_to_download(flag: str, folder: str | Path) -> dict[str, int]:
    """Return names and sizes in bytes of the weights that a folder of the cache still lacks.

    Raises:
        ValueError: the model has no safetensors, or files are missing and the hub cannot be reached.
    """
    model = model_of(folder)
    if model is None or not _lacks_weights(Path(folder)):
        return {}
    found = _download(flag, model.repo, model.commit, _weight_names(Path(folder)), "", dry_run=True)
    if not found:
        raise ValueError(f"{flag}: {model.repo} at {model.commit} has no weights: no *.safetensors")
    return {each.filename: each.file_size for each in found if each.will_download}


def download_weights(flag: str, folder: str | Path) -> None:
    """Download what a folder of the cache lacks of its weights; other folders stay as they are. Raises ValueError."""
    model = model_of(folder)
    if model is not None and _lacks_weights(Path(folder)):
        _download(flag, model.repo, model.commit, _weight_names(Path(folder)), "")


def _weight_names(folder: Path) -> Sequence[str]:
    """Return patterns of the files of weights. With an index there may be a second set of weights beside its files."""
    index = folder / INDEX
    if not index.is_file():
        return WEIGHTS
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of weights: {error}") from error


def _lacks_weights(folder: Path) -> bool:
    names = _weight_names(folder)
    # Without an index a model has one file.
    return not (any(folder.glob(names[0])) if names is WEIGHTS else all((folder / name).is_file() for name in names))


def _download(given: str, repo: str, revision: str, patterns: Sequence[str], tried: str, *,
              dry_run: bool = False) -> Any:
    """Run `snapshot_download` and raise its errors as one ValueError that says what was tried."""
    import httpx
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        IncompleteSnapshotError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub, cache = constants.ENDPOINT, f"the cache {constants.HF_HUB_CACHE} (HF_HOME)"
    try:
        return huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=list(patterns),
                                                 ignore_patterns=list(IN_FOLDERS), dry_run=dry_run)
    except GatedRepoError as error:
        reason = f"the hub at {hub} gives {repo} only to users who accepted its terms; set HF_TOKEN ({_line(error)})"
    except RevisionNotFoundError:
        reason = f"{repo} on the hub at {hub} has no revision {revision}"
    except RepositoryNotFoundError:
        reason = f"the hub at {hub} has no public model {repo}; for a private one set HF_TOKEN"
    except (LocalEntryNotFoundError, IncompleteSnapshotError) as error:
        asked = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"the hub at {hub} cannot be reached"
        reason = f"{asked}, and {cache} does not have {repo} at {revision} ({_line(error.__cause__ or error)})"
    except (httpx.HTTPError, HfHubHTTPError, ValueError, OSError) as error:
        reason = f"{repo} at {revision} cannot be had from the hub at {hub}: {_line(error)}"
    raise ValueError(f"{given}: {tried}{reason}")


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
