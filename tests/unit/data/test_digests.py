"""Digests by which a checkpoint identifies the data of its run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.digests import content_of_data
from mimo.checkpoint.differences import data_differences, data_fields
from mimo.config.cli import parse, parse_as
from mimo.config.rl_run import DESCRIPTION, RlRunConfig

BLEND = """__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
      - weight: {}
        path: ./images
      - weight: 1
        path: ./text
"""


def write_data(folder: Path) -> Path:
    """A tokenizer, a blend, a prepared folder and problems, as far as digests read them."""
    for name, text in {"tokenizer/tokenizer.json": "{}", "tokenizer/config.json": "{}", "blend.yaml": BLEND.format(3),
                       "images/.nv-meta/.info.json": "{}", "train.jsonl": "{}", "test.jsonl": "{}"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def energon(folder: Path, *flags: str, data: str = "blend.yaml") -> dict[str, object]:
    return data_fields(parse(["--dataset-provider", "energon", "--data-path", str(folder / data), "--tokenizer",
                              str(folder / "tokenizer"), *flags]))


@pytest.mark.parametrize(("flags", "changed"), [
    ("--max-patches 512 --min-patches 8", {"max_patches", "min_patches"}),
    ("--prompt-format chatml --image-tag-type internvl", {"prompt_format", "image_tag_type"}),
    ("--packing-buffer-size 8", {"packing_buffer_size"}),
    ("--image-mean 0.5 --seed 2 --seq-length 64", {"image_mean", "seed", "seq_length"}),
    ("--num-workers 4 --max-bad-samples 7 --valid-data-path elsewhere", set()),
])
def test_flags_that_decide_the_samples_are_compared(tmp_path: Path, flags: str, changed: set[str]) -> None:
    folder = write_data(tmp_path)
    assert data_differences(energon(folder), energon(folder, *flags.split())).keys() == changed


# What a checkpoint recorded of data sets before they had videos and tiles of any resolution.
OLDER = {
    "energon": """append_eos data_path dataset_provider image_mean image_resample image_std image_tag_type image_tiling
        max_image_pixels max_patches max_samples_per_sequence max_tiles min_patches min_side packing_balance
        packing_buffer_size program prompt_format seed seq_length shuffle shuffle_buffer_size tokenizer
        use_thumbnail""".split(),
    "mock": """dataset_provider mock_image_size mock_image_size_cv mock_images_cv mock_images_max mock_images_mean
        mock_max_length mock_min_length mock_packed_length mock_text_only_fraction program seed""".split(),
}


def test_older_checkpoints_do_not_know_newer_flags(tmp_path: Path) -> None:
    folder = write_data(tmp_path)
    for own in (energon(folder), energon(folder, data="train.jsonl")):
        assert data_differences({name: own[name] for name in OLDER["energon"]}, own) == {}
    tiles = energon(folder, "--image-tiling", "anyres", "--image-grid-pinpoints", "336x672")
    assert "image_grid_pinpoints" in data_differences({name: tiles[name] for name in OLDER["energon"]}, tiles)
    own = data_fields(parse(["--dataset-provider", "mock"]))
    assert data_differences({name: own[name] for name in OLDER["mock"]}, own) == {}
    own = data_fields(parse(["--dataset-provider", "mock", "--mock-video-fraction", "0.5"]))
    assert data_differences({name: own[name] for name in OLDER["mock"]}, own).keys() == {
        "mock_video_fraction", "mock_video_frames"}
    own = data_fields(parse(["--dataset-provider", "mock", "--mock-video-fraction", "0.5",
                             "--mock-video-min-frames", "4"]))
    assert "mock_video_min_frames" in data_differences({name: own[name] for name in OLDER["mock"]}, own)
    own = data_fields(parse(["--dataset-provider", "mock", "--mock-video-min-frames", "4"]))  # and no videos
    assert data_differences({name: own[name] for name in OLDER["mock"]}, own) == {}


@pytest.mark.parametrize(("file", "text", "flag"), [("tokenizer/tokenizer.json", '{"a": 1}', "tokenizer"),
                                                    ("tokenizer/chat_template.jinja", "{{ messages }}", "tokenizer"),
                                                    ("blend.yaml", BLEND.format(1), "data_path"),
                                                    ("tokenizer/config.json", "[]", None)])
def test_content_counts_and_not_the_path(tmp_path: Path, file: str, text: str, flag: str | None) -> None:
    before = energon(write_data(tmp_path / "here"))
    there = write_data(tmp_path / "there")
    assert energon(there) == before
    (there / file).write_text(text)
    assert data_differences(before, energon(there)).keys() == ({flag} if flag else set())


def test_a_prepared_folder_is_known_by_its_index(tmp_path: Path) -> None:
    folder = write_data(tmp_path)
    before = energon(folder, data="images")
    (folder / "images" / "0.tar").write_text("")
    assert energon(folder, data="images") == before
    (folder / "images" / ".nv-meta" / ".info.json").write_text("[]")
    assert data_differences(before, energon(folder, data="images")).keys() == {"data_path"}


def test_remote_storage_counts_as_a_folder_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data(tmp_path)
    store = {"storage_provider": {"type": "file", "options": {"base_path": str(tmp_path)}}}
    (tmp_path / "msc.json").write_text(json.dumps({"profiles": {"digests-store": store}}))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    for name in ("images", "blend.yaml", "train.jsonl"):
        assert content_of_data(f"msc://digests-store/{name}") == content_of_data(str(tmp_path / name))


def test_prompts_are_compared_too(tmp_path: Path) -> None:
    def fields(*flags: str) -> dict[str, object]:
        return data_fields(parse_as(RlRunConfig, [
            "--dataset-provider", "gsm8k", "--data-path", str(tmp_path), "--tokenizer", str(tmp_path / "tokenizer"),
            *flags], DESCRIPTION))

    write_data(tmp_path)
    before = fields()
    assert data_differences(before, fields("--gsm8k-instruction", "Go.", "--skip-long-prompts")).keys() == {
        "gsm8k_instruction", "skip_long_prompts", "seq_length", "max_completion_tokens"}
    (tmp_path / "test.jsonl").write_text("other")
    assert fields() == before, "held-out prompts"
    (tmp_path / "train.jsonl").write_text("other")
    assert data_differences(before, fields()).keys() == {"data_path"}
