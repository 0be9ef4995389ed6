"""Small prepared WebDatasets of text, and a task encoder that makes rows of them without a tokenizer or images."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.energon import (
    Cooker,
    Sample,
    TaskEncoder,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from megatron.energon.flavors.webdataset import BaseWebdatasetFactory

from data.energon.provider import Config
from data.energon.reader import Encoding, EnergonReader
from data.energon.task_encoder import ErrorLog, VlmTaskEncoder
from data.energon.validation import ValidReader
from mimo.protocols import DataRequest, TokenSpec
from mimo.protocols import Sample as TrainerSample

CRUDE = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
BAD_TEXT = "bad"


def write_tar(path: Path, parts: Sequence[tuple[str, bytes]]) -> None:
    """A tar of files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in parts:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def prepare(folder: Path, patterns: Sequence[tuple[str, str]], dataset_yaml: str = CRUDE) -> Path:
    """Index the tars of a folder and divide them over splits, like `energon prepare` without questions."""
    tars = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.tar"))
    BaseWebdatasetFactory.prepare_dataset(
        folder, tars, split_parts_patterns=list(patterns), shuffle_seed=None, workers=1
    )
    (folder / ".nv-meta" / "dataset.yaml").write_text(dataset_yaml)
    return folder


def text_shards(folder: Path, train: Sequence[int], valid: Sequence[int] = (3,), bad: Sequence[str] = ()) -> Path:
    """Shards of so many samples each, with keys such as t01_003 (train) and v00_000 (validation).

    The samples with the keys in `bad` are ones that the task encoder of this module refuses.
    """
    for split, sizes in (("train", train), ("val", valid)):
        for shard, size in enumerate(sizes):
            keys = [f"{split[0]}{shard:02d}_{number:03d}" for number in range(size)]
            parts = [(f"{key}.json", json.dumps({"text": BAD_TEXT if key in bad else key}).encode()) for key in keys]
            write_tar(folder / split / f"{shard:02d}.tar", parts)
    return prepare(folder, [("train", "train/.*"), ("val", "val/.*")])


@edataclass
class TextRow(Sample):
    tokens: torch.Tensor
    skipped: tuple[str, ...] = ()
    worker: int = -1


@edataclass
class Text(Sample):
    text: str


@stateless
def cook_text(sample: dict[str, Any]) -> Text:
    return Text(**basic_sample_keys(sample), text=json.loads(sample["json"])["text"])


class TextEncoder(TaskEncoder):
    """Key characters as tokens. A sample may ask for a delay: a hang that a test can wait for."""

    decoder = None
    cookers = (Cooker(cook_text),)

    def __init__(self, hang_at: str = "") -> None:
        self.pending: list[str] = []
        self.hang_at = hang_at
        self.encoded: list[str] = []

    def on_error(self, error: Exception, sample: Any, sources: Any) -> None:
        key = sample["__key__"] if isinstance(sample, dict) else sample.__key__
        self.pending.append(f"{sources[0].shard_name} {key}: {error}")

    @stateless
    def preencode_sample(self, sample: Text) -> Text:
        if sample.text == BAD_TEXT:
            raise ValueError("refused")
        if sample.__key__ == self.hang_at:
            time.sleep(10_000)
        return sample

    @stateless
    def postencode_sample(self, sample: Text) -> TextRow:
        self.encoded.append(sample.__key__)
        skipped, self.pending = tuple(self.pending), []
        active = WorkerConfig.active_worker_config
        worker = active.global_worker_id()
        return TextRow.derive_from(
            sample, tokens=torch.tensor(list(sample.text.encode())), skipped=skipped, worker=worker
        )


class PackingEncoder(TextEncoder):
    """Packs of two samples, chosen by their place in the buffer; a last one alone."""

    def select_samples_to_pack(self, samples: list[Text]) -> list[list[Text]]:
        return [samples[start : start + 2] for start in range(0, len(samples), 2)]

    @stateless
    def pack_selected_samples(self, rows: list[TextRow]) -> TextRow:
        joined = torch.cat([row.tokens for row in rows])
        return TextRow(__key__=" ".join(row.__key__ for row in rows), __restore_key__=(), tokens=joined,
                       skipped=tuple(message for row in rows for message in row.skipped), worker=rows[0].worker)


def to_sample(row: TextRow) -> TrainerSample:
    tokens = row.tokens.numpy()
    return TrainerSample(row.__key__, tokens, tokens > 0, images=[], skipped=row.skipped)


def request(lanes: int, seed: int = 1, split: str = "train") -> DataRequest:
    return DataRequest(TokenSpec(256, -1, 0, 3), lambda height, width: 1, lanes, 1, 64, seed, split)


def open_reader(config: Config, lanes: Sequence[int], num_lanes: int, *, seed: int = 1, hang_at: str = "",
                states: dict[int, Any] | None = None) -> EnergonReader:
    """Return a started reader of the training split."""
    encoder = (PackingEncoder if config.packing_buffer_size else TextEncoder)(hang_at)
    reader = EnergonReader(config, request(num_lanes, seed), lanes, Encoding(encoder, encoder.on_error, to_sample))
    if states is not None:
        reader.load_state_dict(states)
    reader.start()
    return reader


def open_valid(config: Config, lanes: Sequence[int], num_lanes: int) -> tuple[ValidReader, TextEncoder]:
    encoder = TextEncoder()
    encoding = Encoding(encoder, encoder.on_error, to_sample)
    return ValidReader(replace(config), request(num_lanes, split="valid"), lanes, encoding), encoder


def keys(reader: EnergonReader | ValidReader, lane: int, count: int) -> list[str]:
    return [reader.read(lane).key for _ in range(count)]


def open_loader(path: Path, config: Config, asks: DataRequest, *, train: bool = False, rank: int = 0, world: int = 1,
                workers: int = 0, split: str = "") -> Any:
    """Return the rows of a prepared data set: in training order, or one pass in the order in which samples lie."""
    errors = ErrorLog(config.max_bad_samples)
    worker = WorkerConfig(
        rank=rank, world_size=world, num_workers=workers, seed_offset=asks.seed, global_error_handler=errors.handler
    )
    common: dict[str, Any] = {"worker_config": worker, "batch_size": None,
                              "packing_buffer_size": config.packing_buffer_size or None,
                              "task_encoder": VlmTaskEncoder(config, asks, errors)}
    if split:
        common["split_part"] = split
    if train:
        common |= {"shuffle_buffer_size": config.shuffle_buffer_size or None, "max_samples_per_sequence": 4}
    dataset = (get_train_dataset if train else get_val_dataset)(path, **common)
    return get_savable_loader(dataset, watchdog_timeout_seconds=None, watchdog_initial_timeout_seconds=None)
