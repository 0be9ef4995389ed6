"""Conversations in files as people publish them, with images and videos: JSONL, JSON, Parquet, folders of `datasets`.

The files become Energon data sets (`data.conversation_files.sources`), so that lanes, packing, bad samples and
checkpoints work as with shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from data.energon import provider as energon
from mimo.protocols import DataRequest

# Columns are part of the digest of the data.
NOT_STREAMED = ("image_folder", "data_columns", "data_cache", "data_cache_gib")


@dataclass(frozen=True)
class Config(energon.Config):
    """Data set `conversations`: JSONL, JSON and Parquet files, with images in a folder or in the records."""

    data_path: str = ""
    """JSONL, JSON or Parquet file, folder with one, folder of a Hugging Face data set, or YAML file that mixes several:
    a path, or a URL that fsspec reads (s3://, https://, msc://)."""
    valid_data_path: str = ""
    """Held-out samples, in the same forms. Default: the `val` split of --data-path, if it has one."""
    image_folder: str = ""
    """Folder or URL to which the names of images and videos are relative. Default: --data-path if it is a folder, or
    else the folder of the file."""
    data_columns: tuple[str, ...] = ()
    """Columns of the records with other names than expected, as KEY=COLUMN: `question=prompt answer=response
    image=img`."""
    data_cache: str = ""
    """Folder on the node's disk for copies of files at URLs. Default: mimo-hetero in $XDG_CACHE_HOME or ~/.cache."""
    data_cache_gib: float = 100.0
    """Approximate limit, in GiB, of images and videos in --data-cache. Those that were read least recently are
    deleted."""


class ConversationsProvider(energon.EnergonProvider):
    """The `conversations` data set; see the docstring of this module."""

    Config: ClassVar[type] = Config

    def validate(self, config: Any, request: DataRequest) -> None:
        """Raise ValueError, with flags, files and lines, for flags or files that cannot work.

        The first records of each data set are read with their images until one can be used. One of them must be usable.
        """
        energon.check(config, request)
        # Energon and torch take seconds to import, and --help needs neither of them.
        from data.conversation_files.sources import check_files, check_first_records
        from data.energon.task_encoder import ErrorLog, VlmTaskEncoder

        check_files(config, request.split)
        super().validate(config, request)
        encoder = VlmTaskEncoder(config, request, ErrorLog(config.max_bad_samples))
        check_first_records(config, request.split, encoder.preencode_sample,
                            takes_images=request.tokens.image_token_id >= 0)

    def stream_fields(self, config: Any) -> dict[str, Any]:
        """Return the fields that decide the samples. Files count by their sizes, not by their location."""
        from data.conversation_files.sources import digest

        fields = {name: value for name, value in energon.streamed_flags(config).items() if name not in NOT_STREAMED}
        return fields | {"data_path": digest(config), "tokenizer": energon.tokenizer_digest(config)}

    def write_shards(self, config: Any, out: Path, samples_per_shard: int) -> str:
        """Write all splits as shards and return a description of them; see `mimo.commands.convert_data`."""
        from data.conversation_files.convert import convert

        return convert(config, out, samples_per_shard)


provider = ConversationsProvider()
