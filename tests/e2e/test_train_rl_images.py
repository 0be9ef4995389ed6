"""`train_rl.py` of vision-language models: separate grids, a live engine, images and videos in the prompts."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data import character_tokenizer
from tests.support.chat_templates import QWEN2_VL
from tests.support.launch import broken_off_and_whole, records, torchrun
from tests.support.small_tokenizer import write_tokenizer
from tests.support.videos import write_video

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = """--device cpu --no-bf16 --transformer-impl local --model-provider llava --vision-image-size 8
--vision-patch-size 4 --vision-hidden-size 64 --vision-num-layers 2 --vision-num-attention-heads 2
--vision-ffn-hidden-size 96 --num-layers 2 --hidden-size 64 --num-attention-heads 2 --num-query-groups 1
--ffn-hidden-size 96 --vocab-size 32 --make-vocab-size-divisible-by 32 --image-token-id 3 --rotary-base 100
--max-position-embeddings 64 --dataset-provider digits --reward tests.support.rl_rewards:digits --seq-length 32
--max-completion-tokens 5 --max-tokens-per-microbatch 96 --global-batch-size 32 --completions-per-prompt 8
--eval-prompts 8 --train-iters 3 --lr 1e-2 --lr-decay-style constant --watchdog-timeout-s 60""".split()
COMMON = [*FLAGS[:FLAGS.index("--model-provider")], *FLAGS[FLAGS.index("--num-layers"):]]
QWEN_TOWER = """--vision-patch-size 4 --vision-hidden-size 64 --vision-num-layers 2 --vision-num-attention-heads 2
--vision-ffn-hidden-size 96 --video-token-id 31 --vision-start-token-id 30 --vision-end-token-id 29"""
QWEN3 = [*COMMON, *f"""--model-provider qwen3_vl {QWEN_TOWER} --kv-channels 32 --mrope-section 6 5 5
--vision-num-position-embeddings 9 --vision-deepstack-layers 0 1""".split()]
TILES = """--model-provider llava_next --vision-image-size 8 --vision-patch-size 4 --vision-hidden-size 64
--vision-num-layers 2 --vision-num-attention-heads 2 --vision-ffn-hidden-size 96 --vision-image-grid-pinpoints 8x16 16x8
16x16 8x24 --dataset-provider conversations --prompt-format plain --reward tests.support.rl_rewards:length
--vocab-size 128 --image-token-id 120 --seq-length 96 --max-position-embeddings 96 --max-tokens-per-microbatch 384
--eval-prompts 4""".split()
# No layer of experts, for which the engine has no kernels on CPUs.
NEMOTRON = """--device cpu --no-bf16 --transformer-impl local --model-provider nemotron-moe-vlm-tiny
--hybrid-layer-pattern M*-* --kv-channels 32 --vision-patch-size 4 --vision-max-image-size 64
--vision-num-attention-heads 2 --vocab-size 32 --make-vocab-size-divisible-by 32 --image-token-id 3""".split()
NEMOTRON += FLAGS[FLAGS.index("--dataset-provider"):]
MODELS = {
    "qwen2.5-vl": [*COMMON, *f"""--model-provider qwen2_5_vl {QWEN_TOWER} --mrope-section 4 6 6 --vision-window-size 8
        --vision-full-attention-layers 1""".split()],
    "qwen3-vl": QWEN3,
    "qwen3-vl-moe": [*QWEN3, *"--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32".split()],
    "nemotron": NEMOTRON,
    "nemotron-without-norm": [*NEMOTRON, "--no-vision-final-layernorm"],
    "nemotron-fixed": [*NEMOTRON, *"--no-vision-dynamic-resolution --vision-image-size 16".split()],
}
# Numbers of one to four digits are as many images, or with a strip one; pictures have several sizes in one prompt.
PROMPTS = {"digits": "--digits-image-size 16", "strips": "--digits-image-size 8 --digits-strip",
           "pictures": "--dataset-provider tests.support.picture_prompts:provider"}
CASES = [
    ("qwen2.5-vl", "strips", "fan-out"), ("qwen2.5-vl", "pictures", "colocated"), ("qwen3-vl", "digits", "fan-out"),
    ("qwen3-vl", "pictures", "colocated"), ("qwen3-vl-moe", "pictures", "fan-out"), ("nemotron", "digits", "fan-out"),
    ("nemotron", "pictures", "colocated"), ("nemotron-without-norm", "strips", "colocated"),
    ("nemotron-fixed", "digits", "colocated")]
# ranks, flags
LAYOUTS = {
    "fan-out": (3, "--llm-dp 2"),
    "fan-in-siglip": (3, "--encoder-dp 2 --no-vision-class-token --no-vision-pre-layernorm --vision-patch-bias "
                         "--vision-hidden-act gelu_tanh"),
    "colocated": (1, "--layout colocated"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps_train_on_completions_of_prompts_with_images(tmp_path: Path, layout: str) -> None:
    num_processes, flags = LAYOUTS[layout]
    check_three_steps(tmp_path, num_processes, [*FLAGS, *flags.split()])


@pytest.mark.parametrize(("model", "prompts", "layout"), CASES)
def test_three_steps_of_models_with_images_of_any_size(tmp_path: Path, model: str, prompts: str, layout: str) -> None:
    num_processes, flags = LAYOUTS[layout]
    check_three_steps(tmp_path, num_processes, [*MODELS[model], *PROMPTS[prompts].split(), *flags.split()],
                      max_difference=1e-5)


@pytest.mark.parametrize("layout", ["fan-out", "colocated"])
def test_three_steps_of_a_model_that_joins_tiles(tmp_path: Path, layout: str) -> None:
    """The engine cuts whole images of any size itself."""
    num_processes, flags = LAYOUTS[layout]
    rng = np.random.default_rng(0)
    with (tmp_path / "train.jsonl").open("w") as file:
        for number, sizes in enumerate((((9, 23),), (), ((16, 8), (30, 30)), ((5, 40),))):
            names = [f"{number}-{place}.png" for place in range(len(sizes))]
            for name, size in zip(names, sizes, strict=True):
                Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(tmp_path / name)
            file.write(json.dumps({"image": names, "question": "what?", "answer": "a cat"}) + "\n")
    data = [f"--{name}={tmp_path / 'train.jsonl'}" for name in ("data-path", "valid-data-path")]
    tokenizer = character_tokenizer.write(tmp_path / "tokenizer")
    check_three_steps(tmp_path / "run", num_processes, [
        *COMMON, *TILES, *data, "--tokenizer", str(tokenizer), *flags.split()], max_difference=1e-5)


def test_prompts_that_cannot_be_used_are_skipped_by_all_ranks(tmp_path: Path) -> None:
    """One has no answer, one is too long, and one has half an image, which shows only when it is decoded."""
    rng = np.random.default_rng(0)
    with (tmp_path / "train.jsonl").open("w") as file:
        for number in range(8):
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(tmp_path / f"{number}.png")
            record = {"image": f"{number}.png", "question": "what? " * (40 if number == 2 else 1), "answer": "a cat"}
            file.write(json.dumps(record if number != 5 else record | {"answer": " "}) + "\n")
    whole = (tmp_path / "6.png").read_bytes()
    (tmp_path / "6.png").write_bytes(whole[:len(whole) // 2])
    data = [f"--{name}={tmp_path / 'train.jsonl'}" for name in ("data-path", "valid-data-path")]
    tokenizer = character_tokenizer.write(tmp_path / "tokenizer")
    num_processes, layout = LAYOUTS["fan-out"]
    flags = [*COMMON, *TILES, *data, "--tokenizer", str(tokenizer), *layout.split(), "--skip-long-prompts"]
    check_three_steps(tmp_path / "run", num_processes, flags)
    assert [record["bad-samples"] for record in records(tmp_path / "run") if "gen-kl" in record][-1] == 2


SPECIAL = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>",
           "vision_end_token": "<|vision_end|>"}
# Frames of 8 or 16 pixels a side. The last frame of an odd number is repeated.
VIDEOS = """--dataset-provider conversations --reward tests.support.rl_rewards:length --vocab-size 400 --seq-length 192
--max-position-embeddings 192 --max-tokens-per-microbatch 640 --video-fps 2 --video-min-frames 2 --video-max-frames 7
--video-min-pixels 64 --min-patches 4 --max-patches 32 --eval-prompts 4""".split()
# Pixels of a frame, and of all frames.
VIDEO_LIMITS = {"qwen2.5-vl": "320", "qwen3-vl": "1600", "qwen3-vl-moe": "1600"}


def write_video_records(folder: Path) -> list[str]:
    """Write prompts with a video, with several and an image, with images alone and of text; return flags for them."""
    special = ["<|im_start|>", "<|im_end|>", *SPECIAL.values()]
    write_tokenizer(folder, special=special, chat_template=QWEN2_VL, bos=False)
    rng = np.random.default_rng(0)
    for number, (frames, rate) in enumerate(((31, 10), (25, Fraction(25, 2)), (60, Fraction(30000, 1001)))):
        (folder / f"{number}.mp4").write_bytes(write_video(frames, 40, 24 + 16 * number, rate, seed=number))
        Image.fromarray(rng.integers(0, 256, (16, 24, 3), np.uint8)).save(folder / f"{number}.png")
    shown = [("<video>what?", {"videos": ["0.mp4"]}), ("a word", {}),
             ("is it <image> or <video>, <video>", {"images": ["0.png"], "videos": ["1.mp4", "2.mp4"]}),
             ("<video><image>a cat?", {"images": ["1.png"], "videos": [[f"{number}.png" for number in range(3)]],
                                       "fps": 3})]
    with (folder / "train.jsonl").open("w") as file:
        for text, media in shown:
            file.write(json.dumps({"messages": [{"role": "user", "content": text},
                                                {"role": "assistant", "content": "a red cat"}], **media}) + "\n")
    return ["--tokenizer", str(folder), "--data-path", str(folder / "train.jsonl"), "--valid-data-path",
            str(folder / "train.jsonl"), *(f"--{name.replace('_', '-')}-id={3 + special.index(token)}"
                                           for name, token in SPECIAL.items())]


@pytest.mark.parametrize(("model", "layout"), [
    ("qwen2.5-vl", "colocated"), ("qwen2.5-vl", "fan-out"), ("qwen3-vl", "fan-out"), ("qwen3-vl-moe", "colocated")])
def test_three_steps_train_on_completions_of_prompts_with_videos(tmp_path: Path, model: str, layout: str) -> None:
    num_processes, flags = LAYOUTS[layout]
    check_three_steps(tmp_path / "run", num_processes, [
        *MODELS[model], *VIDEOS, "--video-max-pixels", VIDEO_LIMITS[model], *write_video_records(tmp_path),
        *flags.split()], max_difference=1e-5)


def check_three_steps(tmp_path: Path, num_processes: int, flags: list[str], max_difference: float = 1e-4) -> None:
    done = torchrun(num_processes, *flags, "--refit-verify-interval", "1", "--run-dir", str(tmp_path),
                    script="train_rl.py")
    assert done.returncode == 0, done.stdout[-3000:]
    steps = [record for record in records(tmp_path) if "gen-kl" in record]
    assert [step["iteration"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["success"] and math.isfinite(step["loss"]) and step["grad-norm"] > 0
        # Around 1e-14. Pixels of another deviation, by a fiftieth, make it 3e-9 in a model that has learned nothing.
        assert 0 <= step["gen-kl"] < 1e-10 and step["max-abs-dlogp"] < max_difference
    assert done.stdout.strip().splitlines()[-1].startswith("reward: ")


def test_prompts_without_images_train_a_model_with_an_encoder(tmp_path: Path) -> None:
    done = torchrun(2, *FLAGS, "--dataset-provider", "arithmetic", "--vocab-size", "104", "--image-token-id", "103",
                    "--run-dir", str(tmp_path), script="train_rl.py")
    assert done.returncode == 0, done.stdout[-3000:]
    steps = [record for record in records(tmp_path) if "gen-kl" in record]
    assert len(steps) == 3 and all(step["success"] and 0 <= step["gen-kl"] < 1e-5 for step in steps)


@pytest.mark.timeout(600)
def test_a_resumed_run_with_images_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    flags = [*MODELS["qwen3-vl"], *PROMPTS["pictures"].split(), "--train-iters", "4", "--eval-prompts", "0"]
    found, expected = broken_off_and_whole(tmp_path, *flags)
    for mine, other in zip(found, expected, strict=True):
        assert mine["reward"] == other["reward"] and mine["completion-length"] == other["completion-length"]
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert mine["grad-norm"] == pytest.approx(other["grad-norm"], rel=1e-5)
