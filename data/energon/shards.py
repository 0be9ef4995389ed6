"""Write shards: tar files of samples, and the metadata that Energon reads beside them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import tarfile
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

# Name and content of a part of a sample.
Member = tuple[str, bytes]


def write_shard(path: Path, members: Iterable[Member]) -> None:
    """Write a tar file whose bytes depend on its members alone."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def prepare_shards(folder: Path, names: Sequence[str], splits: Sequence[str]) -> None:
    """Write the metadata for which `energon prepare` would ask a person.

    Args:
        folder: the folder of the shards.
        names: file names of the shards.
        splits: names of the splits. A shard's name begins with that of its split and a hyphen.
    """
    # Imported here because torch takes seconds, and --help of the scripts does not need it.
    from megatron.energon import CrudeWebdataset
    from megatron.energon.epathlib import EPath

    with contextlib.redirect_stdout(io.StringIO()):
        CrudeWebdataset.prepare_dataset(
            EPath(folder), list(names), split_parts_patterns=[(split, f"{split}-.*") for split in splits], workers=1
        )
    meta = folder / ".nv-meta"
    (meta / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
    # Energon draws the id at random. Here, the same shards have the same id.
    digest = hashlib.sha256()
    for name in names:
        digest.update((folder / name).read_bytes())
    (meta / "index.uuid").write_text(str(uuid.uuid5(uuid.NAMESPACE_OID, digest.hexdigest())))
