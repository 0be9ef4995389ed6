"""Digits as shards: the same samples as in memory, to the byte from run to run."""

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from data import digits
from data.energon.provider import Config, with_image_flags
from data.energon.task_encoder import to_sample
from mimo.protocols import DataRequest, Lane, Sample, TokenSpec
from providers.common.hf_processor import CLIP
from tests.support.shards import open_loader

SCRIPT = Path(__file__).parents[3] / "scripts" / "prepare_digits.py"
TOKENS = TokenSpec(vocab_size=64, image_token_id=3, image_size=32, num_channels=3)
SEED, SAMPLES = 5, 30


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_digits", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


@pytest.fixture(scope="module")
def written(script, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("digits") / "out"
    script.main([str(out), "--samples", str(SAMPLES), "--shards", "4", "--seed", str(SEED)])
    return out


def request(tokens: TokenSpec = TOKENS) -> DataRequest:
    return DataRequest(
        tokens=tokens, num_image_tokens=lambda height, width: 4, num_lanes=1, micro_batch_size=1, seq_length=64, seed=0
    )


def config_of(out: Path, printed: str) -> Config:
    """Return the data set's flags as the script printed them."""
    def value(flag: str) -> str:
        found = re.search(rf"{flag} (\S+)", printed)
        assert found is not None, printed
        return found[1]

    return with_image_flags(Config(
        data_path=value("--data-path"),
        tokenizer=value("--tokenizer"),
        image_mean=(float(value("--image-mean")),),
        image_std=(float(value("--image-std")),),
        image_tiling="dynamic" if "--image-tiling dynamic" in printed else "auto",
    ), lambda: [CLIP])


@pytest.fixture
def config(script, written) -> Config:
    scale = 16 * script.GREY_STEP / 255
    return Config(tokenizer=str(written / "tokenizer"), image_mean=(digits.PIXEL_MEAN * scale,),
                  image_std=(digits.PIXEL_STD * scale,), image_tiling="crop", image_resample="bicubic")


def in_shards(path: Path, config: Config, split: str, tokens: TokenSpec = TOKENS) -> list[Sample]:
    return [to_sample(row) for row in open_loader(path, config, request(tokens), split=split)]


def in_memory(config: digits.Config, split: str, indices: range, tokens: TokenSpec = TOKENS) -> list[Sample]:
    return [digits.build_sample(config, tokens, Lane("vision", 0, 1, SEED, split), index) for index in indices]


def assert_equal(mine: list[Sample], expected: list[Sample]) -> None:
    assert len(mine) == len(expected)
    for one, other in zip(mine, expected, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.target_mask.tolist() == other.target_mask.tolist()
        assert one.image_sizes == other.image_sizes
        assert one.images is not None and other.images is not None and len(one.images) == len(other.images)
        for image, reference in zip(one.images, other.images, strict=True):
            image = image if one.normalisation is None else one.normalisation.normalise(image)
            assert image.dtype == reference.dtype and image.shape == reference.shape
            assert np.abs(image - reference).max() <= 1e-6


@pytest.mark.parametrize(("folder", "split", "text_only", "indices"), [
    ("digits", "train", 0.0, range(SAMPLES)),
    ("digits", "val", 0.0, None),
    ("text", "train", 1.0, range(SAMPLES, SAMPLES + round(SAMPLES * 0.3 / 0.7))),
    ("text", "val", 1.0, None),
])
def test_shards_hold_what_the_in_memory_set_makes(written, config, folder, split, text_only, indices):
    memory = digits.Config(digits_text_only_fraction=text_only, digits_augment=False)
    if indices is None:
        indices = range(len(digits.valid_numbers(memory)))
    expected = in_memory(memory, "valid" if split == "val" else "train", indices)
    assert_equal(in_shards(written / folder, config, split), expected)


def test_keys_tell_the_scans(written, config):
    _, labels = digits.load_scans()
    for sample in in_shards(written / "digits", config, "train"):
        answer = sample.tokens[sample.target_mask][:-1] - digits.FIRST_DIGIT
        assert labels[[int(scan) for scan in sample.key.rpartition("/")[2].split("-")[2:]]].tolist() == answer.tolist()


@pytest.mark.parametrize(("flags", "memory", "tokens"), [
    (["--image-size", "64"], {}, replace(TOKENS, image_size=64, num_channels=1)),
    (["--image-size", "64", "--strip"], {"digits_strip": True}, replace(TOKENS, image_size=64)),
    (["--any-size", "--strip", "--digits-max", "3"], {"digits_strip": True, "digits_max": 3},
     replace(TOKENS, image_size=0, patch_size=8, size_multiple=16)),
])
def test_the_printed_flags_read_the_same_pixels(script, tmp_path, capsys, flags, memory, tokens):
    out = tmp_path / "out"
    script.main([str(out), "--samples", "6", "--shards", "2", "--seed", str(SEED), *flags])
    config = config_of(out, capsys.readouterr().out)
    assert config.data_path == str(out / "blend.yaml")
    settings = digits.Config(digits_text_only_fraction=0.0, digits_augment=False, **memory)
    assert_equal(in_shards(out / "digits", config, "train", tokens), in_memory(settings, "train", range(6), tokens))


def test_the_blend_draws_from_both_by_weight(written, config):
    rows = iter(open_loader(written / "blend.yaml", config, request(), train=True))
    with_images = [bool(next(rows).images) for _ in range(300)]
    assert 0.6 < np.mean(with_images) < 0.8
    valid = in_shards(written / "blend.yaml", config, "val")
    assert len(valid) == len(digits.valid_numbers(digits.Config())) and all(sample.images for sample in valid)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_arguments_write_the_same_bytes(script, tmp_path):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        script.main([str(tmp_path / name), "--samples", "4", "--shards", "2", "--seed", seed])
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a") != contents(tmp_path / "c")


@pytest.mark.parametrize(("flags", "message"), [
    (["--image-size", "30"], " --image-size 30: must be a multiple of 8"),
    (["--strip", "--image-size", "16"], " --strip with --digits-max 4 needs --image-size of at least 32"),
    (["--samples", "2", "--shards", "3"], "--samples 2 --shards 3"),
    (["--seed", "-1"], "--seed -1"),
])
def test_impossible_arguments_are_refused_before_anything_is_written(script, tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as stopped:
        script.main([str(tmp_path / "out"), *flags])
    assert stopped.value.code not in (0, None)
    assert message in capsys.readouterr().err + str(stopped.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_not_touched(script, tmp_path, capsys):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(SystemExit):
        script.main([str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err and list(tmp_path.iterdir()) == [tmp_path / "mine"]
