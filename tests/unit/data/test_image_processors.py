"""Pixels of training are those of the model's own Hugging Face image processor, whose files decide, and are exported.

The oracle is transformers with its default backend, torchvision, which vLLM serves with too.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers
from PIL import Image
from sklearn.datasets import load_sample_images
from transformers import AutoImageProcessor, CLIPImageProcessor, SiglipImageProcessor
from transformers.models.llava import LlavaImageProcessor

from data.energon.provider import provider as energon
from data.image_tiling import tile_image, tiling_of
from mimo.commands.convert import _write_image_processing
from mimo.config.cli import parse, to_toml
from mimo.config.validate import validate
from mimo.grid.dry_run import dry_run_report
from mimo.registry import model_provider
from providers.common import hf_processor
from providers.nemotron_moe_vlm import ConfigTiny, provider_tiny

SIDE = 56
SQUARE = {"height": SIDE, "width": SIDE}
MODEL = ["--model-provider", "llava", "--dataset-provider", "energon", "--vision-image-size", str(SIDE)]
SIGLIP = [*MODEL, "--no-vision-class-token"]
ODD = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]}
PROCESSORS = {"crop": CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SIDE),
              "crop-bilinear": CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SIDE, resample=2, **ODD),
              "stretch": SiglipImageProcessor(size=SQUARE),
              "stretch-by-clip": CLIPImageProcessor(size=SQUARE, crop_size=SIDE, do_normalize=False),
              "pad": LlavaImageProcessor(size={"shortest_edge": SIDE}, crop_size=SIDE, do_pad=True, **ODD),
              "llava-crop": LlavaImageProcessor(size={"shortest_edge": SIDE}, crop_size=SIDE)}


def images() -> list[Image.Image]:
    """Photographs, whole and cut to odd shapes; noise; an image of the encoder's own size; very narrow ones."""
    photo, flower = load_sample_images().images
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, 256, (*size, 3), np.uint8) for size in ((61, 97), (97, 61), (SIDE, SIDE), (5, 90), (1, 1))]
    pixels = [photo, flower, photo[:333, :500], flower[100:401, 50:100], photo[:SIDE, :200], *noise]
    return [Image.fromarray(np.ascontiguousarray(each)) for each in pixels]


def assert_same_pixels(flags: list[str], processor) -> None:
    config = parse(flags)
    tiling = tiling_of(config.dataset, model_provider("llava").token_spec(config.model_family))
    for image in images():
        (expected,) = processor(image, return_tensors="np")["pixel_values"]
        (found,) = tile_image(image, tiling)
        levels = np.abs(found - expected) * np.reshape(tiling.std, (3, 1, 1)) * 255
        assert found.shape == expected.shape and levels.max() < 1e-3, (image.size, levels.max())


@pytest.mark.parametrize("flag", ["--hf-config", "--load-hf", "--load-vision-from"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_the_processor_beside_the_model_decides(tmp_path, name, flag):
    PROCESSORS[name].save_pretrained(tmp_path)
    flags = MODEL
    if flag == "--hf-config":
        vision = {"model_type": "clip_vision_model", "image_size": SIDE, "patch_size": 14}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "vision_config": vision}))
    assert_same_pixels([*flags, flag, str(tmp_path)], AutoImageProcessor.from_pretrained(tmp_path))


@pytest.mark.parametrize(("flags", "name"), [(MODEL, "crop"), (SIGLIP, "stretch")])
def test_without_a_file_the_family_decides(flags, name):
    assert_same_pixels(flags, PROCESSORS[name])


def test_a_processor_inside_processor_config_wins(tmp_path):
    PROCESSORS["crop"].save_pretrained(tmp_path)
    nested = json.loads(PROCESSORS["pad"].to_json_string())
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": nested, "patch_size": 14}))
    assert type(AutoImageProcessor.from_pretrained(tmp_path)).__name__ == "LlavaImageProcessor"
    assert_same_pixels([*MODEL, "--load-hf", str(tmp_path)], PROCESSORS["pad"])


def test_flags_win_over_the_file(tmp_path):
    PROCESSORS["pad"].save_pretrained(tmp_path)
    given = ["--image-tiling", "crop", "--image-mean", "0.5", "--load-hf", str(tmp_path)]
    dataset = parse([*MODEL, *given]).dataset
    assert (dataset.image_tiling, dataset.image_mean, dataset.image_std) == ("crop", (0.5,), (0.5, 0.6, 0.7))
    # With nothing left open the file is not read.
    (tmp_path / "preprocessor_config.json").write_text("{")
    assert parse([*MODEL, *given, "--image-resample", "bilinear", "--image-std", "1"]).dataset.image_std == (1.0,)


@pytest.mark.parametrize(("name", "change", "message"), [
    ("crop", {"size": {"shortest_edge": 64}}, "size = .*64.* supported: the 56 pixels a side that the encoder takes"),
    ("crop", {"crop_size": {"height": 48, "width": 56}}, "crop_size = .* supported: the 56 x 56 pixels"),
    ("crop", {"resample": 1}, r"resample = 1 is not supported; supported: 2 \(bilinear\), 3 \(bicubic\)"),
    ("crop", {"rescale_factor": 1 / 127.5}, "rescale_factor = 0.0078.* supported: 0.0039"),
    ("crop", {"do_rescale": False}, "do_rescale = False"),
    ("crop", {"do_resize": False}, "do_resize = False .* true, as images have any size"),
    ("crop", {"do_center_crop": False}, "do_center_crop = False"),
    ("crop", {"do_pad": True}, "do_pad = True .* LlavaImageProcessor alone"),
    ("stretch", {"size": {"height": 28, "width": 56}}, "size = "),
    ("stretch", {"do_flip_channel_order": True}, "do_flip_channel_order = True is not supported; supported: null"),
    ("crop", {"image_processor_type": "Qwen2VLImageProcessor"}, "image_processor_type = 'Qwen2VLImageProcessor'"),
])
def test_unsupported_settings_of_a_file_are_refused_by_name(tmp_path, name, change, message):
    values = json.loads(PROCESSORS[name].to_json_string()) | change
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: {message}.*To ignore the file, give"):
        parse([*MODEL, "--load-hf", str(tmp_path)])


def test_two_folders_that_disagree_are_refused_with_both(tmp_path):
    for name in ("pad", "crop"):
        PROCESSORS[name].save_pretrained(tmp_path / name)
    flags = [*MODEL, "--load-hf", str(tmp_path / "pad"), "--load-vision-from", str(tmp_path / "crop")]
    with pytest.raises(ValueError, match="two image processors disagree: .*pad.* has --image-tiling pad --image-mean "
                                         "0.1 0.2 0.3 .*crop.* has --image-tiling crop .*; give --image-tiling and "):
        parse(flags)
    parse([*flags, "--image-tiling", "pad", "--image-mean", "0.5", "--image-std", "0.5"])


@pytest.mark.parametrize("name", hf_processor.PROCESSOR_DEFAULTS)
def test_class_defaults_are_those_of_transformers(name):
    theirs = json.loads(getattr(transformers, name)().to_json_string())
    for key, value in hf_processor.PROCESSOR_DEFAULTS[name].items():
        expected = theirs.get(key)
        assert (list(value) if isinstance(value, tuple) else value) == (value if expected is None else expected), key


def test_the_choice_is_shown_and_kept(tmp_path):
    PROCESSORS["pad"].save_pretrained(tmp_path)
    config = parse([*MODEL, "--model-provider", "mock", "--load-hf", str(tmp_path), "--image-resample", "bilinear"])
    assert 'image-tiling = "pad"' in to_toml(config) and "image-mean = [0.1, 0.2, 0.3]" in to_toml(config)
    digits = parse(["--model-provider", "mock", "--dataset-provider", "digits", "--dry-run"])
    plan = replace(config, train=digits.train)
    layout = validate(digits, 2)
    with_files, with_digits = (dry_run_report(each, layout, model_provider("mock")) for each in (plan, digits))
    assert ("images: --image-tiling pad (the encoder takes 56 x 56 pixels) --image-resample bilinear --image-mean "
            "0.1 0.2 0.3 --image-std 0.5 0.6 0.7") in with_files
    assert "pixels: 9,408 B (9.2 KiB) for an image of 56x56 from the data set to its encoder, in 8 bits" in with_files
    assert "images:" not in with_digits and "to its encoder, in float32" in with_digits


@pytest.mark.parametrize("base", ["none", "same", "other", "nested", "unreadable"])
@pytest.mark.parametrize("name", ["crop-bilinear", "stretch", "pad"])
def test_an_export_has_the_processor_of_training(tmp_path, name, base):
    PROCESSORS[name].save_pretrained(tmp_path / "start")
    config = parse([*MODEL, "--load-hf", str(tmp_path / "start")])
    out = tmp_path / "out"
    out.mkdir()
    if base in ("same", "other"):
        PROCESSORS[name if base == "same" else "llava-crop"].save_pretrained(out)
    elif base == "nested":
        nested = json.loads(PROCESSORS["llava-crop"].to_json_string())
        (out / "processor_config.json").write_text(json.dumps({"image_processor": nested, "patch_size": 14}))
    elif base == "unreadable":
        (out / "preprocessor_config.json").write_text('{"image_processor_type": "ViTImageProcessor"}')
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    llava = model_provider("llava")
    trained = energon.image_processing(config.dataset, llava.token_spec(config.model_family))
    assert llava.write_image_processing(config.model_family, out, trained) == ""
    if base == "same":
        assert before == {path.name: path.read_bytes() for path in out.iterdir()}
    assert_same_pixels([*MODEL, "--load-hf", str(tmp_path / "start")], AutoImageProcessor.from_pretrained(out))


def test_tiles_that_no_processor_makes_leave_none(tmp_path):
    PROCESSORS["crop"].save_pretrained(tmp_path)
    config = parse([*MODEL, "--image-tiling", "fixed"])
    llava = model_provider("llava")
    trained = energon.image_processing(config.dataset, llava.token_spec(config.model_family))
    assert "--image-tiling fixed" in llava.write_image_processing(config.model_family, tmp_path, trained)
    assert not list(tmp_path.iterdir())


def test_an_export_of_unknown_data_leaves_the_files_as_they_are(tmp_path):
    PROCESSORS["pad"].save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    config = replace(parse(["--model-provider", "llava"]), dataset=None)  # of train_rl.py, or of code that is not run
    assert "is not known" in _write_image_processing(config, model_provider("llava"), tmp_path)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


NEMOTRON = ["--model-provider", "nemotron-moe-vlm-tiny", "--dataset-provider", "energon"]


def nemotron_json(folder: Path, **patches: int) -> Path:
    values = provider_tiny.hf_config(ConfigTiny()) | {"norm_mean": [0.1, 0.2, 0.3]}
    values["vision_config"]["args"] |= patches
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_nemotron_takes_limits_and_mean_from_its_config(tmp_path):
    nemotron_json(tmp_path, min_num_patches=64, max_num_patches=256)
    dataset = parse([*NEMOTRON, "--hf-config", str(tmp_path)]).dataset
    assert (dataset.image_tiling, dataset.min_patches, dataset.max_patches) == ("dynamic", 64, 256)
    assert dataset.image_mean == (0.1, 0.2, 0.3)
    dataset = parse(NEMOTRON).dataset
    assert (dataset.image_tiling, dataset.min_patches, dataset.max_patches) == ("dynamic", 4, 1024)
    assert dataset.image_mean == hf_processor.CLIP_MEAN
    dataset = parse([*NEMOTRON, "--no-vision-dynamic-resolution"]).dataset
    assert (dataset.image_tiling, dataset.max_tiles, dataset.use_thumbnail) == ("fixed", 12, True)
    nemotron_json(tmp_path, max_num_patches=0)
    with pytest.raises(ValueError, match="config.json sets no limit to the patches of an image: give --max-patches"):
        parse([*NEMOTRON, "--hf-config", str(tmp_path)])


def test_nemotron_exports_its_limits_and_mean(tmp_path):
    nemotron_json(tmp_path)
    config = parse([*NEMOTRON, "--min-patches", "16", "--max-patches", "512", "--image-mean", "0.5"])
    trained = energon.image_processing(config.dataset, provider_tiny.token_spec(config.model_family))
    assert provider_tiny.write_image_processing(config.model_family, tmp_path, trained) == ""
    values = json.loads((tmp_path / "config.json").read_text())
    # Where vLLM reads them.
    args = values["vision_config"]["args"]
    assert (args["min_num_patches"], args["max_num_patches"], values["norm_mean"]) == (16, 512, [0.5] * 3)
    assert replace(provider_tiny.image_processing(config.model_family, str(tmp_path)), mean=(0.5,)) == trained
    narrow = provider_tiny.write_image_processing(config.model_family, tmp_path, replace(trained, min_side=64))
    assert "--min-side 64" in narrow
