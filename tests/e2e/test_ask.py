"""`mimo ask`: mistakes are one message; both engines answer what transformers' own model answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mimo.commands.main import main
from mimo.registry import model_provider
from tests.support.hf_families import save_published
from tests.support.launch import ROOT

MAX_TOKENS = 6


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits as LLaVA publishes its data, and a small random LLaVA."""
    folder = tmp_path_factory.mktemp("scans") / "digits"
    subprocess.run([sys.executable, "scripts/prepare_digits.py", str(folder), "--samples", "8", "--image-size", "8",
                    "--llava", "--model"], cwd=ROOT, check=True, capture_output=True)
    return folder


def mimo(*words: object) -> str:
    done = subprocess.run([sys.executable, "-m", "mimo", *map(str, words)], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_mistakes_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "cat.png").write_bytes(b"")
    for words, expected in (([tmp_path / "gone", "why?"], "no checkpoint: there is no such folder"),
                            ([tmp_path], "the question is missing"),
                            ([tmp_path, tmp_path / "cat.png"], "is a file; the question comes last"),
                            ([tmp_path, "dog.png", "why?"], "there is no image dog.png"),
                            ([tmp_path, "why?", "--max-tokens", "0"], "--max-tokens 0: must be at least 1"),
                            ([tmp_path, "why?", "--ckpt-step", "3"], "is a Hugging Face folder, which has no")):
        assert main(["ask", *map(str, words)]) == 2
        assert expected in capsys.readouterr().err
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    for flags, expected in (("[checkpoint]\nsave = \"runs/sft\"\n", "its checkpoints are in runs/sft (--save)"),
                            ("[checkpoint]\n", "it saved none; --save FOLDER saves them")):
        (run / "run_config.toml").write_text(flags)
        for words in (["ask", str(run), "why?"], ["inspect", str(run)], ["export", str(run), "out"]):
            assert main(words) == 2
            assert expected in capsys.readouterr().err
    (run / "metrics.jsonl").unlink()
    assert main(["inspect", str(run)]) == 2
    assert "it has neither latest_checkpointed_iteration.txt" in capsys.readouterr().err, "an incomplete checkpoint"


@pytest.mark.slow
def test_thoughts_that_the_template_does_not_open_are_refused(scans: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "mimo", "ask", str(scans / "model"), "two four", "--device", "cpu",
                           "--think"], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 2 and "--think: --tokenizer" in done.stderr, done.stderr[-3000:]


def expected_answer(folder: Path, images: list[Path], text: str) -> str:
    """Return what the model of transformers continues with, likeliest token by likeliest token."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor, model = AutoProcessor.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    prompt = processor.tokenizer.bos_token + " " + "<image>" * len(images) + f" {text}"
    inputs = processor(text=prompt, images=[Image.open(path).convert("RGB") for path in images] or None,
                       return_tensors="pt")
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
    return processor.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engines_answer_as_transformers_does(scans: Path, tmp_path: Path) -> None:
    model, images = scans / "model", sorted((scans / "llava" / "images").glob("val*.png"))[:2]
    mimo("import", model, tmp_path / "imported", "--dtype", "float32")
    data = ["--", "--dataset-provider", "conversations", "--tokenizer", model]
    for shown, text in ((images[:1], "read the number"), (images, "read the number"), ([], "two four")):
        expected = expected_answer(model, shown, text) + "\n"
        limit = ["--device", "cpu", "--max-tokens", MAX_TOKENS]
        assert mimo("ask", model, *shown, text, *limit, "--engine", "trainer") == expected
        assert mimo("ask", tmp_path / "imported", *shown, text, *limit, "--engine", "trainer", *data) == expected
    assert len(images) == 2
    expected = expected_answer(model, images, "read the number")
    answer = mimo("ask", tmp_path / "imported", *images, "read the number", *limit, "--engine", "vllm", *data)
    assert answer.splitlines()[-1] == expected


def write_llava_next(scans: Path, folder: Path) -> None:
    """Write a small random LLaVA-NeXT with the tokenizer of a LLaVA, and an image processor with the same grids."""
    import torch
    import transformers

    from providers.llava_next import provider

    grids = ["8x16", "16x8", "16x16"]
    config = provider.Config(**vars(model_provider("llava").from_hf(str(scans / "model"))),
                             vision_image_grid_pinpoints=tuple(grids))
    torch.manual_seed(0)
    model = transformers.LlavaNextForConditionalGeneration(
        transformers.LlavaNextConfig.from_dict(provider.hf_config(config)))
    save_published(model, str(folder))
    transformers.LlavaNextProcessor(
        transformers.LlavaNextImageProcessor(
            size={"shortest_edge": 8}, crop_size=8,
            image_grid_pinpoints=[[int(side) for side in grid.split("x")] for grid in grids]),
        transformers.AutoTokenizer.from_pretrained(scans / "model"), patch_size=config.vision_patch_size,
        vision_feature_select_strategy="default", num_additional_image_tokens=1).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engines_cut_the_same_tiles_of_images_as_transformers(scans: Path, tmp_path: Path) -> None:
    write_llava_next(scans, tmp_path / "model")
    images = [tmp_path / f"{side}.png" for side in (30, 11)]
    for path in images:
        pixels = np.random.default_rng(int(path.stem)).integers(0, 256, (13, int(path.stem), 3), np.uint8)
        Image.fromarray(pixels).save(path)
    words = [*images, "read the number", "--device", "cpu", "--max-tokens", MAX_TOKENS, "--engine"]
    expected = expected_answer(tmp_path / "model", images, "read the number")
    assert mimo("ask", tmp_path / "model", *words, "trainer") == expected + "\n"
    with pytest.raises(AssertionError, match="--engine vllm: --image-resample bilinear: vLLM resizes the tiles"):
        mimo("ask", tmp_path / "model", *words, "vllm", "--", "--image-resample", "bilinear")
    # vLLM takes the names of published files, which exports have and the files of transformers 5 do not.
    mimo("import", tmp_path / "model", tmp_path / "imported", "--dtype", "float32")
    data = ["--", "--dataset-provider", "conversations", "--tokenizer", tmp_path / "model"]
    assert mimo("ask", tmp_path / "imported", *words, "vllm", *data).splitlines()[-1] == expected
