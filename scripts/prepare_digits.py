"""Write the digits data set as shards that Megatron-Energon reads: images, text only, a blend of both, and a tokenizer.

    python scripts/prepare_digits.py OUT
    python scripts/prepare_digits.py OUT --samples 1000 --shards 4 --image-size 64

OUT/digits has train and val shards with images, and OUT/text shards of numbers in words. OUT/blend.yaml draws from
both. With --llava, OUT/llava has the samples of OUT/digits as LLaVA publishes its data, in train.json and val.json
with images beside them. With --model, OUT/model is a LLaVA of 0.4 million random weights as Hugging Face saves one, for
trials of what is done with a real one. OUT/tokenizer has the ids of `data/digits.py`. Sample i of OUT/digits is sample
i of the in-memory data set with the same seed, without augmentation. Keys name the scans: `train-000012-17-1033` shows
scans 17 and 1033. The same arguments write the same bytes.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from PIL import Image
from tokenizers.pre_tokenizers import WhitespaceSplit

from data import digits
from data.energon.shards import Member
from data.prompts import IMAGE_MARKER
from mimo.protocols import LANGUAGE, Lane, TokenSpec
from scripts.shards import write_splits, write_word_tokenizer

# A scan has 17 grey levels, 0 to 16. In steps of 15 they fit into a byte.
GREY_STEP = 15
# The same share of text as in the in-memory data set.
TEXT_SHARE = digits.Config.digits_text_only_fraction
# LLaVA's names of roles.
LLAVA_NAMES = {"user": "human", "assistant": "gpt"}
# Names of modules in transformers, and in published folders of LLaVA, which vLLM reads.
PUBLISHED_NAMES = {
    "model.vision_tower.": "vision_tower.vision_model.", "model.language_model.": "language_model.model.",
    "model.multi_modal_projector.": "multi_modal_projector.", "lm_head.": "language_model.lm_head."}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="folder to write; it must be empty or new")
    parser.add_argument("--samples", type=int, default=4000, help="train samples with images")
    parser.add_argument("--shards", type=int, default=8, help="train shards")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of scans, as in the in-memory set")
    parser.add_argument("--image-size", type=int, default=32, help="pixels on a side of an image; a multiple of 8")
    parser.add_argument("--digits-max", type=int, default=4, help="most digits of a number")
    parser.add_argument("--strip", action="store_true", help="all digits of a number in one image")
    parser.add_argument("--any-size", action="store_true",
                        help="for encoders of images of any size: a strip is as wide as its digits need")
    parser.add_argument("--words-fraction", type=float, default=0.0,
                        help="fraction of train answers in words instead of digits")
    parser.add_argument("--llava", action="store_true",
                        help="also write train.json, val.json and images, as LLaVA publishes its data")
    parser.add_argument("--model", action="store_true",
                        help="also write a small LLaVA with random weights, as Hugging Face saves one")
    chosen = parser.parse_args(arguments)
    if chosen.seed < 0 or not 1 <= chosen.shards <= chosen.samples:
        parser.error(f"--samples {chosen.samples} --shards {chosen.shards} --seed {chosen.seed}: need 1 <= shards <= "
                     "samples and seed >= 0")
    if chosen.out.exists() and any(chosen.out.iterdir()):
        parser.error(f"{chosen.out}: is not empty; name a new folder")
    return chosen


def settings(chosen: argparse.Namespace, text_only: bool = False) -> tuple[digits.Config, TokenSpec]:
    """Return the in-memory data set to write, and the tokens of a model for it. Raises ValueError for bad sizes."""
    config = digits.Config(
        digits_max=chosen.digits_max,
        digits_strip=chosen.strip,
        digits_text_only_fraction=float(text_only),
        digits_augment=False,
        digits_words_fraction=chosen.words_fraction,
        digits_image_size=chosen.image_size,
    )
    tokens = TokenSpec(
        vocab_size=digits.NUM_WORDS,
        image_token_id=digits.FIRST_DIGIT - 1,
        image_size=0 if chosen.any_size else chosen.image_size,
        num_channels=1,
    )
    digits.check(config, tokens, "train")
    return config, tokens


def png(image: np.ndarray) -> bytes:
    """Encode an image of `data.digits.draw`, `[1, height, width]`, as a PNG with grey levels from 0 to 240."""
    levels = np.rint((image[0] * digits.PIXEL_STD + digits.PIXEL_MEAN) * 16).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(levels * GREY_STEP).save(buffer, format="PNG")
    return buffer.getvalue()


def members(chosen: argparse.Namespace, split: str, index: int, *, text_only: bool = False) -> Iterator[Member]:
    """Yield name and content of each part of a sample."""
    config, tokens = settings(chosen, text_only)
    rng = np.random.default_rng([chosen.seed, index])
    scans, _ = digits.choose_scans(config, "valid" if split == "val" else "train", index, rng)
    pixels, labels = digits.load_scans()
    number = [int(labels[scan]) for scan in scans]
    shapes = [] if text_only else [pixels[scan] for scan in scans]
    groups = [shapes] if chosen.strip and shapes else [[shape] for shape in shapes]
    shown = " ".join(digits.NAMES[digit] for digit in number) if text_only else IMAGE_MARKER * len(groups)
    messages = [
        {"role": "user", "content": f"{shown} {' '.join(digits.PROMPT)}"},
        {"role": "assistant", "content": answer(config, chosen.seed, split, index, number)},
    ]
    key = "-".join([split, f"{index:06d}", *map(str, scans)])
    size = digits.image_size(config, tokens)
    cells = config.digits_max if chosen.strip else 1
    for position, group in enumerate(groups):
        yield f"{key}.{position}.png", png(digits.draw(group, cells, size, 1))
    yield f"{key}.json", json.dumps({"messages": messages}).encode()


def answer(config: digits.Config, seed: int, split: str, index: int, number: list[int]) -> str:
    """Return the answer of a sample, in digits or in words."""
    lane = Lane(LANGUAGE, 0, 1, seed, "valid" if split == "val" else "train")
    names = {identifier: word for word, identifier in digits.WORDS.items()}
    numerals = {digits.FIRST_DIGIT + digit: str(digit) for digit in range(10)}
    return " ".join((numerals | names)[token] for token in digits.answer_words(config, lane, index, number))


def write_llava(folder: Path, chosen: argparse.Namespace, splits: dict[str, range]) -> None:
    """Write the samples of the splits with images as LLaVA publishes its data."""
    (folder / "images").mkdir(parents=True)
    for split, indices in splits.items():
        records = []
        for index in indices:
            *images, (name, content) = members(chosen, split, index)
            for image, data in images:
                (folder / "images" / image).write_bytes(data)
            records.append({
                "id": name.removesuffix(".json"), "image": [f"images/{image}" for image, _ in images],
                "conversations": [{"from": LLAVA_NAMES[turn["role"]], "value": turn["content"]}
                                  for turn in json.loads(content)["messages"]]})
        (folder / f"{split}.json").write_text(json.dumps(records, indent=1))


def write_tokenizer(folder: Path) -> None:
    special = {"<pad>": digits.PAD, "<bos>": digits.BOS, "<eos>": digits.EOS, IMAGE_MARKER: digits.FIRST_DIGIT - 1}
    numerals = {str(digit): digits.FIRST_DIGIT + digit for digit in range(10)}
    write_word_tokenizer(folder, special | numerals | digits.WORDS, WhitespaceSplit())


def write_model(folder: Path, tokenizer: Path, image_size: int) -> None:
    """Write a LLaVA with random weights, the tokenizer, and the image processor that CLIP has."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from providers.llava import provider

    config = provider.Config(
        vision_image_size=image_size, vision_patch_size=image_size // 2, vision_hidden_size=64, vision_num_layers=2,
        vision_num_unused_layers=0, vision_num_attention_heads=4, vision_ffn_hidden_size=192, num_layers=2,
        # Heads of 32: the smallest that vLLM's attention takes on a CPU. Rotations differ within 32 positions.
        hidden_size=128, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=256, rotary_base=100,
        max_position_embeddings=256, vocab_size=32, make_vocab_size_divisible_by=32,
        image_token_id=digits.FIRST_DIGIT - 1)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(
        transformers.LlavaConfig.from_dict(provider.hf_config(config)))
    scale = 16 * GREY_STEP / 255
    images = transformers.CLIPImageProcessor(
        size={"shortest_edge": image_size}, crop_size={"height": image_size, "width": image_size},
        image_mean=[digits.PIXEL_MEAN * scale] * 3, image_std=[digits.PIXEL_STD * scale] * 3)
    transformers.LlavaProcessor(
        images, transformers.AutoTokenizer.from_pretrained(tokenizer), patch_size=image_size // 2,
        vision_feature_select_strategy="default", num_additional_image_tokens=1).save_pretrained(folder)
    model.config.save_pretrained(folder)
    weights = {}
    for name, tensor in model.state_dict().items():
        module = next(module for module in PUBLISHED_NAMES if name.startswith(module))
        weights[PUBLISHED_NAMES[module] + name.removeprefix(module)] = tensor.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main(arguments: list[str] | None = None) -> None:
    chosen = parse_arguments(arguments)
    try:
        config, _ = settings(chosen)
    except ValueError as error:
        message = re.sub("--(vision|digits)-(image-size|strip|words-fraction)", r"--\2", str(error))
        raise SystemExit(f"prepare_digits.py: {message}") from error
    out = chosen.out
    out.mkdir(parents=True, exist_ok=True)
    num_text = max(round(chosen.samples * TEXT_SHARE / (1 - TEXT_SHARE)), 1)
    num_val = len(digits.valid_numbers(config))
    images, texts = range(chosen.samples), range(chosen.samples, chosen.samples + num_text)
    print(f"writing {chosen.samples} samples with images to {out / 'digits'}", flush=True)
    write_splits(out / "digits", {"train": images, "val": range(num_val)}, chosen.shards, partial(members, chosen))
    print(f"writing {num_text} samples of text to {out / 'text'}", flush=True)
    write_splits(out / "text", {"train": texts, "val": range(num_val)}, chosen.shards,
                 partial(members, chosen, text_only=True))
    if chosen.llava:
        print(f"writing the samples with images to {out / 'llava'}, too", flush=True)
        write_llava(out / "llava", chosen, {"train": images, "val": range(num_val)})
    write_tokenizer(out / "tokenizer")
    if chosen.model:
        print(f"making the model {out / 'model'}", flush=True)
        write_model(out / "model", out / "tokenizer", chosen.image_size)
    (out / "blend.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n"
        f"  train:\n    blend:\n      - weight: {1 - TEXT_SHARE}\n        path: ./digits\n"
        f"      - weight: {TEXT_SHARE}\n        path: ./text\n"
        "  val:\n    path: ./digits\n"
    )
    # The in-memory set counts grey levels up to 16. Here, the lightest one is 240 of 255.
    scale = 16 * GREY_STEP / 255
    print(f"{chosen.samples} train and {num_val} val samples with images, {num_text} train samples of text in {out}")
    print("Flags that train on them:")
    print(f"    --dataset-provider energon --data-path {out / 'blend.yaml'} --tokenizer {out / 'tokenizer'} \\")
    if chosen.llava:
        print(f"or  --dataset-provider conversations --data-path {out / 'llava'} --tokenizer {out / 'tokenizer'} \\")
    print(f"  --image-mean {digits.PIXEL_MEAN * scale!r} --image-std {digits.PIXEL_STD * scale!r}"
          + (" \\\n  --image-tiling dynamic" if chosen.any_size else ""))


if __name__ == "__main__":
    main()
