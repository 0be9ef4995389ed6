"""Tokens, frames, pixels and positions are those of the Qwen-VL families' processors in transformers."""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import (
    AutoProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen2_vl import Qwen2VLImageProcessor, Qwen2VLVideoProcessor
from transformers.video_utils import VideoMetadata

from data.conversation_files.provider import provider as conversations
from data.energon.provider import provider as energon
from data.hf_tokenizer import load_tokenizer
from data.stats.collect import collect
from mimo.commands.main import main
from mimo.config.cli import parse, parse_as
from mimo.config.rl_run import RlRunConfig
from mimo.data.batch import normalised
from mimo.data.collate import Placeholders, collate_text, expand_images
from mimo.data.encoder_inputs import PatchOrder, packed_patches
from mimo.grid.layout import build_layout
from mimo.protocols import DataRequest, Sample, VideoProcessing
from mimo.registry import model_provider
from mimo.rl import launch_engine
from mimo.rl.images import as_request
from mimo.visual import Normalisation, count_tokens
from providers.common import qwen_processor
from providers.common.family import VISION
from tests.support.chat_templates import QWEN2_VL
from tests.support.rows import are_same, for_shards, read_rows
from tests.support.small_tokenizer import write_tokenizer
from tests.support.videos import all_frames, write_video

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IDS = {"vision_start_token_id": 5, "vision_end_token_id": 6, "image_token_id": 7, "video_token_id": 8}
FLAGS = [f"--{name.replace('_', '-')}={number}" for name, number in IDS.items()]
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:multiprocessing", "ignore:This DataLoader will create:UserWarning")
RATES = [2, 5, 10, 24, 25, 30, Fraction(30000, 1001), Fraction(25, 2)]
PATCH = {"qwen2_5_vl": 14, "qwen3_vl": 16}
# Small limits, so that some videos are reduced and others enlarged. Sampled and not sampled.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "qwen2_5_vl": [
        {"size": {"shortest_edge": 8 * 28 * 28, "longest_edge": 30 * 28 * 28}},
        {"size": {"shortest_edge": 3136, "longest_edge": 20 * 28 * 28}, "do_sample_frames": True, "fps": 2.0,
         "min_frames": 2, "max_frames": 9},
        {"size": {"shortest_edge": 3136, "longest_edge": 40 * 28 * 28}, "do_sample_frames": True, "num_frames": 4,
         "cap_pixels_per_frame": True, "max_video_tokens": 60},
    ],
    "qwen3_vl": [
        {"size": {"shortest_edge": 4096, "longest_edge": 60 * 32 * 32}},
        {"size": {"shortest_edge": 64 * 32 * 32, "longest_edge": 256 * 32 * 32}, "fps": 3.5, "min_frames": 5,
         "max_frames": 11, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]},
        {"size": {"shortest_edge": 4096, "longest_edge": 256 * 32 * 32}, "cap_pixels_per_frame": True,
         "max_video_tokens": 6, "resample": 2},
    ],
}
SEQ_LENGTH = 4096


def write_processor(folder: Path, family: str, settings: dict[str, Any]) -> Any:
    """Save a family's processor, whose files this project reads too."""
    write_tokenizer(folder, special=SPECIAL, chat_template=QWEN2_VL, bos=False)
    whole, videos = {"qwen2_5_vl": (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor),
                     "qwen3_vl": (Qwen3VLProcessor, Qwen3VLVideoProcessor)}[family]
    images = Qwen2VLImageProcessor(patch_size=PATCH[family], size={
        "shortest_edge": 4 * PATCH[family]**2, "longest_edge": 64 * PATCH[family]**2})
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", extra_special_tokens={
            "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>"})
    whole(images, tokenizer, videos(**settings), chat_template=QWEN2_VL).save_pretrained(folder)
    return AutoProcessor.from_pretrained(folder)


def config_of(family: str, folder: Path, *flags: str) -> Any:
    return parse(["--model-provider", family, "--dataset-provider", "conversations", "--load-hf", str(folder),
                  "--tokenizer", str(folder), "--data-path", str(folder / "train.jsonl"), "--vocab-size", "400",
                  "--num-workers", "0", "--no-shuffle", *FLAGS, *flags])


def request_of(config: Any, lanes: int = 1, seq_length: int = SEQ_LENGTH) -> DataRequest:
    provider = model_provider(config.model.model_provider)
    return DataRequest(provider.token_spec(config.model_family),
                       partial(count_tokens, provider, config.model_family, VISION), lanes, 1, seq_length, 3)


def read(config: Any, count: int, asks: DataRequest | None = None, lanes: Sequence[int] = (0,)) -> list[Sample]:
    return read_rows(conversations, config.dataset, asks or request_of(config), count, lanes)


def videos_of(count: int) -> list[tuple[bytes, Fraction | int]]:
    """Videos of random lengths, sizes and rates."""
    rng = np.random.default_rng(1)
    made = []
    for seed in range(count):
        height, width = (2 * int(side) for side in rng.integers(8, 90, 2))
        rate = RATES[int(rng.integers(len(RATES)))]
        made.append((write_video(int(rng.integers(4, 40)), height, width, rate, seed=seed), rate))
    return made


def placeholders_of(config: Any) -> Placeholders:
    layout = build_layout(config.layout, 2, (VISION,))
    return Placeholders.of(model_provider(config.model.model_provider), config.model_family, layout)


def positions_of(config: Any, row: Sample) -> np.ndarray:
    batch = collate_text([row], images=placeholders_of(config), seq_length=SEQ_LENGTH, vocab_size=400, pad_token_id=0)
    return batch.position_ids[:, 0].numpy()


@cache
def tiny_model(family: str) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen3VLConfig, Qwen3VLModel

    kind, model = {"qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLModel), "qwen3_vl": (Qwen3VLConfig, Qwen3VLModel)}[family]
    text = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
            "intermediate_size": 16, "vocab_size": 400, "head_dim": 8}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 16,
              "tokens_per_second": 2} | ({"deepstack_visual_indexes": [0]} if family == "qwen3_vl" else {})
    return model(kind(text_config=text, vision_config=vision, **IDS))


def positions_of_transformers(family: str, inputs: Any) -> np.ndarray:
    """Return what `get_rope_index` gives for the tokens of one conversation."""
    names = ("input_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts", "mm_token_type_ids",
             "attention_mask")
    positions, _ = tiny_model(family).get_rope_index(
        **{name: torch.tensor(inputs[name]) for name in names if name in inputs})
    return positions[:, 0].numpy()


@pytest.mark.parametrize("count", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("family", "setting"), [(family, number) for family in SETTINGS for number in range(3)])
def test_videos_become_what_transformers_makes_of_them(tmp_path, family, setting, count, record_property):
    processor = write_processor(tmp_path, family, SETTINGS[family][setting])
    made = videos_of(count)
    for number, (content, _) in enumerate(made):
        (tmp_path / f"{number}.mp4").write_bytes(content)
    write(tmp_path, [{"messages": asked(f"<video>\nwhat is in picture {number}?"), "videos": [f"{number}.mp4"]}
                     for number in range(count)])
    config = config_of(family, tmp_path, "--vision-tokens-per-second=2" if family == "qwen2_5_vl" else "--seed=1")
    asks, order = request_of(config), PatchOrder(PATCH[family], 2, 2)
    std = max(processor.video_processor.image_std)
    other_positions = 0
    for number, row in enumerate(read(config, count, asks)):
        content, rate = made[number]
        frames = all_frames(content)
        text = processor.apply_chat_template(
            asked([{"type": "video"}, {"type": "text", "text": f"what is in picture {number}?"}]), tokenize=False)
        theirs = processor(
            text=[text], videos=[frames], return_tensors="np", video_metadata=[
                VideoMetadata(total_num_frames=len(frames), fps=float(rate), frames_indices=list(range(len(frames))))])
        ours = expand_images(row, placeholders_of(config))
        assert ours.tokens.tolist() == theirs["input_ids"][0].tolist(), number
        # Here the images of Qwen3-VL have another mean than its videos, so both come as floats.
        assert (row.normalisation is None) == (family == "qwen3_vl")
        stored = torch.float32 if row.normalisation is None else torch.uint8
        patches = packed_patches(row.images, row.image_sizes, order, stored)
        patches = normalised(patches, row.normalisation, torch.float32)
        expected = theirs["pixel_values_videos"]
        assert patches["pixel_values"][0].shape == expected.shape
        assert np.abs(patches["pixel_values"][0].numpy() - expected).max() * 255 * std < 1e-2, number
        positions = positions_of(config, row)[:, : len(ours.tokens)]
        their_positions = positions_of_transformers(family, theirs)
        last = int(np.flatnonzero(ours.tokens == IDS["video_token_id"])[-1])
        # Behind the video of Qwen2.5-VL, later releases of transformers go on in another way than vLLM.
        assert np.array_equal(positions[:, : last + 1], their_positions[:, : last + 1]), number
        other_positions += not np.array_equal(positions, their_positions)
    record_property("videos on whose positions transformers and vLLM disagree", other_positions)
    assert family == "qwen2_5_vl" or not other_positions


@pytest.mark.parametrize("count", [12, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", SETTINGS)
def test_images_become_what_transformers_makes_of_them(tmp_path, family, count):
    processor = write_processor(tmp_path, family, SETTINGS[family][0])
    rng, order = np.random.default_rng(2), PatchOrder(PATCH[family], 2, 2)
    pictures = [Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8))
                for size in np.exp(rng.uniform(np.log(12), np.log(300), (count, 2))).astype(int).tolist()]
    records, start = [], 0
    while start < count:
        own = pictures[start : start + int(rng.integers(1, 5))]
        parts = [part for number in range(len(own))
                 for part in ({"type": "image"}, {"type": "text", "text": f"picture {number}\n"})]
        turn = int(rng.integers(2))  # an image or a text comes first
        records.append((parts[turn:] + parts[:turn], own))
        for number, picture in enumerate(own, start):
            picture.save(tmp_path / f"{number}.png")
        start += len(own)
    numbers = iter(range(count))
    write(tmp_path, [{"messages": asked(parts), "images": [f"{next(numbers)}.png" for _ in own]}
                     for parts, own in records])
    config = config_of(family, tmp_path)
    std = max(processor.image_processor.image_std)
    for row, (parts, own) in zip(read(config, len(records)), records, strict=True):
        text = processor.apply_chat_template(asked(parts), tokenize=False)
        theirs = processor(text=[text], images=own, return_tensors="np")
        ours = expand_images(row, placeholders_of(config))
        assert ours.tokens.tolist() == theirs["input_ids"][0].tolist(), row.key
        images = [each if row.normalisation is None else row.normalisation.normalise(each) for each in row.images]
        patches = packed_patches(images, row.image_sizes, order, torch.float32)["pixel_values"][0].numpy()
        assert patches.shape == theirs["pixel_values"].shape, row.key
        assert np.abs(patches - theirs["pixel_values"]).max() * 255 * std < 1e-2, row.key
        positions = positions_of(config, row)[:, : len(ours.tokens)]
        assert np.array_equal(positions, positions_of_transformers(family, theirs)), row.key


SHORT = {"size": {"shortest_edge": 4096, "longest_edge": 40 * 32 * 32}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-VL processor and a few videos: two short ones, one with sound, and six images."""
    folder = tmp_path_factory.mktemp("videos")
    write_processor(folder, "qwen3_vl", SHORT)
    for name, sound in (("a", False), ("b", True)):
        (folder / f"{name}.mp4").write_bytes(write_video(30, 64, 96, 10, sound=sound, seed=ord(name)))
    for number, frame in enumerate(all_frames((folder / "a.mp4").read_bytes())[:6]):
        Image.fromarray(frame).save(folder / f"{number}.png")
    return folder


def asked(content: Any, answer: str = "a cat") -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def said(question: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": "a cat"}]


def write(folder: Path, records: Sequence[Any]) -> None:
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))


def forms(folder: Path) -> list[Any]:
    """The same conversation about `a.mp4` in every form."""
    url = f"data:video/mp4;base64,{base64.b64encode((folder / 'a.mp4').read_bytes()).decode()}"
    text = {"type": "text", "text": "what?"}
    return [
        {"video": "a.mp4", "conversations": said("<video>\nwhat?")},
        {"video": "a.mp4", "conversations": said("<image>\nwhat?")},  # LLaVA-Video's marker
        {"videos": ["a.mp4"], "messages": asked("<video>what?")},
        {"videos": [{"path": "a.mp4"}], "messages": asked([{"type": "video"}, text])},
        {"messages": asked([{"type": "video", "video": "a.mp4"}, text])},
        {"messages": asked([{"video": f"file://{folder}/a.mp4"}, {"text": "what?"}])},
        {"messages": asked([{"type": "video_url", "video_url": {"url": url}}, text])},
        {"video": "a.mp4", "question": "what?", "answer": "a cat"},
        {"video": "a.mp4", "texts": [{"user": "what?", "assistant": "a cat"}]},
    ]


def test_every_form_of_a_record_shows_its_video(folder):
    records = forms(folder)
    write(folder, records)
    first, *others = read(config_of("qwen3_vl", folder), len(records))
    assert [size.frames for size in first.image_sizes] == [2] * 3 and first.images[0].shape[:2] == (2, 3)
    for number, row in enumerate(others, 2):
        assert are_same(first, row), number
    write(folder, [{"video": "a.mp4", "caption": "a cat"}])
    (caption,) = read(config_of("qwen3_vl", folder), 1)
    assert np.array_equal(np.concatenate(caption.images), np.concatenate(first.images))


def test_images_and_videos_keep_the_order_of_the_text(folder):
    write(folder, [{"images": ["0.png", "1.png"], "videos": ["a.mp4"],
                    "messages": asked("<image> and <video> and <image>")}])
    (row,) = read(config_of("qwen3_vl", folder, "--video-num-frames", "4"), 1)
    assert [len(size) for size in row.image_sizes] == [2, 4, 4, 2]
    shown = row.tokens[np.isin(row.tokens, [7, 8])].tolist()
    assert shown == [7, 8, 8, 7] and [image.ndim for image in row.images] == [3, 4, 4, 3]


def test_images_with_a_rate_are_a_video(folder):
    frames = [f"{number}.png" for number in range(5)]
    write(folder, [{"video": frames, "fps": 2, "messages": asked("<video>what?")},
                   {"messages": asked([{"type": "video", "video": frames, "sample_fps": 2.0},
                                       {"type": "text", "text": "what?"}])}])
    config = config_of("qwen3_vl", folder)
    one, other = read(config, 2)
    assert are_same(one, other) and len(one.image_sizes) == 3, "the last of five frames is repeated"
    text = conversations.decode(config.dataset, one.tokens[one.tokens < 400].tolist())
    assert re.findall(r"<([\d.]+) seconds>", text) == ["0.2", "1.2", "2.0"]
    assert np.array_equal(one.images[2][0], one.images[2][1])


def test_flags_choose_the_frames(folder):
    write(folder, [{"video": "a.mp4", "messages": asked("<video>what?")}])
    for flags, frames in ((["--video-fps", "4"], 12), (["--video-num-frames", "6"], 6),
                          (["--video-fps", "9", "--video-max-frames", "8"], 8)):
        (row,) = read(config_of("qwen3_vl", folder, *flags), 1)
        assert sum(size.frames for size in row.image_sizes) == frames, flags
    (row,) = read(config_of("qwen3_vl", folder, "--video-max-tokens", "4"), 1)
    assert {size[:2] for size in row.image_sizes} == {(32, 64)}
    for flags, message in (
            (["--video-fps", "1", "--video-num-frames", "4"], "--video-fps 1.0 --video-num-frames 4: give one of them"),
            (["--video-min-pixels", "10", "--video-max-pixels", "5"], "--video-min-pixels 10 --video-max-pixels 5"),
            (["--video-fps", "-1"], "--video-fps -1.0: must not be negative")):
        with pytest.raises(ValueError, match=re.escape(message)):
            read(config_of("qwen3_vl", folder, *flags), 1)
    with pytest.raises(ValueError, match=re.escape("--video-fps 1.0: the model takes no videos; --model-provider")):
        parse(["--model-provider", "mock", "--dataset-provider", "conversations", "--video-fps", "1"])


def test_bad_videos_are_passed_over_by_name(tmp_path, folder, caplog):
    write_processor(tmp_path, "qwen3_vl", SHORT)
    bad = {
        "empty.mp4": (b"", "video empty.mp4 is empty"),
        "text.mp4": (b"no video" * 99, "undecodable video text.mp4: Invalid data found"),
        "cut.mp4": ((folder / "a.mp4").read_bytes()[:900], "undecodable video cut.mp4: Invalid data found"),
        "one.mp4": (write_video(1, 64, 64), "video one.mp4: is too short: it has 1 frame, and the model takes 2 at"),
        "long.mp4": (write_video(400, 64, 64, 2), "tokens, "),
        "large.mp4": (write_video(4, 64, 512), "video large.mp4 has frames of 64x512 pixels, more than --max-image-pi"),
        "none.mp4": (None, "video 'none.mp4': there is no file"),
    }
    for name, (content, _) in bad.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    (tmp_path / "good.mp4").write_bytes((folder / "b.mp4").read_bytes())
    write(tmp_path, [{"video": name, "messages": asked("<video>what?")} for name in ("good.mp4", *bad, "good.mp4")])
    config = config_of("qwen3_vl", tmp_path, "--max-image-pixels", "20000")
    with caplog.at_level(logging.INFO, "mimo.data"):
        first, second = read(config, 2, request_of(config, seq_length=500))
    assert are_same(first, second)
    for message, (name, (_, reason)) in zip(second.skipped, bad.items(), strict=True):
        assert reason in message, name
    assert "--video-fps, --video-max-frames and --video-max-pixels make fewer" in second.skipped[4]
    assert caplog.text.count("videos have sound, such as good.mp4: it is not read") == 1


def test_lanes_share_the_batch_and_go_on_where_they_stopped(folder):
    write(folder, [{"video": f"{'ab'[number % 2]}.mp4", "messages": asked("<video>what?", f"number {number}")}
                   for number in range(12)])
    flags = ["--packing-buffer-size", "3", "--video-num-frames", "2", "--num-workers", "1"]
    config = config_of("qwen3_vl", folder, *flags)
    asks = request_of(config, lanes=2, seq_length=300)
    together = read(config, 4, asks, lanes=(0, 1))
    apart = [read(config, 4, asks, lanes=(lane,)) for lane in (0, 1)]
    assert all(are_same(row, apart[place % 2][place // 2]) for place, row in enumerate(together))
    reader = conversations.reader(config.dataset, asks, (0,))
    reader.start()
    for _ in range(2):
        reader.read(0)
    states = reader.state_dict(reader.mark())
    reader.close()
    assert all(map(are_same, read_rows(conversations, config.dataset, asks, 2, states=states), apart[0][2:]))


def test_shards_hold_the_videos_of_the_files(tmp_path, folder, capsys):
    frames = [f"{number}.png" for number in range(4)]
    records = [*forms(folder), {"video": frames, "fps": 2, "image": "5.png", "messages": asked("<image><video>what?")}]
    write(folder, [*records, {"video": "train.jsonl", "messages": asked("<video>what?")}])
    config = config_of("qwen3_vl", folder)
    expected = read(config, len(records))
    out = tmp_path / "shards"
    assert main(["convert-data", str(folder / "train.jsonl"), str(out)]) == 0
    assert f"line:{len(records) + 1}: undecodable video train.jsonl" in capsys.readouterr().out
    shards = for_shards(config.dataset, out)
    assert all(map(are_same, read_rows(energon, shards, request_of(config), len(records)), expected))
    found = collect(shards, request_of(config), len(records), lambda: None)  # what scripts/data_stats.py shows
    assert not found.bad and len(found.records) == len(records) and found.records[0].videos


@pytest.mark.parametrize(("change", "message"), [
    ({"patch_size": 14}, "patch_size = 14 is not supported; supported: 16, as the model has it"),
    ({"do_resize": False}, "do_resize = False is not supported"),
    ({"video_processor_type": "LlavaVideoProcessor"}, "video_processor_type = 'LlavaVideoProcessor' is not supported"),
    ({"num_frames": 4}, "num_frames = 4 is not supported; supported: null beside fps 2, or this beside fps null"),
    ({"fps": None}, "fps = None is not supported; supported: a number"),
    ({"crop_size": {"height": 5}}, "To ignore the file, give --video-processing and all other --video-... flags"),
])
def test_what_a_file_asks_for_and_is_not_done_is_refused_by_name(tmp_path, change, message):
    (tmp_path / "video_preprocessor_config.json").write_text(
        json.dumps({"video_processor_type": "Qwen3VLVideoProcessor", **change}))
    with pytest.raises(ValueError, match=re.escape(message)):
        model_provider("qwen3_vl").video_processing(model_provider("qwen3_vl").Config(), str(tmp_path))


def test_folders_whose_videos_differ_are_refused_if_flags_ask_for_videos(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, settings in ((first, {}), (second, {"fps": 3.5, "max_frames": 11})):
        write_processor(folder, "qwen3_vl", settings)
    flags = ("--load-vision-from", str(second))
    assert config_of("qwen3_vl", first, *flags).dataset.video_processing == "auto"
    with pytest.raises(ValueError, match=re.escape(
            "two video processors disagree: ") + ".*first.* has --video-fps 2.0 --video-max-frames 768, .*second.* has "
            "--video-fps 3.5 --video-max-frames 11; give --video-fps and --video-max-frames"):
        config_of("qwen3_vl", first, *flags, "--video-resample", "bilinear")
    agreed = config_of("qwen3_vl", first, *flags, "--video-fps", "1", "--video-max-frames", "8")
    assert (agreed.dataset.video_processing, agreed.dataset.video_max_frames) == ("qwen3_vl", 8)


def test_class_defaults_are_those_of_transformers():
    for rule, kind in (("qwen2_5_vl", Qwen2VLVideoProcessor), ("qwen3_vl", Qwen3VLVideoProcessor)):
        theirs = kind()
        for key, value in qwen_processor.VIDEO_DEFAULTS[rule].items():
            found = getattr(theirs, key, None)
            found = dict(found) if key == "size" else tuple(found) if isinstance(found, list) else found
            assert found == value, key


@pytest.mark.parametrize("family", SETTINGS)
@pytest.mark.parametrize("setting", range(3))
def test_an_export_has_the_processor_of_training(tmp_path, family, setting):
    """The files that this project writes give transformers and this project what those of transformers do."""
    theirs = write_processor(tmp_path, family, SETTINGS[family][setting]).video_processor
    config = config_of(family, tmp_path)
    provider = model_provider(family)
    videos: VideoProcessing | None = conversations.video_processing(config.dataset, request_of(config).tokens)
    assert videos is not None and videos == provider.video_processing(config.model_family, str(tmp_path))
    (tmp_path / "new").mkdir()
    provider.write_video_processing(config.model_family, tmp_path / "new", videos)
    assert provider.video_processing(config.model_family, str(tmp_path / "new")) == videos
    ours = type(theirs).from_pretrained(tmp_path / "new")
    for key in ("size", "fps", "num_frames", "min_frames", "max_frames", "do_sample_frames", "image_mean", "resample"):
        if theirs.do_sample_frames or key not in ("fps", "num_frames"):
            found, expected = getattr(ours, key, None), getattr(theirs, key, None)
            assert found == expected or (family == "qwen2_5_vl" and not found and not expected), key


@pytest.mark.parametrize("family", SETTINGS)
def test_prompts_show_engine_and_trainer_the_frames_of_training(tmp_path, family, monkeypatch):
    write_processor(tmp_path, family, SETTINGS[family][1])
    for number in range(2):
        (tmp_path / f"{number}.mp4").write_bytes(write_video(11 + 20 * number, 60, 90, RATES[number + 4], seed=number))
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)).save(tmp_path / "0.png")
    write(tmp_path, [{"messages": asked("<video>\nor <image>\nor <video>"), "images": ["0.png"],
                      "videos": ["0.mp4", "1.mp4"]}])
    config = config_of(family, tmp_path)
    (row,) = read(config, 1)
    run = parse_as(RlRunConfig, [
        "--model-provider", family, "--dataset-provider", "conversations", "--load-hf", str(tmp_path), "--tokenizer",
        str(tmp_path), "--data-path", str(tmp_path / "train.jsonl"), "--vocab-size", "400", "--seq-length", "8192",
        *FLAGS], "")
    provider, engine = model_provider(family), tmp_path / "engine"
    prompts = run.find_dataset("conversations").open(run.dataset, provider.token_spec(run.model_family), "train", 0)
    prompt = prompts.prompt(0)
    assert prompt.token_ids == tuple(row.tokens[:len(prompt.token_ids)].tolist())
    assert not row.target_mask[:len(prompt.token_ids)].any() and row.target_mask[len(prompt.token_ids)], "the answer"
    assert list(prompt.image_sizes) == list(row.image_sizes)
    monkeypatch.setattr("data.energon.task_encoder.probe", None)  # what the first reading found is kept
    again = prompts.prompt(0)
    assert (again.token_ids, again.image_sizes) == (prompt.token_ids, prompt.image_sizes)
    assert all(map(np.array_equal, again.pictures(), prompt.pictures()))
    videos = prompts.video_processing
    images = [pixels if row.normalisation is None else row.normalisation.normalise(pixels) for pixels in row.images]
    for picture, size, trained in zip(prompt.pictures(), prompt.image_sizes, images, strict=True):
        chosen = Normalisation(videos.mean, videos.std) if len(size) > 2 else prompts.normalisation
        assert np.abs(chosen.apply(picture) - trained).max() < 1e-6

    engine.mkdir()
    (engine / "config.json").write_text(json.dumps(provider.hf_config(run.model_family)))
    launch_engine.write_processor(run, provider, engine, has_videos=True)
    assert (engine / launch_engine.VIDEO_PROCESSOR).is_file(), "the engine would take no videos"
    (tmp_path / "images").mkdir()
    launch_engine.write_processor(run, provider, tmp_path / "images", has_videos=False)
    assert not (tmp_path / "images" / launch_engine.VIDEO_PROCESSOR).exists(), "it would keep memory for videos"
    assert load_tokenizer(str(engine)).eos_token is None, "completions end where the prompt set says"
    request = as_request(prompt, (9, 9))
    media = request["multi_modal_data"]
    assert request["prompt_token_ids"].count(IDS["video_token_id"]) == len(media["video"]) == 2
    processor = AutoProcessor.from_pretrained(engine)
    assert not processor.video_processor.do_sample_frames
    # As vLLM calls them.
    theirs = [processor(text=["<|vision_start|><|video_pad|><|vision_end|>"], videos=[frames], return_tensors="np",
                        video_metadata=[VideoMetadata(**{key: value for key, value in about.items()
                                                         if key != "do_sample_frames"})])
              for frames, about in media["video"]]
    ours = [image for image, size in zip(images, row.image_sizes, strict=True) if len(size) > 2]
    pixels = packed_patches(ours, [size for size in row.image_sizes if len(size) > 2],
                            PatchOrder(PATCH[family], 2, 2), torch.float32)["pixel_values"][0].numpy()
    assert np.abs(np.concatenate([each["pixel_values_videos"] for each in theirs]) - pixels).max() < 1e-5
    expanded = request["prompt_token_ids"]
    if family == "qwen3_vl":
        for inputs in theirs:
            first = expanded.index(IDS["video_token_id"])
            written = inputs["input_ids"][0].tolist()[1:-1]
            expanded[first:first + 1] = [-1 if token == IDS["video_token_id"] else token for token in written]
        whole = expand_images(replace(row, tokens=np.array(prompt.token_ids), target_mask=row.target_mask[
            :len(prompt.token_ids)]), placeholders_of(config)).tokens.tolist()
        image = expanded.index(IDS["image_token_id"])
        expanded[image:image + 1] = [IDS["image_token_id"]] * whole.count(IDS["image_token_id"])
        assert [IDS["video_token_id"] if token < 0 else token for token in expanded] == [*whole, 9, 9]
    else:
        for inputs, size in zip(theirs, [size for size in prompt.image_sizes if len(size) > 2], strict=True):
            assert inputs["second_per_grid_ts"][0] == pytest.approx(2 * size.frame_seconds, rel=1e-12)
        assert expanded == [*prompt.token_ids, 9, 9]


def test_a_prompt_whose_tokenizer_has_other_special_tokens_than_the_model_is_refused(tmp_path):
    write_processor(tmp_path, "qwen3_vl", SETTINGS["qwen3_vl"][0])
    provider = model_provider("qwen3_vl")
    config = replace(config_of("qwen3_vl", tmp_path, "--video-fps=2").model_family, vision_end_token_id=77)
    with pytest.raises(ValueError, match=r"--vision-end-token-id 77: .* whose <\|vision_end\|> .* has 6"):
        provider.write_video_processor(config, tmp_path, provider.of_videos, load_tokenizer(str(tmp_path)))


@pytest.mark.parametrize("family", SETTINGS)
def test_an_engine_has_the_file_of_videos_if_its_processor_would_do_without(tmp_path, family):
    write_processor(tmp_path, family, SETTINGS[family][0])
    provider, engine = model_provider(family), tmp_path / "engine"
    config = config_of(family, tmp_path, "--video-fps=2").model_family
    engine.mkdir()
    provider.write_processor(config, engine, provider.of_videos.mean, provider.of_videos.std)
    given = provider.video_processing(config, str(engine))
    provider.write_video_processor(config, engine, given, load_tokenizer(str(tmp_path)))
    assert (engine / launch_engine.VIDEO_PROCESSOR).is_file()
