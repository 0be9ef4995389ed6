"""Write crops of photographs with captions as shards that Megatron-Energon reads, with a tokenizer.

    python scripts/prepare_photos.py --out OUT
    python scripts/prepare_photos.py --out OUT --num-samples 400 --num-shards 4 --max-patches 576
    python scripts/prepare_photos.py --out OUT --slip-fraction 0.5

The photographs are those inside the packages scikit-image and scikit-learn; nothing is downloaded. A caption names the
photograph and where in it the crop lies: "astronaut, upper left". With --slip-fraction, training captions may name any
part, so that the loss has a lower bound and runs can be compared by it. Height and width of a crop are multiples of 32,
so that 16-pixel patches in groups of 2 x 2 need no resizing, and it has from 256 patches to --max-patches of them.

OUT/photos has train and val shards. No crop occurs twice. OUT/tokenizer has the words of the captions. Keys name the
crops: `train-000012-astronaut-32-64-256-320` shows rows 32 to 287 and columns 64 to 383. The same arguments write the
same bytes.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from PIL import Image
from tokenizers.pre_tokenizers import Whitespace

from data.energon.shards import Member
from data.prompts import IMAGE_MARKER
from scripts.shards import write_splits, write_word_tokenizer

# Package and file of each photograph. Other images of scikit-image are downloaded, or are not colour photographs.
PHOTOGRAPHS = {
    "astronaut": ("skimage.data", "astronaut.png"),
    "cat": ("skimage.data", "chelsea.png"),
    "coffee": ("skimage.data", "coffee.png"),
    "flower": ("sklearn.datasets.images", "flower.jpg"),
    "galaxies": ("skimage.data", "hubble_deep_field.jpg"),
    "motorcycle": ("skimage.data", "motorcycle_left.png"),
    "rocket": ("skimage.data", "rocket.jpg"),
    "temple": ("sklearn.datasets.images", "china.jpg"),
}
PATCH_SIZE, SIZE_MULTIPLE, MIN_PATCHES = 16, 32, 256
LARGEST_ASPECT = 2
QUESTION = "what is shown?"
PARTS = ("center", *(" ".join(filter(None, (row, column)))
                    for row in ("", "upper", "lower") for column in ("", "left", "right") if row or column))
# A crop is in the middle if its centre is this close to that of the photograph, as a share of its side.
MIDDLE = 0.05
IMAGE_TOKEN_ID = 3


@dataclass(frozen=True)
class Crop:
    """A rectangle of a photograph, in pixels."""

    photograph: str
    top: int
    left: int
    height: int
    width: int

    @property
    def num_patches(self) -> int:
        return self.height * self.width // PATCH_SIZE**2


@cache
def load_photograph(name: str) -> np.ndarray:
    """Load the pixels of a photograph, uint8 `[height, width, 3]`."""
    package, file = PHOTOGRAPHS[name]
    with (files(package) / file).open("rb") as stream:
        return np.asarray(Image.open(stream).convert("RGB"))


@cache
def crop_sizes(height: int, width: int, max_patches: int) -> list[tuple[int, int]]:
    """Return every (height, width) in pixels of a crop of a photograph of this size."""
    cells = (SIZE_MULTIPLE // PATCH_SIZE) ** 2
    return [(SIZE_MULTIPLE * rows, SIZE_MULTIPLE * cols)
            for rows in range(1, height // SIZE_MULTIPLE + 1) for cols in range(1, width // SIZE_MULTIPLE + 1)
            if MIN_PATCHES <= rows * cols * cells <= max_patches
            and rows <= LARGEST_ASPECT * cols and cols <= LARGEST_ASPECT * rows]


def choose_crops(count: int, seed: int, max_patches: int) -> list[Crop]:
    """Choose different crops of all photographs in turn, of any allowed size, at any position."""
    rng = np.random.default_rng(seed)
    names, chosen = list(PHOTOGRAPHS), dict[Crop, None]()
    while len(chosen) < count:
        name = names[len(chosen) % len(names)]
        whole_height, whole_width, _ = load_photograph(name).shape
        sizes = crop_sizes(whole_height, whole_width, max_patches)
        height, width = sizes[int(rng.integers(len(sizes)))]
        top, left = (int(rng.integers(room + 1)) for room in (whole_height - height, whole_width - width))
        chosen[Crop(name, top, left, height, width)] = None
    return list(chosen)


def _place(start: int, length: int, whole: int, words: tuple[str, str]) -> str:
    """Return the first or second word, or none for the middle, by the position of a crop's centre on one axis."""
    offset = (start + length / 2) / whole - 0.5
    return "" if abs(offset) <= MIDDLE else words[offset > 0]


def caption(crop: Crop) -> str:
    """Describe a crop: which photograph, and which part of it."""
    height, width, _ = load_photograph(crop.photograph).shape
    places = (_place(crop.top, crop.height, height, ("upper", "lower")),
              _place(crop.left, crop.width, width, ("left", "right")))
    return f"{crop.photograph}, {' '.join(filter(None, places)) or 'center'}"


def captions(crops: list[Crop], slip_fraction: float, seed: int) -> list[str]:
    """Describe crops, of which a random share of `slip_fraction` are said to show any part."""
    rng = np.random.default_rng((seed, 1))
    return [f"{crop.photograph}, {PARTS[rng.integers(len(PARTS))]}" if rng.random() < slip_fraction else caption(crop)
            for crop in crops]


def members(split: str, index: int, crop: Crop, answer: str) -> Iterator[Member]:
    """Yield name and content of each part of a sample."""
    key = f"{split}-{index:06d}-{crop.photograph}-{crop.top}-{crop.left}-{crop.height}-{crop.width}"
    pixels = load_photograph(crop.photograph)[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=1)
    messages = [{"role": "user", "content": f"{IMAGE_MARKER} {QUESTION}"},
                {"role": "assistant", "content": answer}]
    yield f"{key}.0.png", buffer.getvalue()
    yield f"{key}.json", json.dumps({"messages": messages}).encode()


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer for the words and signs of captions and question."""
    text = " ".join([QUESTION, ",", *PHOTOGRAPHS, "upper lower left right center"])
    words = dict.fromkeys(word for word, _ in Whitespace().pre_tokenize_str(text))
    special = {"<pad>": 0, "<bos>": 1, "<eos>": 2, IMAGE_MARKER: IMAGE_TOKEN_ID}
    write_word_tokenizer(folder, special | {word: len(special) + index for index, word in enumerate(words)},
                         Whitespace())


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; it must be empty or new")
    parser.add_argument("--num-samples", type=int, default=800, help="train samples")
    parser.add_argument("--num-valid", type=int, default=64, help="held-out samples: other crops of the photographs")
    parser.add_argument("--num-shards", type=int, default=8, help="train shards")
    parser.add_argument("--max-patches", type=int, default=1024, help="most patches of a crop; at least 256")
    parser.add_argument("--slip-fraction", type=float, default=0.0,
                        help="share of train captions that name any part of the photograph")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of crops and slips")
    chosen = parser.parse_args(arguments)
    if not 1 <= chosen.num_shards <= chosen.num_samples or chosen.num_valid < 1 or chosen.seed < 0:
        parser.error(f"--num-samples {chosen.num_samples} --num-valid {chosen.num_valid} --num-shards "
                     f"{chosen.num_shards} --seed {chosen.seed}: need 1 <= shards <= samples, 1 <= valid and seed >= 0")
    if chosen.max_patches < MIN_PATCHES:
        parser.error(f"--max-patches {chosen.max_patches}: must be at least {MIN_PATCHES}")
    if not 0 <= chosen.slip_fraction <= 1:
        parser.error(f"--slip-fraction {chosen.slip_fraction}: must be between 0 and 1")
    if chosen.out.exists() and any(chosen.out.iterdir()):
        parser.error(f"{chosen.out}: is not empty; name a new folder")
    return chosen


def main(arguments: list[str] | None = None) -> None:
    chosen = parse_arguments(arguments)
    out = chosen.out
    crops = choose_crops(chosen.num_samples + chosen.num_valid, chosen.seed, chosen.max_patches)
    by_split = {"train": crops[: chosen.num_samples], "val": crops[chosen.num_samples :]}
    answers = {"train": captions(by_split["train"], chosen.slip_fraction, chosen.seed),
               "val": captions(by_split["val"], 0.0, chosen.seed)}
    write_splits(out / "photos", {split: range(len(own)) for split, own in by_split.items()}, chosen.num_shards,
                 lambda split, index: members(split, index, by_split[split][index], answers[split][index]))
    write_tokenizer(out / "tokenizer")
    patches = [crop.num_patches for crop in crops]
    print(f"{chosen.num_samples} train and {chosen.num_valid} val samples of {min(patches)} to {max(patches)} patches "
          f"(mean {np.mean(patches):.0f}) in {out}")
    print("Flags that train on them:")
    print(f"  --dataset-provider energon --data-path {out / 'photos'} --tokenizer {out / 'tokenizer'} \\")
    print(f"  --image-token-id {IMAGE_TOKEN_ID} --image-tiling dynamic --min-patches {MIN_PATCHES} "
          f"--max-patches {chosen.max_patches}")


if __name__ == "__main__":
    main()
