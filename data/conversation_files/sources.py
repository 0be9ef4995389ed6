"""Files of conversations as data sets of Energon, which decides which worker reads which records, in which order."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from megatron.energon import WorkerConfig, basic_sample_keys
from megatron.energon.cache import FileStore
from megatron.energon.errors import FatalSampleError
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory, SavableDataset
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData, WebdatasetSampleLoaderDataset
from megatron.energon.flavors.webdataset.sharder import Sharder
from megatron.energon.flavors.webdataset.structs import ShardInfo
from megatron.energon.metadataset.loader_interface import DatasetBlendMode, LoadedDataset, LoadedDatasetList
from megatron.energon.source_info import SourceInfo
from megatron.energon.wrappers.map_dataset import MapDataset

from data.conversation_files import remote
from data.conversation_files.files import SUFFIXES, FolderImages, MissingImageError, RecordFile, images_of, open_file
from data.conversation_files.provider import Config
from data.conversation_files.remote import Cache, is_url
from data.conversations import FORMS, VIDEO_KEYS, Conversation, from_record
from data.energon.cookers import ParsedSample
from data.energon.provider import path_of

logger = logging.getLogger("mimo.data")
# Records of each source that are read before a run starts, until one with an image can be used.
FIRST_RECORDS = 16
# Slices of the records that a worker reads side by side, as Energon's own data sets do.
PARALLEL_SLICES = 16
# Fewest slices of a worker that has enough records, so that no two passes have the same order.
SHUFFLED_SLICES = 1000
# Blocks of a file that a worker reads side by side and keeps in memory. A block may have hundreds of megabytes.
PARALLEL_BLOCKS = 4
# Files of a downloaded data set that hold no records.
METADATA = ("dataset_info.json", "dataset_infos.json")
# Files that `datasets` saves beside records, which say where these are.
SAVED_METADATA = ("dataset_dict.json", "state.json")
# End of the name of a part of a data set, as in train-00000-of-00005.parquet or train-00000-of-00005-0a1b2c.parquet.
PART = re.compile(r"-\d+-of-(\d+)(-[0-9a-f]+)?$")
# Number of first records in which every column of --data-columns has to appear at least once.
COLUMN_RECORDS = 256
COLUMN_KEYS = (*FORMS, "answer", "answers", "image", "images", *VIDEO_KEYS, "system", "tools")
# Keys of bounding boxes, which each model writes differently. The last one is ms-swift's.
BOX_KEYS = ("bbox", "bboxes", "boxes", "bounding_box", "bounding_boxes", "objects")
# This many of the first records without their images show that the image folder is wrong.
MISSING_IMAGES = 4
SPLIT_NAMES = {"train": "train", "valid": "val"}
# Words in the names of files and folders that tell the split.
SPLIT_WORDS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
               "eval": "val", "test": "test"}


class NoSplitError(ValueError):
    """The data has no validation split."""


@dataclass(frozen=True)
class Source:
    """Files of one kind of record, read as one data set.

    Attributes:
        path: the file or folder that the user named.
        files: the files of records.
        images: folder, or URL as a str, to which the names of images are relative.
        cache: cache of remote files.
        columns: key that is read -> the records' own name of it.
        weight: share of the samples, relative to the other sources; None if all sources are read equally often.
        repetitions: how often the samples come in one pass over all sources; None for weights.
    """

    path: Path
    files: tuple[Path, ...]
    images: Path | str
    cache: Cache
    columns: Mapping[str, str]
    weight: float | None = None
    repetitions: float | None = None


def sources_of(config: Config, split: str) -> list[Source]:
    """Return the sources of a split, `train` or `valid`. Raises ValueError, with flag and file, if there are none."""
    flag, name = path_of(config, split)
    if not name:
        raise ValueError(f"{flag}: name the file or folder of --dataset-provider conversations")
    cache = cache_of(config)
    try:
        if not is_url(name) and not Path(name).exists():
            raise ValueError("does not exist")
        if name.endswith((".yaml", ".yml")):
            return _mixed(name, split, config, cache)
        path, files = _opened(name, None if flag == "--valid-data-path" else SPLIT_NAMES[split], cache)
        return [Source(path, files, _image_folder(config.image_folder, name), cache, columns_of(config))]
    except OSError as error:
        raise ValueError(f"{flag} {name}: {error}") from error
    except ValueError as error:
        kind = NoSplitError if isinstance(error, NoSplitError) else ValueError
        raise kind(f"{flag} {name}: {error}") from error


def cache_of(config: Config) -> Cache:
    """Return the cache of remote files. Raises ValueError for a limit that cannot work."""
    if not config.data_cache_gib > 0:
        raise ValueError(f"--data-cache-gib {config.data_cache_gib}: must be above 0")
    return Cache(Path(config.data_cache) if config.data_cache else remote.default_cache(),
                 int(config.data_cache_gib * remote.GIB))


def columns_of(config: Config) -> dict[str, str]:
    """Return the records' own name of each key in --data-columns. Raises ValueError if the flag cannot be read."""
    columns = {}
    for text in (piece for each in config.data_columns for piece in each.split(",")):
        key, _, column = text.partition("=")
        if key in columns or not column:
            raise ValueError(f"--data-columns {text}: expected KEY=COLUMN, each key once")
        columns[key] = column
    _check_columns(columns, "--data-columns")
    return columns


def _check_columns(columns: Mapping[str, str], where: str) -> None:
    unknown = [key for key in columns if key not in COLUMN_KEYS]
    if unknown:
        raise ValueError(f"{where}: unknown key {', '.join(map(str, unknown))}; known are {', '.join(COLUMN_KEYS)}. "
                         "Write KEY=COLUMN, such as question=prompt")


def _image_folder(given: str, place: str) -> Path | str:
    """Return the folder or URL of a source's images. Raises ValueError for a folder that does not exist."""
    if is_url(given):
        return given
    if given and not Path(given).is_dir():
        raise ValueError(f"--image-folder {given}: is not a folder")
    if not given and is_url(place):
        return place.rpartition("/")[0] if place.endswith(SUFFIXES) else place
    return Path(given or place) if given or Path(place).is_dir() else Path(place).parent


def _opened(place: str, split: str | None, cache: Cache) -> tuple[Path, tuple[Path, ...]]:
    """Return the local path of a file or folder, for messages, and the local files of a split; see `_files_of`."""
    if not is_url(place):
        return Path(place), _files_of(Path(place), split)
    if place.endswith(SUFFIXES):
        path = _copied(place, cache)
        return path, _files_of(path, split)
    # The rules for folders look at names, and at the contents of two files. The others stay where they are.
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in remote.names_in(place, ("data", *SPLIT_WORDS)):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(_copied(remote.joined(place, name), cache).read_bytes()
                                        if Path(name).name in SAVED_METADATA else b"")
        names = [str(file.relative_to(folder)) for file in _files_of(folder, split)]
    files = tuple(_copied(remote.joined(place, name), cache) for name in names)
    return Path(place), files


def _copied(url: str, cache: Cache) -> Path:
    try:
        return cache.record_file(url)
    except FileNotFoundError as error:
        raise ValueError("does not exist") from error


def _files_of(path: Path, split: str | None) -> tuple[Path, ...]:
    """Return the files of a split in a file or folder.

    Args:
        path: the file or folder.
        split: `train` or `val`; None: `val`, or files without the name of a split, which the user named for this.

    Raises:
        ValueError: there are none, or it is unclear which ones are meant.
    """
    if path.is_file():
        if split == "val":
            raise NoSplitError("a single file has no val split; name held-out samples with --valid-data-path, or leave "
                               "out --eval-iters")
        if path.suffix not in SUFFIXES:
            raise ValueError(f"expected a file in {', '.join(SUFFIXES)}, a folder with one, or a YAML file")
        return (path,)
    wanted = split or "val"
    if (path / "dataset_dict.json").is_file():  # `DatasetDict.save_to_disk`
        splits = _metadata(path / "dataset_dict.json", "splits")
        (name,) = _only([name for name in splits if SPLIT_WORDS.get(name, "train") == wanted], wanted, splits)
        return _files_of(path / name, None)
    if (path / "state.json").is_file():  # `Dataset.save_to_disk`
        if split == "val":
            raise NoSplitError("is a single split; name held-out samples with --valid-data-path, or leave out "
                               "--eval-iters")
        files = _metadata(path / "state.json", "_data_files")
        if not files or not all(isinstance(file, Mapping) and isinstance(file.get("filename"), str) for file in files):
            raise ValueError("_data_files of state.json: expected a list of objects with `filename`")
        return tuple(path / file["filename"] for file in files)
    return _files_by_name(path, split)


def _metadata(path: Path, key: str) -> list[Any]:
    """Return a list in a file that `datasets` wrote."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error
    if not isinstance(content, Mapping) or not isinstance(content.get(key), list):
        raise ValueError(f"{path.name} is damaged: it has no list {key}")
    return content[key]


def _files_by_name(path: Path, split: str | None) -> tuple[Path, ...]:
    """Return the files of a split in a folder whose file names tell the split, as on the Hugging Face hub."""
    folders = [path, *(path / name for name in ("data", *SPLIT_WORDS) if (path / name).is_dir())]
    by_split: dict[str, list[Path]] = {}
    for file in sorted(file for folder in folders for file in folder.iterdir()):
        if file.suffix not in SUFFIXES or file.name.startswith(".") or file.name in METADATA:
            continue
        words = re.split(r"[._-]", file.name.lower()) + [file.parent.name if file.parent != path else ""]
        named = next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), "")
        by_split.setdefault(named, []).append(file)
    unnamed, wanted = by_split.get("", []), split or "val"
    found = sorted(by_split.get(wanted, []) + (unnamed if split == "train" else []))
    found = found or (unnamed if split is None else [])
    sets: dict[str, list[Path]] = {}
    for file in found:
        sets.setdefault(str(file.parent / PART.sub("", file.stem)) + file.suffix, []).append(file)
    (files,) = _only(list(sets.values()), wanted, [file.name for file in found])
    parts = PART.search(files[0].stem)
    if parts is not None and int(parts[1]) != len(files):
        raise ValueError(f"has {len(files)} of the {int(parts[1])} parts of {files[0].name}")
    return tuple(files)


def _only[T](found: Sequence[T], wanted: str, names: Sequence[str]) -> Sequence[T]:
    """Return `found` if it is one data set of a split. Raises ValueError otherwise."""
    if not found and wanted == "val":
        raise NoSplitError("has no file of a val split (val or validation in its name); name held-out samples with "
                           "--valid-data-path, or leave out --eval-iters")
    if len(found) != 1:
        raise ValueError(f"expected one data set of the split in {', '.join(SUFFIXES)}, found "
                         f"{', '.join(names) or 'none'}; name a file, or mix several in a YAML file")
    return found


def _mixed(place: str, split: str, config: Config, cache: Cache) -> list[Source]:
    """Read the sources of a split from a YAML file, whose paths are relative to it."""
    path = _copied(place, cache) if is_url(place) else Path(place)
    folder = place.rpartition("/")[0] if is_url(place) else path.parent
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML: {' '.join(str(error).split())}") from error
    name = SPLIT_NAMES[split]
    if not isinstance(content, Mapping) or not content.keys() <= {"train", "val"}:
        found = ", ".join(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
        raise ValueError(f"expected the keys train and val, each with a list of files; found {found}")
    if name == "val" and name not in content:
        raise NoSplitError("has no list of files under val; add one, name held-out samples with --valid-data-path, or "
                           "leave out --eval-iters")
    entries = content.get(name)
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"has no list of files under {name}")
    sources = [_entry(folder, number, entry, name, config, cache) for number, entry in enumerate(entries, 1)]
    weights = [source.weight is not None for source in sources]
    repeated = [source.repetitions is not None for source in sources]
    if any(weights) and (any(repeated) or not all(weights)):
        raise ValueError(f"{name}: give a weight to every file, or repetitions to some and weights to none")
    return sources


def _entry(folder: Path | str, number: int, entry: Any, split: str, config: Config, cache: Cache) -> Source:
    """Read an entry of a list of files of a split."""
    if isinstance(entry, str):
        entry = {"path": entry}
    known = {"path", "images", "columns", "weight", "repetitions"}
    if not isinstance(entry, Mapping) or not entry.keys() <= known or not isinstance(entry.get("path"), str):
        raise ValueError(f"entry {number}: expected path and, if needed, images, columns, weight or repetitions; found "
                         f"{entry}")
    place = remote.joined(folder, entry["path"])
    columns = entry.get("columns")
    if columns is not None:
        if not isinstance(columns, Mapping) or not all(isinstance(value, str) for value in columns.values()):
            raise ValueError(f"entry {number}: columns {columns!r}: expected the record's name of each key")
        _check_columns(columns, f"entry {number}: columns")
    for key in ("weight", "repetitions"):
        value = entry.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))
                                  or not (math.isfinite(value) and value > 0)):
            raise ValueError(f"entry {number}: {key} {value!r}: expected a number above 0")
        if value is not None and split == "val":
            raise ValueError(f"entry {number}: {key} {value}: evaluations read each sample of val once; leave it out")
    try:
        if not is_url(place) and not Path(place).exists():
            raise ValueError("does not exist")
        is_file = place.endswith(SUFFIXES) if is_url(place) else Path(place).is_file()
        path, files = _opened(place, None if is_file or split == "val" else split, cache)
        images = None if entry.get("images") is None else remote.joined(folder, str(entry["images"]))
        if images is not None and not is_url(images) and not Path(images).is_dir():
            raise ValueError(f"images {images}: is not a folder")
        found = _image_folder(config.image_folder if images is None else images, place)
    except ValueError as error:
        raise ValueError(f"entry {number}: {place}: {error}") from error
    return Source(path, files, found, cache, columns_of(config) if columns is None else columns, entry.get("weight"),
                  entry.get("repetitions"))


class RecordReader:
    """Reader of records by number, which replaces Energon's readers of tar files.

    Args:
        source: the files.
        order: number of the record at each index; None: the stored order.
    """

    def __init__(self, source: Source, order: np.ndarray | None) -> None:
        self._source = source
        self._files = [open_file(path) for path in source.files]
        self._starts = [0, *accumulate(map(len, self._files))]
        self._order = order
        self._blocks: OrderedDict[tuple[Path, int], Any] = OrderedDict()

    def __len__(self) -> int:
        return self._starts[-1]

    def __str__(self) -> str:
        return str(self._source.path)

    def place(self, index: int) -> tuple[RecordFile, int]:
        """Return the file of a record, and its number in the file."""
        record = index if self._order is None else int(self._order[index])
        number = int(np.searchsorted(self._starts, record, side="right")) - 1
        return self._files[number], record - self._starts[number]

    def source_info(self, index: int) -> SourceInfo:
        """Return the origin of a record, for messages."""
        file, _ = self.place(index)
        return SourceInfo(dataset_path=self._source.path, index=index, shard_name=file.path.name, file_names=())

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, number = self.place(index)
        return {"__key__": file.name(number), "__shard__": file.path.name, "__restore_key__": ("Webdataset", index),
                "__sources__": (self.source_info(index),), "__subflavors__": None,
                "raw": file.raw(number, self._block(file, number)), "parse": file.parse}

    def _block(self, file: RecordFile, number: int) -> Any:
        """Return the block of a record. The blocks that were used last stay in memory."""
        if not file.block_starts:
            return None
        block = int(np.searchsorted(file.block_starts, number, side="right")) - 1
        key = file.path, block
        if key not in self._blocks:
            # One more than are in use, because a block that is no longer in use may have been used more recently.
            while len(self._blocks) > PARALLEL_BLOCKS:
                self._blocks.popitem(last=False)
            self._blocks[key] = file.read_block(block)
        self._blocks.move_to_end(key)
        return self._blocks[key]

    def close(self) -> None:
        """Forget the blocks. The files stay open for other readers of the process."""
        self._blocks.clear()


class RecordFiles(BaseCoreDatasetFactory[ParsedSample], Sharder):
    """Energon's factory of the data set of a source.

    Args:
        source: the files.
        training: whether records are shuffled and repeated.
        worker_config: the workers.
        max_samples_per_sequence: records that a worker reads from a slice in a row.
        shuffle: whether records are shuffled in training.
    """

    __sample_type__ = ParsedSample

    def __init__(self, source: Source, *, training: bool, worker_config: WorkerConfig,
                 max_samples_per_sequence: int | None, shuffle: bool) -> None:
        self.source, self.paths, self.subflavors = source, [source.path], {}
        self._worker_config, self._max_samples_per_sequence = worker_config, max_samples_per_sequence
        self._shuffle = training and shuffle
        self._files = [open_file(path) for path in source.files]
        self._count = sum(map(len, self._files))

    def __len__(self) -> int:
        return self._count

    def build(self, worker_rotation_offset: int = 0) -> SavableDataset[ParsedSample]:
        # Energon shuffles slices of neighbouring records in each pass. If records can be read one by one, all of them
        # are also shuffled before the first pass, and a small file has small slices. If they are read in blocks, each
        # block is a slice, and its records are shuffled once.
        rng = np.random.default_rng([self._worker_config.seed_offset % 2**32, self._count])
        has_blocks = any(file.block_starts for file in self._files)
        sizes = [size for file in self._files for size in np.diff(file.block_starts)] if has_blocks else [self._count]
        starts = [0, *accumulate(map(int, sizes))]
        order = None
        if self._shuffle:
            order = np.concatenate([start + rng.permutation(size) for start, size in zip(starts, sizes, strict=False)])
        shards = [ShardInfo(name=self.source.path.name, path=self.source.path, count=int(size)) for size in sizes]
        records = WebdatasetSampleLoaderDataset(
            join_readers=[RecordReader(self.source, order)],
            workers_sample_slice_offsets=self.shard_workers(
                shards, worker_config=self._worker_config, rotation_offset=worker_rotation_offset,
                max_samples_per_sequence=None if has_blocks else self._slice_length()),
            worker_config=self._worker_config,
            shuffle_over_epochs=1 if self._shuffle else None,
            parallel_slice_iters=(PARALLEL_BLOCKS if has_blocks else PARALLEL_SLICES) if self._shuffle else 1,
        )
        source = self.source
        read = partial(parsed, images_of(source.images, source.cache), source.columns)
        return MapDataset(records, read, stateless_map_fn=True,
                          worker_config=self._worker_config, map_fn_config={"type": type(self).__qualname__})

    def _slice_length(self) -> int | None:
        """Return the number of records in a slice, which is small enough that a worker has many to shuffle."""
        if not self._shuffle or self._max_samples_per_sequence is None:
            return self._max_samples_per_sequence
        workers = max(1, self._worker_config.num_workers) * self._worker_config.world_size
        return min(self._max_samples_per_sequence, max(1, self._count // workers // SHUFFLED_SLICES))

    def as_file_store(self) -> FileStore:
        raise ValueError(f"{self.source.path}: a file of conversations cannot be an auxiliary data set")


def parsed(images: FolderImages, columns: Mapping[str, str], sample: RawSampleData) -> ParsedSample:
    """Read a record with its images. Raises ValueError if it cannot be used."""
    (record,) = sample.data
    assert record is not None
    content = record["parse"](record["raw"])
    try:
        return ParsedSample(**basic_sample_keys(record), conversation=conversation_of_record(content, images, columns))
    except OSError as error:
        # The record is not at fault, so the run ends.
        raise FatalSampleError(f"{record['__shard__']} {record['__key__']}: {error}") from error


def conversation_of_record(record: Any, images: FolderImages, columns: Mapping[str, str]) -> Conversation:
    """Read a record and the images and videos that it names. Raises ValueError if it cannot be used."""
    if not isinstance(record, Mapping):
        raise ValueError(f"is {type(record).__name__}, expected an object")
    record = renamed(record, columns)
    for key in BOX_KEYS:
        # ms-swift's `objects` belong to marks in the texts. Without such marks, it is an ordinary column.
        has_marks = key == "objects" and any(mark in str(record) for mark in ("<ref-object>", "<bbox>"))
        if record.get(key) and (has_marks or key != "objects" and record.get("question") is not None):
            raise ValueError(f"{key} {str(record[key])[:80]!r}: bounding boxes are not read; write them into the texts "
                             "as the model expects them, and remove the key")
    both = [key for key in ("image", "images") if record.get(key) is not None]
    if len(both) == 2:
        raise ValueError("has both image and images; keep one")
    names = record[both[0]] if both else None
    if names is not None and not isinstance(names, list):
        names = [names]
    return from_record(record, names, images)


def renamed(record: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """Return a record with its own columns under the keys that are read."""
    if not columns:
        return record
    # Keys that decide the form of a record, or list its images, count only under the names that the flag gives.
    hidden = {*columns.values(), *columns}
    for keys in (FORMS, ("image", "images"), VIDEO_KEYS, ("answer", "answers")):
        if not columns.keys().isdisjoint(keys):
            hidden |= set(keys)
    kept = {key: value for key, value in record.items() if key not in hidden}
    return kept | {key: record[column] for key, column in columns.items() if column in record}


def load_sources(config: Config, split: str, worker_config: WorkerConfig,
                 max_samples_per_sequence: int | None = None) -> LoadedDatasetList:
    """Return Energon's factories of a split's sources, and how they are blended."""
    sources = sources_of(config, split)
    datasets = [
        LoadedDataset(
            dataset=RecordFiles(source, training=split == "train", worker_config=worker_config,
                                max_samples_per_sequence=max_samples_per_sequence, shuffle=config.shuffle),
            weight=source.weight, repetitions=source.repetitions)
        for source in sources]
    mode = DatasetBlendMode.DATASET_WEIGHT if sources[0].weight is not None else DatasetBlendMode.SAMPLE_REPETITIONS
    return LoadedDatasetList(datasets=datasets, blend_mode=mode if len(sources) > 1 else DatasetBlendMode.NONE)


def check_files(config: Config, split: str) -> None:
    """Raise ValueError unless all files of a split can be opened, and read as the flags say."""
    flag = path_of(config, split)[0]
    for source in sources_of(config, split):
        has_blocks = {bool(open_named(flag, path).block_starts) for path in source.files}
        if len(has_blocks) > 1:
            raise ValueError(f"{flag} {source.path}: has parts in Parquet and in another format")
        if True in has_blocks and config.max_samples_per_sequence != Config.max_samples_per_sequence:
            raise ValueError(f"--max-samples-per-sequence {config.max_samples_per_sequence}: {source.path} is in "
                             "Parquet, which is read by row groups; leave the flag out")


def open_named(flag: str, path: Path) -> RecordFile:
    """Open a file of records. Raises ValueError, with the flag, if that is not possible."""
    try:
        return open_file(path)
    except ValueError as error:
        raise ValueError(f"{flag} {error}") from error


def check_first_records(config: Config, split: str, encode: Callable[[ParsedSample], object], *,
                        takes_images: bool) -> None:
    """Read the first records of each source, with their images.

    Args:
        config: the data set's flags.
        split: `train` or `valid`.
        encode: tokenises a record. Raises ValueError if it cannot be used.
        takes_images: whether the run has an encoder.

    Raises:
        ValueError: none of the records can be used, or one has an image but the run has no encoder. The message names
            file and line.
    """
    flag = path_of(config, split)[0]
    for source in sources_of(config, split):
        file = open_named(flag, source.files[0])
        reader = RecordReader(source, None)
        images = images_of(source.images, source.cache)
        check_named_columns(flag, source, reader)
        errors: list[tuple[str, ValueError | OSError]] = []
        missing: list[tuple[str, ValueError | OSError]] = []
        first = range(min(FIRST_RECORDS, len(file)))
        for number in first:
            place = f"{flag} {file.path} {file.name(number)}"
            try:
                conversation = conversation_of_record(file.parse(reader[number]["raw"]), images, source.columns)
                is_text = not conversation.images and not conversation.videos
                if takes_images or is_text:
                    encode(ParsedSample(__key__=place, __restore_key__=(), __subflavors__=None, __sources__=(),
                                        conversation=conversation))
            except (ValueError, OSError) as error:
                errors.append((place, error))
                if isinstance(error, MissingImageError):
                    missing.append(errors[-1])
                continue
            if not is_text and not takes_images:
                shown = "an image" if conversation.images else "a video"
                raise ValueError(f"{place}: has {shown}, and the run has no encoder for it, because of --llm-only or "
                                 "a model for text; use a data set of text")
            if not is_text:  # a record of text does not show that images are there
                missing.clear()
                break
        if len(missing) >= MISSING_IMAGES:
            raise ValueError(f"{_with_hint(*missing[0], images)} (and none of the first {len(first)} records has its "
                             "images)")
        if len(errors) == len(first):
            others = f" (and none of the first {len(first)} records can be used)" if len(first) > 1 else ""
            raise ValueError(_with_hint(*errors[0], images) + others)


def check_named_columns(flag: str, source: Source, reader: RecordReader) -> None:
    """Refuse columns that none of the first records has, because a typo could silently leave out all images."""
    absent = dict(source.columns)
    number = 0
    while absent and number < min(COLUMN_RECORDS, len(reader)):
        file, _ = reader.place(number)
        try:
            record = file.parse(reader[number]["raw"])
        except ValueError:
            record = None  # a bad record, which is named when it is read
        absent = {key: column for key, column in absent.items()
                  if not isinstance(record, Mapping) or record.get(column) is None}
        number += 1
    for key, column in absent.items():
        raise ValueError(f"{flag} {source.path}: --data-columns {key}={column}: none of the first {number} records has "
                         f"the column {column}")


def _with_hint(place: str, error: ValueError | OSError, images: FolderImages) -> str:
    """Return the message of an error, with the folder that has the image if one is missing."""
    return f"{place}: {error}{images.hint(error.place) if isinstance(error, MissingImageError) else ''}"


def digest(config: Config) -> str:
    """Return a digest of the training files' names, sizes and shares. The files may be too large to be read."""
    parts = [[[file.name, file.stat().st_size] for file in source.files] + [[source.weight, source.repetitions]]
             + ([dict(source.columns)] if source.columns else []) for source in sources_of(config, "train")]
    return f"files {hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}"
