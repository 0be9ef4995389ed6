"""Open Energon data sets. An unusable path, split or size becomes one ValueError with the flag."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ryml  # type: ignore[import-untyped]
from megatron.energon import (
    CaptioningSample,
    InterleavedSample,
    VQASample,
    WorkerConfig,
    load_dataset,
)
from megatron.energon import errors as energon_errors
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.flavors.crude import CrudeSample
from megatron.energon.flavors.jsonl.ijsonl import IJSONL_SUFFIX
from megatron.energon.flavors.webdataset import base_webdataset
from megatron.energon.flavors.webdataset.config import INDEX_SQLITE_FILENAME, MAIN_FOLDER_NAME
from megatron.energon.flavors.webdataset.itar_reader import ITarReader
from megatron.energon.flavors.webdataset.metadata import EnergonDatasetType, get_dataset_type
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset
from megatron.energon.metadataset.loader_interface import LoadedDatasetList
from megatron.energon.task_encoder import base as task_encoder_base
from megatron.energon.task_encoder.base import TaskEncoder
from megatron.energon.wrappers.base import BaseWrapperDataset

from data.conversation_files import sources as conversation_files
from data.conversation_files.files import SUFFIXES
from data.conversation_files.provider import Config as FilesConfig
from data.conversations import is_image, is_read, is_video
from data.energon import compat
from data.energon.provider import Config, check_path, path_of

# Errors that Energon raises for a folder, a YAML or a split that it cannot use.
OPEN_ERRORS = (AssertionError, AttributeError, OSError, ValueError, KeyError, TypeError, ryml.ryml.ExceptionBasic)
# Number of parts in Energon's index that are examined for images.
CHECKED_PARTS = 10_000
SPLIT_NAMES = {"train": "train", "valid": "val"}
# Shards that stay open over all sources of a blend, in a worker process and for a lane that is read in the training
# process. Each needs a file handle, and a process may often have only 1024.
OPEN_SHARDS, OPEN_SHARDS_IN_PROCESS = 512, 32


def _discard(*_: Any, **__: Any) -> None:
    """Replace `print` in Energon. The trainer logs bad samples itself, and slices of shards are of no interest."""


vars(energon_errors)["print"] = _discard
vars(base_webdataset)["print"] = _discard
# Energon builds the data set of a blend with it.
vars(task_encoder_base)["RepeatDataset"] = compat.RepeatDataset


@contextmanager
def naming(flag: str, path: str, split: str) -> Iterator[None]:
    """Turn Energon's errors about a data set into a ValueError with flag, path and split."""
    try:
        yield
    except OPEN_ERRORS as error:
        detail = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, KeyError):
            detail = f"there is no {detail}"
        elif isinstance(error, ryml.ryml.ExceptionBasic):
            detail = "not a YAML file"
        raise ValueError(f"{flag} {path}: cannot open the {SPLIT_NAMES[split]!r} split: {detail}") from error


def check_prepared(config: Config, split: str) -> None:
    """Raise ValueError unless the path of a split exists and can be opened."""
    check_path(config, split)
    if isinstance(config, FilesConfig):
        conversation_files.check_files(config, split)
        return
    flag, path = path_of(config, split)
    with naming(flag, path, split):
        location = EPath(path)
        kind = get_dataset_type(location)
        exists = location.is_file() or location.is_dir()
    if not exists:
        raise ValueError(f"{flag} {path}: does not exist")
    if kind in (EnergonDatasetType.INVALID, EnergonDatasetType.FILESYSTEM):
        has_records = any(next(location.glob(f"*{suffix}"), None) is not None for suffix in SUFFIXES)
        other = "; --dataset-provider conversations reads its files as they are" if has_records else ""
        raise ValueError(f"{flag} {path}: is neither a folder prepared with `energon prepare {path}`, which has "
                         f".nv-meta/.info.json, nor a metadataset YAML{other}")
    if kind is not EnergonDatasetType.JSONL:
        return
    if not location.with_suffix(IJSONL_SUFFIX).is_file():
        raise ValueError(f"{flag} {path}: is not indexed; run `energon prepare {path}`")
    # Energon returns the whole file for every split, so the run would validate on its training samples.
    if split == "valid" and not config.valid_data_path:
        raise ValueError(f"--data-path {path}: a JSONL file has no val split; name another file with "
                         "--valid-data-path, or a metadataset YAML with a train and a val split, or leave out "
                         "--eval-iters")


def leaves(dataset: SavableDataset) -> Iterator[WebdatasetSampleLoaderDataset]:
    """Yield the data sets at the bottom of a tree of wrappers, which read shards."""
    if isinstance(dataset, WebdatasetSampleLoaderDataset):
        yield dataset
    elif isinstance(dataset, BaseWrapperDataset):
        for inner in dataset.datasets:
            yield from leaves(inner)


class OpenShards(dict[int, Any]):
    """Open tar files of a reader, each of which forgets the members that it has read.

    Otherwise their lists of members would grow with every pass.
    """

    def __getitem__(self, shard: int) -> Any:
        tar = super().__getitem__(shard)
        tar.members.clear()
        return tar


def keep_open(dataset: SavableDataset, most: int) -> None:
    """Let a data set keep `most` shards open, but no fewer than Energon would.

    Energon keeps 16 shards open, reads 16 at a time, and closes the one that was opened first. A new shard then closes
    one that is still being read, which closes another one when it is opened again. So shards are opened more than once
    even in the first pass.
    """
    readers = [reader for leaf in leaves(dataset) for reader in leaf.join_readers if isinstance(reader, ITarReader)]
    for reader in readers:
        reader.itar_files_cache = OpenShards()
        reader.itar_cache_size = max(reader.itar_cache_size, most // len(readers))


def leaf_range(leaf: WebdatasetSampleLoaderDataset) -> range:
    """Return which samples of its shards a data set reads if there is one worker in total."""
    (offsets,) = leaf.workers_slice_offsets
    return range(int(offsets[0]), int(offsets[-1]))


def split_sizes(config: Config, split: str) -> list[int]:
    """Count the samples in one pass over each source of a split.

    Raises:
        ValueError: it cannot be opened; the message names flag and path.
    """
    check_prepared(config, split)
    flag, path = path_of(config, split)
    with naming(flag, path, split):
        return [len(leaf_range(leaf)) for source in open_sources(config, split) for leaf in leaves(source.build())]


def load_sources(config: Config, split: str, worker_config: WorkerConfig, **options: Any) -> LoadedDatasetList:
    """Return Energon's factories of the data sets that a split blends, and how it blends them.

    Args:
        config: the data set's flags.
        split: `train` or `valid`.
        worker_config: the workers that read.
        options: further arguments of Energon's factories of shards.

    Raises:
        ValueError: the data cannot be opened; the message names flag and path.
    """
    if isinstance(config, FilesConfig):
        return conversation_files.load_sources(config, split, worker_config, options.get("max_samples_per_sequence"))
    flag, path = path_of(config, split)
    with naming(flag, path, split):
        return load_dataset(path).get_datasets(
            training=split == "train", split_part=SPLIT_NAMES[split], worker_config=worker_config, **options)


def open_sources(config: Config, split: str) -> list[Any]:
    """Return Energon's factories of the data sets that a split blends. Raises ValueError if they cannot be opened."""
    alone = WorkerConfig(rank=0, world_size=1, num_workers=0)
    return [source.dataset for source in load_sources(config, split, alone).datasets]


def refuse_images(config: Config, split: str) -> None:
    """Refuse a split with images for a run that has no encoder.

    The function examines sample types and, in data sets without one, the first parts in Energon's index. Images that
    these do not show, such as those inside a JSON part, end the run when they are read.

    Raises:
        ValueError: there are images; the message names flag, path and a part.
    """
    flag, path = path_of(config, split)
    for source in open_sources(config, split):
        found = image_part(source)
        if found:
            raise ValueError(f"{flag} {path}: has images ({found}), and the run has no encoder for them, because of "
                             "--llm-only or a model for text; use a data set of text")


def image_part(source: Any) -> str:
    """Return a part that shows that a source of samples has images; empty if there is none."""
    if issubclass(source.__sample_type__, (CaptioningSample, VQASample, InterleavedSample)):
        return f"its samples are of type {source.__sample_type__.__name__}"
    if source.__sample_type__ is not CrudeSample:
        return ""
    part, folder = next(((part, folder) for part, folder in indexed_parts(source) if is_image(part) or is_video(part)),
                        ("", ""))
    return f"such as part {part} of {folder}" if part else ""


def indexed_parts(source: Any) -> Iterator[tuple[str, str]]:
    """Return the first part names in the index of a source of samples, each with its folder; none without an index."""
    for folder in source.paths:
        index = folder / MAIN_FOLDER_NAME / INDEX_SQLITE_FILENAME
        if not folder.is_local() or not index.is_file():
            continue
        database = sqlite3.connect(f"file:{index}?mode=ro", uri=True)
        try:
            parts = database.execute(
                f"SELECT DISTINCT part_name FROM (SELECT part_name FROM sample_parts LIMIT {CHECKED_PARTS})").fetchall()
        except sqlite3.OperationalError:  # prepared by a version of Energon that wrote no list of parts
            continue
        finally:
            database.close()
        yield from ((part, str(folder)) for (part,) in parts)


def unread_parts(config: Config, split: str) -> list[str]:
    """Return the names of parts of crude samples that are neither text nor images, from the index of a split."""
    found = {part for source in open_sources(config, split) if source.__sample_type__ is CrudeSample
             for part, _ in indexed_parts(source) if not is_read(part)}
    return sorted(found)


def check_size(config: Config, num_lanes: int) -> list[int]:
    """Return the sizes of the training split's sources. Raises ValueError if a worker would have no sample."""
    sizes = split_sizes(config, "train")
    workers = num_lanes * max(config.num_workers, 1)
    if sum(sizes) < workers:
        raise ValueError(
            f"--data-path {config.data_path}: has {sum(sizes)} samples for --llm-dp {num_lanes} times --num-workers "
            f"{config.num_workers}, {workers} workers, and each needs one; use fewer"
        )
    return sizes


def train_dataset(config: Config, worker_config: WorkerConfig, encoder: TaskEncoder) -> SavableDataset:
    """Open Energon's endless data set of the training split. Raises ValueError if it cannot be opened."""
    # Without shuffling, Energon reads the slices of a shard one after the other.
    order = {"shuffle_over_epochs_multiplier": 1} if config.shuffle else {
        "shuffle_over_epochs_multiplier": None, "parallel_shard_iters": 1}
    loaded = load_sources(config, "train", worker_config, max_samples_per_sequence=config.max_samples_per_sequence,
                          decoder=encoder.decoder, **order)
    with naming("--data-path", config.data_path, "train"):
        dataset = encoder.build_train_datasets(
            datasets=loaded.datasets,
            worker_config=worker_config,
            batch_size=None,
            packing_buffer_size=config.packing_buffer_size or None,
            shuffle_buffer_size=config.shuffle_buffer_size or None,
            blend_mode=loaded.blend_mode,
            repeat=True,
        )
    keep_open(dataset, OPEN_SHARDS if config.num_workers else OPEN_SHARDS_IN_PROCESS)
    return dataset


def valid_datasets(config: Config, worker_config: WorkerConfig, encoder: TaskEncoder) -> list[SavableDataset]:
    """Open Energon's data sets of the validation split, one for each source.

    Raises ValueError if they cannot be opened.
    """
    flag, path = path_of(config, "valid")
    loaded = load_sources(config, "valid", worker_config, decoder=encoder.decoder)
    with naming(flag, path, "valid"):
        return [
            encoder.build_val_datasets(datasets=[source], worker_config=worker_config, batch_size=None)
            for source in loaded.datasets
        ]
