"""A data set of one's own: lines of {"image": "a.npy", "question": "...", "answer": "..."}, bytes as tokens."""

import json
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from data.indexed import IndexedStream
from mimo.protocols import LANGUAGE, Sample

END, FIRST_BYTE = 1, 2  # 0 pads


@dataclass(frozen=True)
class Config:
    """Data set: questions about images."""

    qa_folder: str = "qa"
    """Folder of train.jsonl, valid.jsonl and the images: float32 [channels, height, width], saved by numpy."""


@cache
def lines(folder, split):
    return [json.loads(line) for line in (Path(folder) / f"{split}.jsonl").read_text().splitlines()]


def build(config, tokens, lane, index):  # a function of (seed, index): every layout sees the same global batch
    records = lines(config.qa_folder, lane.split)
    epoch, place = divmod(index, len(records))
    if lane.split == "train":
        place = int(np.random.default_rng([lane.seed, epoch]).permutation(len(records))[place])
    record = records[place]
    question, answer = ([FIRST_BYTE + byte for byte in record[name].encode()] for name in ("question", "answer"))
    words = [tokens.image_token_id, *question, *answer, END]  # one placeholder an image
    targets = np.arange(len(words)) > len(question)  # the loss is on the answer
    sample = Sample(f"{lane.split}/{place}", np.array(words), targets, image_sizes=[tokens.image_shape])
    if lane.module != LANGUAGE:  # language ranks read no pixels
        sample.images = [np.load(Path(config.qa_folder) / record["image"])]
    return sample


class OwnData:
    Config = Config

    def stream(self, config, tokens, lane):
        return IndexedStream(lane, partial(build, config, tokens, lane))

    def num_samples(self, config, split):  # None: without end
        return len(lines(config.qa_folder, split)) if split == "valid" else None

    def decode(self, config, tokens):
        return bytes(token - FIRST_BYTE for token in tokens if 0 <= token - FIRST_BYTE < 256).decode(errors="replace")


provider = OwnData()

if __name__ == "__main__":  # python own_data.py writes eight records of each split
    Path("qa").mkdir()
    for split in ("train", "valid"):
        records = []
        for n, answer in enumerate(["no", "yes"] * 4):
            records.append({"image": f"{split}{n}.npy", "question": "bright?", "answer": answer})
            np.save(f"qa/{split}{n}.npy", np.full((3, 32, 32), n % 2, np.float32))
        Path(f"qa/{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
