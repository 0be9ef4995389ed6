"""Photographs as shards: crops with their own pixels, true captions, the same bytes from run to run."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_sample_image

from data.energon.provider import Config
from data.energon.task_encoder import to_sample
from data.hf_tokenizer import load_tokenizer
from mimo.protocols import DataRequest, Sample, TokenSpec
from scripts import prepare_photos as script
from tests.support.shards import open_loader

TOKENS = TokenSpec(vocab_size=64, image_token_id=script.IMAGE_TOKEN_ID, image_size=0, num_channels=3, patch_size=16,
                   size_multiple=32)
FLAGS = ["--num-samples", "16", "--num-valid", "8", "--num-shards", "3", "--max-patches", "400"]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("photos") / "out"
    script.main(["--out", str(out), *FLAGS])
    return out


@pytest.fixture
def config(written) -> Config:
    return Config(tokenizer=str(written / "tokenizer"), image_tiling="dynamic", min_patches=256, max_patches=400,
                  image_resample="bicubic", image_mean=(0.5,), image_std=(0.25,))


def read(out: Path, config: Config, split: str) -> list[Sample]:
    request = DataRequest(tokens=TOKENS, num_image_tokens=lambda height, width: height * width // 1024, num_lanes=1,
                          micro_batch_size=1, seq_length=256, seed=0)
    return [to_sample(row) for row in open_loader(out / "photos", config, request, split=split)]


def crop_of(key: str) -> script.Crop:
    """Return the crop in a sample's key, which may begin with data set and shard."""
    _, _, name, *numbers = key.rpartition("/")[2].split("-")
    top, left, height, width = map(int, numbers)
    return script.Crop(name, top, left, height, width)


def test_samples_are_crops_of_the_photographs(written, config):
    for split, count in (("train", 16), ("val", 8)):
        samples = read(written, config, split)
        assert len(samples) == count
        for sample in samples:
            crop = crop_of(sample.key)
            assert 256 <= crop.num_patches <= 400 and sample.image_sizes == [(crop.height, crop.width)]
            photograph = script.load_photograph(crop.photograph)
            assert sample.images is not None
            pixels = sample.images[0].transpose(1, 2, 0)
            shown = photograph[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
            assert np.array_equal(pixels, shown)


def test_answers_name_the_photograph_and_the_part(written, config):
    tokenizer, answers = load_tokenizer(str(written / "tokenizer")), set()
    for sample in read(written, config, "train"):
        answer = tokenizer.decode(sample.tokens[sample.target_mask])
        crop = crop_of(sample.key)
        assert answer == script.caption(crop).replace(",", " ,") + " <eos>"
        answers.add(answer.split(" ,")[0])
    assert answers == set(script.PHOTOGRAPHS)


@pytest.mark.parametrize(("place", "words"), [((0, 0, 256, 256), "upper left"), ((256, 256, 256, 256), "lower right"),
                                              ((128, 128, 256, 256), "center"), ((0, 128, 256, 256), "upper"),
                                              ((128, 0, 256, 256), "left"), ((100, 102, 256, 256), "upper left"),
                                              ((110, 150, 256, 256), "center"), ((0, 0, 512, 512), "center")])
def test_the_part_follows_from_the_centre(place, words):
    assert script.caption(script.Crop("astronaut", *place)) == f"astronaut, {words}"


def test_photographs_are_those_of_the_packages():
    assert np.array_equal(script.load_photograph("temple"), load_sample_image("china.jpg"))
    assert {script.load_photograph(name).dtype for name in script.PHOTOGRAPHS} == {np.dtype(np.uint8)}


def test_crops_differ_and_have_many_sizes():
    crops = script.choose_crops(400, seed=0, max_patches=1024)
    assert len(set(crops)) == 400
    assert min(crop.num_patches for crop in crops) >= 256
    assert len({(crop.height, crop.width) for crop in crops}) > 50
    for crop in crops:
        height, width, _ = script.load_photograph(crop.photograph).shape
        assert 0 <= crop.top <= height - crop.height and 0 <= crop.left <= width - crop.width


def test_slips_name_any_part_of_the_right_photograph():
    crops = script.choose_crops(400, seed=0, max_patches=400)
    assert script.captions(crops, 0.0, 0) == [script.caption(crop) for crop in crops]
    found = script.captions(crops, 0.5, 0)
    assert found == script.captions(crops, 0.5, 0) != script.captions(crops, 0.5, 1)
    pairs = [answer.split(", ") for answer in found]
    assert [name for name, _ in pairs] == [crop.photograph for crop in crops]
    assert {part for _, part in pairs} == set(script.PARTS) and len(script.PARTS) == 9
    # One in nine slips is right by chance.
    wrong = sum(answer != script.caption(crop) for answer, crop in zip(found, crops, strict=True))
    assert wrong / 400 == pytest.approx(0.5 * 8 / 9, abs=0.08)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_arguments_write_the_same_bytes(tmp_path):
    flags = ["--num-samples", "2", "--num-valid", "1", "--num-shards", "1", "--max-patches", "256"]
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        script.main(["--out", str(tmp_path / name), "--seed", seed, *flags])
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a" / "photos") != contents(tmp_path / "c" / "photos")


@pytest.mark.parametrize(("flags", "message"), [
    (["--max-patches", "255"], "--max-patches 255: must be at least 256"),
    (["--num-samples", "2", "--num-shards", "3"], "--num-samples 2 --num-valid 64 --num-shards 3"),
    (["--seed", "-1"], "--seed -1"),
    (["--slip-fraction", "1.5"], "--slip-fraction 1.5: must be between 0 and 1"),
])
def test_impossible_arguments_are_refused_before_anything_is_written(tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit):
        script.main(["--out", str(tmp_path / "out"), *flags])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_not_touched(tmp_path, capsys):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(SystemExit):
        script.main(["--out", str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err and list(tmp_path.iterdir()) == [tmp_path / "mine"]
