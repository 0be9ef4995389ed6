"""Write files of conversations as shards that Energon reads as the same samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from data.conversation_files.files import MissingImageError, images_of
from data.conversation_files.provider import Config
from data.conversation_files.sources import (
    SPLIT_NAMES,
    NoSplitError,
    RecordReader,
    Source,
    check_files,
    conversation_of_record,
    sources_of,
)
from data.conversations import Conversation, FrameList, is_video
from data.energon.shards import Member, prepare_shards, write_shard
from data.energon.task_encoder import open_image
from data.video import probe

# Keys of a turn that are read.
TURN_KEYS = ("role", "content", "tool_calls", "name", "tool_call_id")
EXTENSIONS = {"JPEG": "jpg", "TIFF": "tif"}


def convert(config: Config, out: Path, samples_per_shard: int) -> str:
    """Write all splits of a data set as shards, and describe what was written.

    A data set of one source becomes one folder of Energon. Several become a folder each, and `blend.yaml` mixes them.

    Args:
        config: the data set's flags.
        out: folder to write.
        samples_per_shard: most samples of a tar file.

    Raises:
        ValueError: the data cannot be read, or too many records cannot be used.
    """
    splits = _splits(config)
    total = sum(len(RecordReader(source, None)) for sources in splits.values() for source in sources)
    with tqdm(desc="records", total=total, disable=None, dynamic_ncols=True, leave=False) as bar:
        writer = _Writer(samples_per_shard, config.max_bad_samples, bar)
        if all(len(sources) == 1 for sources in splits.values()):
            writer.write(out, {split: sources[0] for split, sources in splits.items()})
            path = out
        else:
            path = out / "blend.yaml"
            blend = {split: _blend(sources, [writer.write(out / f"{split}-{number}", {split: source})
                                             for number, source in enumerate(sources)])
                     for split, sources in splits.items()}
            path.write_text(yaml.safe_dump({"__module__": "megatron.energon", "__class__": "MetadatasetV2",
                                            "splits": blend}, sort_keys=False))
    lines = [f"{writer.written} samples in {writer.shards} shards in {out}"]
    if writer.errors:
        lines += [f"{len(writer.errors)} records were left out:", *(f"  {error}" for error in writer.errors)]
    return "\n".join([*lines, "Train on them with", f"  --dataset-provider energon --data-path {path}"])


def _splits(config: Config) -> dict[str, list[Source]]:
    """Return the sources of each split that the data has, by Energon's name of the split."""
    check_files(config, "train")
    splits = {SPLIT_NAMES["train"]: sources_of(config, "train")}
    try:
        check_files(config, "valid")
    except NoSplitError:
        if config.valid_data_path:
            raise
        return splits
    return splits | {SPLIT_NAMES["valid"]: sources_of(config, "valid")}


def _blend(sources: list[Source], folders: list[Path]) -> dict[str, Any]:
    """Return the part of a metadataset that mixes folders as the sources were mixed."""
    if sources[0].weight is not None:
        return {"blend": [{"weight": source.weight, "path": f"./{folder.name}"}
                          for source, folder in zip(sources, folders, strict=True)]}
    return {"blend_epochized": [
        {"repetitions": 1 if source.repetitions is None else source.repetitions, "path": f"./{folder.name}"}
        for source, folder in zip(sources, folders, strict=True)]}


class _Writer:
    """Writes the records of sources.

    Attributes:
        written: number of samples.
        shards: number of tar files.
        errors: file, line and reason of records that were left out.
    """

    def __init__(self, samples_per_shard: int, max_bad_samples: int, bar: Any) -> None:
        self._samples_per_shard, self._max_bad_samples, self._bar = samples_per_shard, max_bad_samples, bar
        self.written = self.shards = 0
        self.errors: list[str] = []

    def write(self, folder: Path, sources: dict[str, Source]) -> Path:
        """Write a folder of shards, with a source for each split, and Energon's metadata. Returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        names = []
        for split, source in sources.items():
            samples = self._samples(split, source)
            for number in count():
                first = next(samples, None)
                if first is None:
                    break
                names.append(f"{split}-{number:06d}.tar")
                write_shard(folder / names[-1],
                            chain(first, chain.from_iterable(islice(samples, self._samples_per_shard - 1))))
            if not any(name.startswith(f"{split}-") for name in names):
                raise ValueError(f"{source.path}: none of its records can be used, the first one because: "
                                 f"{self.errors[0]}")
        self.shards += len(names)
        prepare_shards(folder, names, list(sources))
        return folder

    def _samples(self, split: str, source: Source) -> Iterator[list[Member]]:
        """Yield the parts of each sample, whose keys are unique in the folder."""
        reader, images = RecordReader(source, None), images_of(source.images, source.cache)
        for index in range(len(reader)):
            self._bar.update()
            record = reader[index]
            try:
                parts = _parts(conversation_of_record(record["parse"](record["raw"]), images, source.columns))
            except ValueError as error:
                self.errors.append(f"{record['__shard__']} {record['__key__']}: {error}")
                if len(self.errors) > self._max_bad_samples:
                    hint = images.hint(error.place) if isinstance(error, MissingImageError) else ""
                    raise ValueError(f"--max-bad-samples {self._max_bad_samples}: {len(self.errors)} records cannot be "
                                     f"used; the last: {'; '.join(self.errors[-3:])}{hint}") from error
                continue
            self.written += 1
            yield [(f"{split}-{index:09d}.{name}", content) for name, content in parts]


def _parts(conversation: Conversation) -> list[Member]:
    """Return the parts of a sample. Raises ValueError for data that is not an image or a video."""
    images = [_image_part(str(number), *image) for number, image in enumerate(conversation.images)]
    parts, videos = list(images), []
    for number, (name, video) in enumerate(conversation.videos):
        if isinstance(video, FrameList):
            frames = [_image_part(f"video{number}.{place}", *frame) for place, frame in enumerate(video.frames)]
            parts += frames
            videos.append({"frames": [part for part, _ in frames], "fps": video.rate})
            continue
        probe(name, video)
        part = f"video{number}.{name.rpartition('.')[2].lower() if is_video(name) else 'mp4'}"
        parts.append((part, video.read_bytes() if isinstance(video, Path) else video))
        videos.append(part)
    content: dict[str, Any] = {"images": [name for name, _ in images]} if parts else {}
    if videos:
        content["videos"] = videos
    if conversation.messages is None:
        content["text"] = conversation.document
    else:
        content["messages"] = [{key: turn[key] for key in TURN_KEYS if turn.get(key) is not None}
                               if isinstance(turn, dict) else turn for turn in conversation.messages]
        if conversation.tools is not None:
            content["tools"] = conversation.tools
    return [*parts, ("json", json.dumps(content).encode())]


def _image_part(name: str, origin: str, data: bytes) -> Member:
    """Return an image as a part of a sample. Raises ValueError, with its origin, if it is not an image."""
    kind = str(open_image(origin, data).format)
    return f"{name}.{EXTENSIONS.get(kind, kind.lower())}", data
