"""Conversations in JSONL and JSON files: their forms, their images, the order in which lanes read them, bad records."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from transformers import AutoTokenizer

from data.conversation_files.files import FolderImages, open_file
from data.conversation_files.prompts import provider as prompts
from data.conversation_files.provider import Config, provider
from data.energon.provider import provider as energon
from data.energon.workers import CHECKPOINT_EVERY
from mimo.commands.main import main
from mimo.config.cli import parse
from mimo.protocols import DataRequest, RoutedDataProvider, Sample, TokenSpec
from tests.support.chat_templates import QWEN25_TOOLS
from tests.support.rows import are_same, for_shards, png, read_rows
from tests.support.small_tokenizer import CHATML_TOKENS, IMAGE, text_of, write_tokenizer

SIDE = 16
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:multiprocessing", "ignore:This DataLoader will create:UserWarning")


@pytest.fixture
def config(tokenizer: Path, tmp_path: Path) -> Config:
    """Flags that read `tmp_path/train.jsonl` in this process, beside images of grey levels 0 to 9."""
    (tmp_path / "images").mkdir()
    for grey in range(10):
        (tmp_path / "images" / f"{grey}.png").write_bytes(png(grey))
    return Config(data_path=str(tmp_path / "train.jsonl"), image_folder=str(tmp_path / "images"),
                  tokenizer=str(tokenizer), prompt_format="plain", image_mean=(0.0,), image_std=(1.0,),
                  image_tiling="stretch", image_resample="bicubic", num_workers=0)


def request(lanes: int = 1, split: str = "train", seed: int = 3, image_token_id: int = IMAGE) -> DataRequest:
    tokens = TokenSpec(vocab_size=400, image_token_id=image_token_id, image_size=SIDE, num_channels=3)
    return DataRequest(tokens, lambda height, width: 5, lanes, 1, 64, seed, split)


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def read(config: Config, count: int, asks: DataRequest | None = None, lanes: Sequence[int] = (0,)) -> list[Sample]:
    return read_rows(provider, config, asks or request(), count, lanes)


def read_shards(config: Config, folder: Path, count: int, asks: DataRequest | None = None) -> list[Sample]:
    """The first rows of shards in stored order, under the same flags."""
    return read_rows(energon, for_shards(config, folder), asks or request(), count)


def greys(row: Sample) -> list[int]:
    assert row.images is not None
    return [int(image[0, 0, 0]) for image in row.images]


def number_of(row: Sample) -> int:
    """The line of a row."""
    return int(row.key.rpartition(":")[2])


def turns(*texts: Any) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def said(*texts: Any) -> list[dict[str, Any]]:
    return [{"from": ("human", "gpt")[place % 2], "value": text} for place, text in enumerate(texts)]


VIDEO_URL = "data:video/mp4;base64,AAAA"
DATA_URL = "data:image/png;base64," + base64.b64encode(png(7)).decode()
TEXT = {"type": "text", "text": "or"}


FORMS = [
    ({"id": "a", "image": "3.png", "conversations": said("<image>\nwhat?", "dog")}, "<s>#\nwhat?\n[dog</s>]", [3]),
    ({"image": "3.png", "conversations": said("what?\n<image>", "dog", "and?", "cat")},
     "<s>what?\n#\n[dog</s>]\nand?\n[cat</s>]", [3]),
    ({"image": ["3.png", "1.png"], "conversations": said("<image> or <image>?", "dog")},
     "<s># or #?\n[dog</s>]", [3, 1]),
    ({"model": "", "conversations": said("hi", "ho")}, "<s>hi\n[ho</s>]", []),
    ({"system": "be brief", "conversations": said("hi", "ho")}, "<s>be brief\nhi\n[ho</s>]", []),
    ({"messages": turns([{"type": "image_url", "image_url": {"url": "2.png"}}, TEXT], "cat")},
     "<s>#or\n[cat</s>]", [2]),
    ({"messages": turns([{"type": "image_url", "image_url": {"url": DATA_URL}}], "cat")}, "<s>#\n[cat</s>]", [7]),
    ({"messages": turns([{"type": "image", "image": "2.png"}, TEXT], "cat")}, "<s>#or\n[cat</s>]", [2]),
    ({"messages": turns([{"image": "2.png"}, {"text": "or"}], "cat")}, "<s>#or\n[cat</s>]", [2]),
    ({"images": ["4.png", "5.png"], "messages": turns("<image><image> which?", "cat")},
     "<s>## which?\n[cat</s>]", [4, 5]),
    ({"images": ["4.png"], "messages": turns([{"type": "image", "text": None}, TEXT], "cat")},
     "<s>#or\n[cat</s>]", [4]),
    ({"messages": [*turns("<video></video>?"), {"role": "assistant", "content": "a", "weight": 1, "loss": True,
                                                "reasoning_content": ""}]}, "<s><video></video>?\n[a</s>]", []),
    ({"image": "6.png", "caption": "a cat"}, "<s>#\n[a cat</s>]", [6]),
    ({"image": "6.png", "text": "a cat"}, "<s>#\n[a cat</s>]", [6]),
    ({"image": "6.png", "text": "a <image> cat"}, "<s>[a ]#[ cat</s>]", [6]),
    ({"text": "a cat"}, "<s>[a cat</s>]", []),
    ({"image": "6.png", "question": "what?", "answer": "cat"}, "<s>#what?\n[cat</s>]", [6]),
    ({"image": "6.png", "question": "what? <image>", "answer": "cat"}, "<s>what? #\n[cat</s>]", [6]),
    ({"image": "6.png", "question": "what?", "answers": ["dog", "cat", "cat"]}, "<s>#what?\n[cat</s>]", [6]),
    ({"image": "6.png", "question": "what?", "answers": [{"answer": "cat", "answer_confidence": "yes"}]},
     "<s>#what?\n[cat</s>]", [6]),
    ({"images": ["6.png"], "texts": [{"user": "a?", "assistant": "b", "source": "x"},
                                     {"user": "c?", "assistant": "d"}]}, "<s>#a?\n[b</s>]\nc?\n[d</s>]", [6]),
    ({"images": ["6.png"], "texts": [{"user": "<image>\na?", "assistant": "b"}]}, "<s>#\na?\n[b</s>]", [6]),
    ({"images": ["6.png", "5.png"], "texts": [{"user": "a <image>?", "assistant": "b"},
                                              {"user": "<image> c?", "assistant": "d"}]},
     "<s>a #?\n[b</s>]\n# c?\n[d</s>]", [6, 5]),
]


@pytest.mark.parametrize(("record", "text", "levels"), FORMS)
def test_records_of_every_form_become_rows(tmp_path, config, record, text, levels):
    write_lines(tmp_path / "train.jsonl", [record])
    (row,) = read(config, 1)
    assert (text_of(config, row), greys(row)) == (text, levels)
    assert row.key == "train.jsonl/line:1" and row.skipped == ()


def test_calls_of_tools_reach_the_chat_template_from_files_and_shards(tmp_path, config):
    folder = write_tokenizer(tmp_path / "tools", special=CHATML_TOKENS, chat_template=QWEN25_TOOLS)
    call = {"name": "look", "arguments": {"at": "sky"}}
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}
    sharegpt = {"tools": json.dumps([tool]), "conversations": [
        {"from": "human", "value": "what?"}, {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "blue"}, {"from": "gpt", "value": "it is blue"}]}
    openai = {"tools": [tool], "messages": [
        {"role": "user", "content": "what?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": call}]},
        {"role": "tool", "content": "blue"}, {"role": "assistant", "content": "it is blue"}]}
    write_lines(tmp_path / "train.jsonl", [sharegpt, openai])
    config = replace(config, tokenizer=str(folder), prompt_format="tokenizer", shuffle=False)
    asks = replace(request(), seq_length=1000)
    one, other = read(config, 2, asks)
    assert are_same(one, other) and not one.skipped and not other.skipped
    learned = AutoTokenizer.from_pretrained(folder).decode(one.tokens[one.target_mask])
    assert '"look"' in learned and "it is blue" in learned and "it is blue" != learned and "what?" not in learned
    assert main(["convert-data", config.data_path, str(tmp_path / "shards")]) == 0
    for row in read_shards(config, tmp_path / "shards", 2, asks):
        assert are_same(row, one) and not row.skipped


def test_a_list_holds_the_records_of_its_lines(tmp_path, config):
    records = [{"text": f'"{number}" ä\n[{{'} for number in range(5)]
    write_lines(tmp_path / "train.jsonl", records)
    rows = read(replace(config, shuffle=False), 7)
    assert [number_of(row) for row in rows] == [1, 2, 3, 4, 5, 1, 2]
    for name, text, lines in [
        ("compact.json", json.dumps(records, ensure_ascii=False), [1] * 5),
        ("indented.json", "\ufeff" + json.dumps(records, indent=2, ensure_ascii=False), [2, 5, 8, 11, 14]),
        ("lines.json", "\r\n".join(map(json.dumps, records)) + "\r\n\r\n", [1, 2, 3, 4, 5]),
        ("gaps.jsonl", "\n\n".join(map(json.dumps, records)), [1, 3, 5, 7, 9]),
        ("blanks.jsonl", "\n \t   \r\n".join(map(json.dumps, records)), [1, 3, 5, 7, 9]),
    ]:
        (tmp_path / name).write_bytes(text.encode())
        file = open_file(tmp_path / name)
        assert [file.parse(file.raw(number)) for number in range(len(file))] == records, name
        assert [file.name(number) for number in range(len(file))] == [f"line:{line}" for line in lines], name


def test_a_pass_shuffles_all_records_and_deals_each_to_one_lane(tmp_path, config):
    write_lines(tmp_path / "train.jsonl", [{"text": str(number)} for number in range(1, 401)])
    rows = read(config, 200, request(lanes=2), lanes=(0, 1))
    lines = [number_of(row) for row in rows]
    assert sorted(lines) == list(range(1, 401))
    # Half of the file's first half goes to each lane.
    assert 60 < sum(line <= 200 for line in lines[::2]) < 140
    alone = read(config, 200, request(lanes=2), lanes=(1,))
    assert [number_of(row) for row in alone] == lines[1::2]
    assert [number_of(row) for row in read(config, 200, request(lanes=2, seed=4))] != lines[::2]


def test_each_pass_over_a_small_file_has_its_own_order(tmp_path, config):
    write_lines(tmp_path / "train.jsonl", [{"text": str(number)} for number in range(20)])
    lines = [number_of(row) for row in read(config, 60)]
    passes = [lines[:20], lines[20:40], lines[40:]]
    assert all(sorted(each) == list(range(1, 21)) for each in passes) and len(set(map(tuple, passes))) == 3


@pytest.mark.parametrize("flags", [{}, {"packing_buffer_size": 12}])
def test_a_lane_reads_on_where_it_stopped(tmp_path, config, flags):
    write_lines(tmp_path / "train.jsonl", [
        {"image": f"{number % 10}.png", "caption": "a" * (number % 7 + 1)} for number in range(50)])
    config = replace(config, **flags)
    reader = provider.reader(config, request(2), [0, 1])
    reader.start()
    for _ in range(21):
        reader.read(0), reader.read(1)
    states = reader.state_dict(reader.mark())
    again = provider.reader(config, request(2), [1])
    again.load_state_dict(states)
    again.start()
    for _ in range(30):
        expected, row = reader.read(1), again.read(1)
        assert row.key == expected.key and are_same(row, expected)


BAD = {
    "json": ('{"text": ', "line:2: is not JSON: Expecting value"),
    "list": ("[1]", "line:2: is list, expected an object"),
    "form": ({"prompt": "a", "response": "b"}, "line:2: unknown form: it has prompt, response, expected one of "
             "messages (turns of role and content), conversations"),
    "missing": ({"image": "x.png", "caption": "a"}, "line:2: image 'x.png': there is no file "),
    "plain base64": ({"image": DATA_URL.partition(",")[2] * 9, "caption": "a"}, "line:2: image 'iVBORw0KGgo"),
    "network": ({"image": "https://a.b/c.png", "caption": "a"}, "line:2: image 'https://a.b/c.png' is on the network"),
    "no video": ({"video": "a.mp4", "conversations": said("<video>", "b")}, "line:2: video 'a.mp4': there is no file "),
    "video": ({"video": VIDEO_URL, "conversations": said("<video>", "b")},
              "line:2: has video of a data: URL, but the model takes no videos; --model-provider qwen2_5_vl and"),
    "video part": ({"messages": turns([{"type": "video", "video": VIDEO_URL}], "b")},
                   "line:2: has video of a data: URL, but"),
    "untyped video": ({"messages": turns([{"video": VIDEO_URL}, TEXT], "b")}, "line:2: has video of a data: URL, but"),
    "video marker": ({"conversations": said("<video>\nwhat?", "b")},
                     "line:2: the text has the marker <video>, and there is no video"),
    "sampling": ({"messages": turns([{"type": "video", "video": VIDEO_URL, "fps": 1}], "b")},
                 "line:2: a content part of type video has video (str), fps (int): a video is"),
    "no rate": ({"video": ["1.png", "2.png"], "conversations": said("<video>", "b")},
                "line:2: a video of 2 images has fps None: say how many of the images a second has"),
    "two rates": ({"messages": turns([{"type": "video", "video": ["1.png"], "fps": 30, "sample_fps": 2}], "b")},
                  "line:2: a video of images has fps 30 and sample_fps 2; keep the one"),
    "two keys": ({"video": "a.mp4", "videos": ["a.mp4"], "text": "a"}, "line:2: has both video and videos"),
    "weight": ({"messages": [*turns("a"), {"role": "assistant", "content": "b", "weight": 0}]},
               "line:2: turn 2: weight '0' is not read"),
    "weight of from": ({"conversations": [*said("a"), {"from": "gpt", "value": "b", "weight": 0}]},
                       "line:2: turn 2: weight '0' is not read"),
    "thoughts": ({"messages": [*turns("a"), {"role": "assistant", "content": "b", "reasoning_content": "c"}]},
                 "line:2: turn 2: reasoning_content 'c' is not read"),
    "loss": ({"messages": [*turns("a"), {"role": "assistant", "content": "b", "loss": False}]},
             "line:2: turn 2: loss 'False' is not read"),
    "thinking": ({"messages": [*turns("a"), {"role": "assistant", "content": "b", "thinking": "c"}]},
                 "line:2: turn 2: thinking 'c' is not read"),
    "system of a caption": ({"image": "1.png", "caption": "a", "system": "be brief"},
                            "line:2: system 'be brief' beside caption is not read; write the record as `messages`"),
    "tools of a text": ({"text": "a", "tools": "[1]"}, "line:2: tools '[1]' beside text is not read"),
    "choices": ({"image": "1.png", "question": "a", "choices": ["b", "c"], "answer": "b"},
                "line:2: choices beside question is not read"),
    "role": ({"messages": [{"role": "robot", "content": "a"}]}, "line:2: turn 1: role 'robot' is none of system, user"),
    "from": ({"conversations": [{"from": "bing", "value": "a"}]}, "line:2: turn \"{'from': 'bing', 'value': 'a'}\" of "
             "conversations: `from` is none of system, human"),
    "marker": ({"conversations": said("<image>", "a")}, "line:2: 1 image marker but 0 images"),
    "unmarked": ({"image": "1.png", "conversations": said("a", "b")}, "line:2: 0 image markers but 1 image"),
    "both": ({"image": "1.png", "images": ["1.png"], "text": "a"}, "line:2: has both image and images"),
    "answers": ({"question": "a", "answers": [1]}, "line:2: answers: expected a list of texts"),
    "letters": ({"question": "a", "answers": "a cat"}, "line:2: answers: expected a list of texts"),
    "keys": ({"question": "a", "answers": {"text": ["a cat"]}}, "line:2: answers: expected a list of texts"),
    "settings": ({"messages": turns([{"type": "image", "image": "1.png", "max_pixels": 9}], "b")},
                 "line:2: a content part of type image has image (str), max_pixels (int)"),
    "no image": ({"image": "../train.jsonl", "caption": "a"}, "line:2: undecodable image ../train.jsonl: no header of"),
}


@pytest.mark.parametrize(("record", "reason"), BAD.values(), ids=BAD)
def test_each_kind_of_bad_record_is_passed_over_with_file_and_line(tmp_path, config, record, reason, caplog):
    line = record if isinstance(record, str) else json.dumps(record)
    (tmp_path / "train.jsonl").write_text(f'{{"text": "good"}}\n{line}\n{{"text": "good"}}\n')
    with caplog.at_level(logging.WARNING, "mimo.data"):
        rows = read(replace(config, shuffle=False), 2)
    assert [number_of(row) for row in rows] == [1, 3]
    (message,) = rows[1].skipped
    assert message.startswith(f"train.jsonl {reason}"), message
    assert f"bad sample skipped: {message}" in caplog.text
    (tmp_path / "train.jsonl").write_text(f"\n{line}\n")
    if record != BAD["list"][0]:  # alone it is a list of records
        with pytest.raises(ValueError) as raised:
            provider.validate(config, request())
        assert f"--data-path {tmp_path}/train.jsonl {reason}" in str(raised.value), "refused before the run starts"


def test_a_damaged_list_is_refused_with_its_line(tmp_path, config):
    for text, message in [
        ('[\n{"text": "a"},\n{"text": }\n]', r"train.json: is not a JSON list: line 3 column 10: Expecting value"),
        ('[\n{"text": "a"}\n{"text": "b"}]', r"line 3 column 1: expected , or \]"),
        ('[{"text": "a"}', r"expected , or \]"),
        ('[\n{"text": "a"},\n' + "[" * 100_000, "the record at line 2 or after it is nested too deeply"),
        ('{\n"data": []\n}', "is neither a list of objects nor an object on each line"),
        ("[]", "has no record"),
        ("", "is empty"),
        ("<html>", "begins with '<'; expected JSON"),
    ]:
        (tmp_path / "train.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            provider.validate(replace(config, data_path=str(tmp_path / "train.json")), request())


def test_a_missing_image_names_the_folder_that_has_it(tmp_path, config):
    write_lines(tmp_path / "train.jsonl", [{"image": "1.png", "caption": "a"}])
    with pytest.raises(ValueError, match=f"no file {tmp_path}/1.png; --image-folder {tmp_path}/images would have it"):
        provider.validate(replace(config, image_folder=""), request())
    write_lines(tmp_path / "train.jsonl", [{"image": "images/1.png", "caption": "a"}])
    with pytest.raises(ValueError, match=f"; --image-folder {tmp_path} would have it"):
        provider.validate(config, request())
    assert greys(read(replace(config, image_folder=""), 1)[0]) == [1]
    write_lines(tmp_path / "train.jsonl", [{"text": "a"}, *[{"image": "x.png", "caption": "a"}] * 4, {"text": "b"}])
    with pytest.raises(ValueError, match=r"line:2: image 'x.png'.* \(and none of the first 6 records has its images"):
        provider.validate(config, request())
    write_lines(tmp_path / "train.jsonl", [{"image": "x.png", "caption": "a"}, {"image": "1.png", "caption": "a"}])
    provider.validate(config, request())
    with pytest.raises(ValueError, match=f"--image-folder {tmp_path}/x: is not a folder"):
        provider.validate(replace(config, image_folder=f"{tmp_path}/x"), request())


def test_a_missing_image_among_many_is_told_without_looking_for_it(tmp_path, config, monkeypatch):
    write_lines(tmp_path / "train.jsonl", [{"text": "a"}, {"image": "x.png", "caption": "a"}, {"text": "b"}])
    monkeypatch.setattr(FolderImages, "hint", None)
    rows = read(replace(config, shuffle=False), 2)
    assert rows[1].skipped == (f"train.jsonl line:2: image 'x.png': there is no file {tmp_path}/images/x.png",)


def test_files_are_closed_and_their_records_kept(tmp_path, config):
    for number in range(300):
        write_lines(tmp_path / f"train-{number:05d}-of-00300.jsonl", [{"text": str(number)}])
    config = replace(config, data_path=str(tmp_path), shuffle=False)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert [text_of(config, row) for row in read(config, 3)] == [f"<s>[{number}</s>]" for number in range(3)]
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 50
    path = tmp_path / "train-00000-of-00300.jsonl"
    assert open_file(path) is open_file(path)


def test_base64_without_data_is_too_long_for_a_name(tmp_path, config):
    write_lines(tmp_path / "train.jsonl", [{"image": DATA_URL.partition(",")[2] * 9, "caption": "a"}])
    with pytest.raises(ValueError, match=r"too long for the name of a file; an image in base64 needs `data:.* it$"):
        provider.validate(config, request())


def test_damaged_metadata_of_datasets_is_refused(tmp_path, config):
    saved = write_saved(tmp_path / "saved")
    (saved / "train" / "state.json").write_text('{"_data_files": [')
    with pytest.raises(ValueError, match="--data-path .*/saved: state.json is damaged: Expecting value"):
        provider.validate(replace(config, data_path=str(saved)), request())
    (saved / "dataset_dict.json").write_text("{}")
    with pytest.raises(ValueError, match="saved: dataset_dict.json is damaged: it has no list splits"):
        provider.validate(replace(config, data_path=str(saved)), request())


def test_a_folder_is_read_if_it_is_clear_which_file_is_meant(tmp_path, config):
    folder = tmp_path / "data"
    folder.mkdir()
    config = replace(config, data_path=str(folder))
    with pytest.raises(ValueError, match="expected one data set of the split in .jsonl, .json, .*, found none"):
        provider.validate(config, request())
    write_lines(folder / "own_train.jsonl", [{"text": "a"}])
    write_lines(folder / "own_val.jsonl", [{"text": "b"}, {"text": "c"}])
    assert text_of(config, read(config, 1)[0]) == "<s>[a</s>]"
    assert provider.num_samples(config, "valid") == 2
    rows = read(config, 2, request(split="valid"))
    assert [text_of(config, row) for row in rows] == ["<s>[b</s>]", "<s>[c</s>]"]
    write_lines(folder / "more.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match=r"found more.jsonl, own_train.jsonl; name a file, or mix"):
        provider.validate(config, request())


def test_held_out_samples_are_named(tmp_path, config):
    write_lines(tmp_path / "train.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match="a single file has no val split; name held-out samples with --valid-data-"):
        provider.validate(config, request(split="valid"))
    config = replace(config, valid_data_path=str(write_lines(tmp_path / "held.jsonl", [{"text": "b"}])))
    assert text_of(config, read(config, 1, request(split="valid"))[0]) == "<s>[b</s>]"
    (tmp_path / "folder").mkdir()
    config = replace(config, valid_data_path=f"{tmp_path}/folder")
    write_lines(tmp_path / "folder" / "train.jsonl", [{"text": "c"}])
    with pytest.raises(ValueError, match="--valid-data-path .*/folder: has no file of a val split"):
        provider.validate(config, request(split="valid"))
    write_lines(tmp_path / "folder" / "held.jsonl", [{"text": "d"}])
    assert text_of(config, read(config, 1, request(split="valid"))[0]) == "<s>[d</s>]"


def mix(config: Config, text: str) -> Config:
    path = Path(config.data_path).parent / "mix.yaml"
    path.write_text(text)
    return replace(config, data_path=str(path))


def mixed(config: Config, kind: str, images: int) -> Config:
    """Mix 10 images, with this weight or so many repetitions, and 30 texts with 1."""
    folder = Path(config.data_path).parent
    write_lines(folder / "a.jsonl", [{"image": "1.png", "caption": "a"}] * 10)
    write_lines(folder / "b.jsonl", [{"text": "b"}] * 30)
    return mix(replace(config, image_folder=""), f"train:\n- {{path: a.jsonl, images: images, {kind}: {images}}}\n"
               f"- {{path: b.jsonl, {kind}: 1}}\nval: [b.jsonl]\n")


def test_files_are_mixed_by_weights_or_repetitions(tmp_path, config):
    keys = [row.key.partition("/")[0] for row in read(mixed(config, "weight", 3), 200)]
    assert 120 < keys.count("a.jsonl") < 180
    repeated = mixed(config, "repetitions", 2)
    keys = [row.key for row in read(repeated, 50)]
    assert {keys.count(key) for key in keys if key.startswith("a")} == {2}
    assert {keys.count(key) for key in keys if key.startswith("b")} == {1} and len(set(keys)) == 40
    assert provider.num_samples(repeated, "valid") == 30


@pytest.mark.parametrize("seed", [8, 9])
def test_a_run_goes_on_behind_the_last_sample_of_half_a_source(tmp_path, config, seed):
    write_lines(tmp_path / "a.jsonl", [{"text": "a"}] * 6)
    write_lines(tmp_path / "b.jsonl", [{"text": "b"}] * 30)
    config, asks = mix(config, "train: [{path: a.jsonl, repetitions: 0.5}, b.jsonl]"), request(seed=seed)
    reader, again = (provider.reader(config, asks, [0]) for _ in range(2))
    reader.start()
    keys = [reader.read(0).key for _ in range(CHECKPOINT_EVERY)]
    assert sum(key.startswith("a") for key in keys) == 3
    again.load_state_dict(reader.state_dict(reader.mark()))
    again.start()
    expected = [reader.read(0).key for _ in range(100)]
    assert [again.read(0).key for _ in range(100)] == expected and any(key.startswith("a") for key in expected)


@pytest.mark.parametrize("share", ["weight: 0.5", "repetitions: 2"])
def test_shares_of_held_out_files_are_refused(tmp_path, config, share):
    write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    config = mix(config, f"train: [a.jsonl]\nval: [{{path: a.jsonl, {share}}}]")
    with pytest.raises(ValueError, match=f"mix.yaml: entry 1: {share.replace(':', '')}: evaluations read each sample"):
        provider.validate(config, request(split="valid"))
    provider.validate(config, request())


@pytest.mark.parametrize(("text", "message"), [
    ("train: [a.jsonl]\nvalid: []", "expected the keys train and val, each with .*; found train, valid"),
    ("- a.jsonl", "found list"),
    ("val: [a.jsonl]", "has no list of files under train"),
    ("train: [x.jsonl]", "entry 1: .*x.jsonl: does not exist"),
    ("train: [{path: a.jsonl, ratio: 1}]", "entry 1: expected path and, if needed, images, columns, weight"),
    ("train: [{path: a.jsonl, weight: 0}]", "entry 1: weight 0: expected a number above 0"),
    ("train: [{path: a.jsonl, weight: .nan}]", "entry 1: weight nan: expected a number above 0"),
    ("train: [{path: a.jsonl, repetitions: .inf}]", "entry 1: repetitions inf: expected a number above 0"),
    ("train: [{path: a.jsonl, weight: 1}, a.jsonl]", "train: give a weight to every file"),
    ("train: [{path: a.jsonl, weight: 1}, {path: a.jsonl, weight: 1, repetitions: 2}]", "give a weight to every"),
    ("train: [{path: a.jsonl, images: x}]", "images .*/x: is not a folder"),
    ("train: [", "is not YAML"),
])
def test_a_mix_that_cannot_be_read_is_refused(tmp_path, config, text, message):
    write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match=rf"--data-path {tmp_path}/mix.yaml: .*{message}"):
        provider.validate(mix(config, text), request())


@pytest.mark.parametrize(("flags", "message"), [
    ({"data_path": ""}, "--data-path: name the file or folder of --dataset-provider conversations"),
    ({"data_path": "x.jsonl"}, "--data-path x.jsonl: does not exist"),
    ({"tokenizer": ""}, "--tokenizer: give the folder"),
    ({"packing_balance": True}, "--packing-balance: it chooses packs"),
])
def test_flags_that_cannot_work_are_refused_by_name(tmp_path, config, flags, message):
    write_lines(tmp_path / "train.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match=message):
        provider.validate(replace(config, **flags), request())
    assert isinstance(provider, RoutedDataProvider)


def test_the_tokenizer_is_that_of_the_model(tmp_path, config):
    config = replace(config, tokenizer="")
    folder = write_tokenizer(tmp_path / "model")
    assert provider.with_tokenizer(config, [str(tmp_path), str(folder)]).tokenizer == str(folder)
    assert provider.with_tokenizer(config, [str(tmp_path)]) == config
    assert provider.with_tokenizer(replace(config, tokenizer="own"), [str(folder)]).tokenizer == "own"
    words = ["--model-provider", "llava", "--dataset-provider", "conversations", "--load-hf", str(folder)]
    assert parse(words).dataset.tokenizer == str(folder)
    assert parse([*words, "--tokenizer", "own"]).dataset.tokenizer == "own"


def test_a_run_without_encoder_refuses_images(tmp_path, config):
    write_lines(tmp_path / "train.jsonl", [{"image": "1.png", "caption": "a"}])
    with pytest.raises(ValueError, match="train.jsonl line:1: has an image, and the run has no encoder for it"):
        provider.validate(config, request(image_token_id=-1))


def test_other_files_are_another_data_set(tmp_path, config):
    write_lines(tmp_path / "train.jsonl", [{"text": "a"}])
    fields = provider.stream_fields(config)
    assert fields == provider.stream_fields(replace(config, image_folder="", num_workers=3))
    write_lines(tmp_path / "train.jsonl", [{"text": "ab"}])
    assert fields["data_path"] != provider.stream_fields(config)["data_path"]


def table(numbers: Sequence[int]) -> pyarrow.Table:
    """Rows as `datasets` stores them: images as bytes with a path, and null for every key that a record lacks."""
    image = {"type": "image", "text": None}
    return pyarrow.Table.from_pylist([
        {"id": number, "images": [{"bytes": png(number % 10), "path": f"{number}.png"}],
         "messages": [{"role": "user", "content": [image, {"type": "text", "text": "what?"}], "tool_calls": None},
                      {"role": "assistant", "content": [{"type": "text", "text": "b" * (number % 5 + 1)}],
                       "tool_calls": None}],
         "conversations": None}
        for number in numbers])


def write_arrow(path: Path, rows: pyarrow.Table) -> None:
    """Write rows as `datasets` does: a stream of batches."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, rows.schema) as stream:
        stream.write_table(rows, max_chunksize=7)


def write_saved(folder: Path) -> Path:
    """A folder of `DatasetDict.save_to_disk`, with 30 rows in two files for training and 3 for validation."""
    for split, files in {"train": [range(20), range(20, 30)], "validation": [range(3)]}.items():
        names = [f"data-{place:05d}-of-{len(files):05d}.arrow" for place in range(len(files))]
        for name, numbers in zip(names, files, strict=True):
            write_arrow(folder / split / name, table(numbers))
        (folder / split / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    return folder


def write_hub(folder: Path) -> Path:
    """The same rows as folders of the Hugging Face hub have them."""
    (folder / "data").mkdir(parents=True)
    for name, numbers in {"train-00000-of-00002": range(20), "train-00001-of-00002": range(20, 30),
                          "validation-00000-of-00001": range(3)}.items():
        parquet.write_table(table(numbers), folder / "data" / f"{name}.parquet", row_group_size=6)
    return folder


def test_tables_hold_the_records_of_json(tmp_path, config):
    records = [{**record, "images": [f"{number % 10}.png"]}
               for number, record in enumerate(table(range(30)).to_pylist())]
    write_lines(tmp_path / "train.jsonl", records)
    config = replace(config, shuffle=False)
    expected = read(config, 35)
    assert greys(expected[13]) == [3] and text_of(config, expected[13]) == "<s>#what?\n[bbbb</s>]"
    saved, hub = write_saved(tmp_path / "saved"), write_hub(tmp_path / "hub")
    for path in (saved, saved / "train", hub, hub / "data"):
        assert all(map(are_same, read(replace(config, data_path=str(path)), 35), expected))
    keys = [row.key for row in read(replace(config, data_path=str(hub)), 21)]
    assert keys[0] == "hub/train-00000-of-00002.parquet/row:1" and keys[20].endswith("00001-of-00002.parquet/row:1")
    for path in (saved, hub):
        assert provider.num_samples(replace(config, data_path=str(path)), "valid") == 3
        rows = read(replace(config, data_path=str(path)), 3, request(split="valid"))
        assert [greys(row) for row in rows] == [[0], [1], [2]]


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_pass_of_parquet_reads_each_row_once_and_each_group_about_once(tmp_path, config, lanes, monkeypatch):
    from data.conversation_files.files import ParquetRecords

    config = replace(config, data_path=str(write_hub(tmp_path / "hub")))
    blocks: list[tuple[str, int]] = []
    read_block = ParquetRecords.read_block
    monkeypatch.setattr(ParquetRecords, "read_block",
                        lambda file, block: blocks.append((file.path.name, block)) or read_block(file, block))
    keys = [row.key for row in read(config, 30 // lanes, request(lanes), range(lanes))]
    assert len(set(keys)) == 30
    assert [int(key.rpartition(":")[2]) for key in keys[:10]] != list(range(1, 11)), "shuffled"
    assert len(set(blocks)) == 6 and len(blocks) <= 10, blocks  # the first is checked before, and two lanes share one


def test_parquet_goes_on_where_it_stopped(tmp_path, config):
    config = replace(config, data_path=str(write_hub(tmp_path / "hub")), packing_buffer_size=6)
    reader = provider.reader(config, request(2), [0, 1])
    reader.start()
    for _ in range(9):
        reader.read(0), reader.read(1)
    again = provider.reader(config, request(2), [0, 1])
    again.load_state_dict(reader.state_dict(reader.mark()))
    again.start()
    for _ in range(20):
        for lane in (0, 1):
            assert reader.read(lane).key == again.read(lane).key


def test_worker_processes_read_tables_as_this_process_does(tmp_path, config):
    for path in (write_hub(tmp_path / "hub"), write_saved(tmp_path / "saved")):
        config = replace(config, data_path=str(path))
        rows = read(replace(config, num_workers=1), 40)
        assert [row.key for row in rows] == [row.key for row in read(config, 40)]


def test_tables_that_cannot_be_read_are_refused(tmp_path, config):
    hub = write_hub(tmp_path / "hub")
    with pytest.raises(ValueError, match="--max-samples-per-sequence 5: .*/hub is in Parquet"):
        provider.validate(replace(config, data_path=str(hub), max_samples_per_sequence=5), request())
    (hub / "data" / "train-00000-of-00002.parquet").unlink()
    with pytest.raises(ValueError, match="has 1 of the 2 parts of train-00001-of-00002.parquet"):
        provider.validate(replace(config, data_path=str(hub)), request())
    for suffix, kind in (("parquet", "a Parquet"), ("arrow", "an Arrow")):
        (tmp_path / f"bad.{suffix}").write_bytes(b"something else")
        with pytest.raises(ValueError, match=f"bad.{suffix}: is not {kind} file"):
            provider.validate(replace(config, data_path=f"{tmp_path}/bad.{suffix}"), request())
    parquet.write_table(pyarrow.table({"prompt": ["a"]}), tmp_path / "form.parquet")
    with pytest.raises(ValueError, match="form.parquet row:1: unknown form: it has prompt"):
        provider.validate(replace(config, data_path=f"{tmp_path}/form.parquet"), request())


def test_shards_hold_the_samples_of_the_files(tmp_path, config, capsys):
    """Every form, in shards of 6 samples, with tables beside it; two records are left out and named."""
    records = [record for record, _, _ in FORMS] + [{"image": "x.png", "caption": "a"}, {"a": 1}]
    write_lines(tmp_path / "train.jsonl", records)
    valid = write_saved(tmp_path / "saved") / "validation"
    config = replace(config, shuffle=False, valid_data_path=str(valid))
    out = tmp_path / "shards"
    words = ["--image-folder", config.image_folder, "--valid-data-path", str(valid), "--samples-per-shard", "6"]
    assert main(["convert-data", config.data_path, str(out), *words]) == 0
    shown = capsys.readouterr().out
    assert f"{len(FORMS) + 3} samples in {-(-len(FORMS) // 6) + 1} shards in {out}\n2 records were left out:" in shown
    assert f"  train.jsonl line:{len(FORMS) + 1}: image 'x.png': there is no file" in shown
    assert f"line:{len(FORMS) + 2}: unknown form" in shown
    expected = read(config, len(FORMS))
    assert [greys(row) for row in expected] == [levels for _, _, levels in FORMS]
    assert all(map(are_same, read_shards(config, out, len(FORMS)), expected))
    asks = request(split="valid")
    expected, config = read(config, 3, asks), replace(config, valid_data_path="")
    assert all(map(are_same, read_shards(config, out, 3, asks), expected))
    assert main(["convert-data", config.data_path, str(out)]) == 2
    assert f"error: {out}: is not empty" in capsys.readouterr().err
    assert main(["convert-data", config.data_path, str(tmp_path / "more"), *words, "--max-bad-samples", "1"]) == 2
    last = f"train.jsonl line:{len(FORMS) + 1}"
    assert f"--max-bad-samples 1: 2 records cannot be used; the last: {last}" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["weight", "repetitions"])
def test_a_mix_becomes_a_blend_of_shards(tmp_path, config, kind):
    config = mixed(config, kind, 3)
    assert main(["convert-data", config.data_path, str(tmp_path / "shards")]) == 0
    path = tmp_path / "shards" / "blend.yaml"
    rows = read_shards(config, path, 60)
    shown = sum(bool(row.images) for row in rows)
    assert (shown == 30) if kind == "repetitions" else 35 < shown < 55
    assert energon.num_samples(for_shards(config, path), "valid") == 30


def test_prompts_have_the_pictures_of_a_record_and_no_videos(config: Config, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "<image>Which grey?<image>"}, {"role": "assistant", "content": "Dark."}]
    write_lines(tmp_path / "train.jsonl", [{"messages": turns, "images": ["3.png", "7.png"]}])
    tokens = request().tokens
    prompt = prompts.open(config, tokens, "train", 0).prompt(0)
    assert (prompt.ground_truth, prompt.image_sizes, prompt.token_ids.count(IMAGE)) == ("Dark.", ((SIDE, SIDE),) * 2, 2)
    assert [(picture.shape, set(picture.ravel())) for picture in prompt.pictures()] == [
        ((SIDE, SIDE, 3), {3}), ((SIDE, SIDE, 3), {7})]
    (tmp_path / "images" / "a.mp4").write_bytes(b"video")
    video = [{"role": "user", "content": "<video>What happens?"}, turns[1]]
    write_lines(tmp_path / "train.jsonl", [{"messages": video, "videos": ["a.mp4"]}])
    with pytest.raises(ValueError, match=r"train.jsonl.* has video .*a.mp4, but the model takes no videos"):
        prompts.open(config, tokens, "train", 0).prompt(0)
