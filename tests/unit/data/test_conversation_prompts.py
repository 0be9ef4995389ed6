"""Prompts of files of conversations: what supervised training shows before the last answer, and that answer."""

from __future__ import annotations

import datetime
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from data import character_tokenizer
from data.conversation_files.files import ParquetRecords
from data.conversation_files.prompts import provider
from data.conversation_files.provider import provider as files
from data.energon.task_encoder import ErrorLog, VlmTaskEncoder
from data.hf_tokenizer import load_tokenizer
from mimo.config.cli import parse_as
from mimo.config.rl_run import RlRunConfig
from mimo.protocols import DataRequest, TokenSpec
from mimo.rl.prompts import BadPromptError, SkippingPromptSet, StoredPromptSet
from mimo.rl.rollouts import fit_prompts
from tests.support.chat_templates import NEMOTRON3, QWEN3
from tests.support.small_tokenizer import CHATML_TOKENS, write_tokenizer

TOKENS = TokenSpec(vocab_size=128, image_token_id=120, image_size=8, num_channels=3)
RECORDS: list[dict[str, Any]] = [
    {"image": "0.png", "conversations": [{"from": "human", "value": "<image>\nwhat?"},
                                         {"from": "gpt", "value": "a cat"}]},
    {"messages": [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "1"},
                  {"role": "user", "content": "two?"}, {"role": "assistant", "content": "2"}]},
    {"image": ["0.png", "1.png"], "question": "which is larger?", "answer": "the second"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return character_tokenizer.write(tmp_path_factory.mktemp("tokenizer"))


def config_for(folder: Path, tokenizer: Path, records: list[dict[str, Any]]) -> Any:
    rng = np.random.default_rng(0)
    for number in range(2):
        Image.fromarray(rng.integers(0, 256, (11, 17, 3), np.uint8)).save(folder / f"{number}.png")
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return provider.Config(data_path=str(folder), tokenizer=str(tokenizer), prompt_format="plain", image_tiling="crop",
                           image_resample="bicubic", image_mean=(0.4, 0.5, 0.6), image_std=(0.2, 0.3, 0.4))


def test_prompts_are_what_training_shows_before_the_last_answer(tmp_path: Path, tokenizer: Path) -> None:
    config = config_for(tmp_path, tokenizer, RECORDS)
    provider.validate(config, TOKENS)
    prompts = provider.open(config, TOKENS, "train", 3)
    found = {prompt.ground_truth: prompt for prompt in map(prompts.prompt, range(3))}
    assert {name: len(prompt.image_sizes) for name, prompt in found.items()} == {"a cat": 1, "2": 0, "the second": 2}
    assert {prompt.key.rsplit(" ")[-1] for prompt in found.values()} == {"line:1", "line:2", "line:3"}
    request = DataRequest(tokens=TOKENS, num_image_tokens=lambda height, width: 1, num_lanes=1, micro_batch_size=1,
                          seq_length=99, seed=0)
    tokenize = VlmTaskEncoder(config, request, ErrorLog(0)).tokenizer.encode
    tokens, mask = tokenize(RECORDS[1]["messages"])
    end = len(tokens) - int(np.argmin(mask[::-1]))
    assert found["2"].token_ids == tuple(tokens[:end]) and "one?" in found["2"].text
    assert prompts.decode([*tokens[end:]]) == "2" and tokens[-1] == prompts.end_token_id
    for prompt in found.values():
        assert prompt.token_ids.count(120) == len(prompt.image_sizes) == len(prompt.pictures())


@pytest.mark.parametrize(("answer", "opening"), [
    ("red cat", "<think></think>"), ("<think>\nwhy\n</think>\n\nred cat", "<think>\n"),
])
def test_a_template_opens_thoughts_where_the_answer_has_some(tmp_path: Path, answer: str, opening: str) -> None:
    """Supervised training does the same with a template whose generation prompt opens them or leaves them empty."""
    write_tokenizer(tmp_path / "tokenizer", special=CHATML_TOKENS, chat_template=NEMOTRON3)
    records = [{"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": answer}]}]
    config = replace(config_for(tmp_path, tmp_path / "tokenizer", records), prompt_format="tokenizer")
    tokens = replace(TOKENS, vocab_size=400, image_token_id=390)
    prompt = provider.open(config, tokens, "train", 0).prompt(0)
    assert prompt.text.endswith(f"<|im_start|>assistant\n{opening}") and prompt.ground_truth == answer
    request = DataRequest(tokens=tokens, num_image_tokens=lambda height, width: 1, num_lanes=1, micro_batch_size=1,
                          seq_length=99, seed=0)
    trained, mask = VlmTaskEncoder(config, request, ErrorLog(0)).tokenizer.encode(records[0]["messages"])
    assert prompt.token_ids == tuple(trained[:int(np.argmax(mask))])
    prompts = provider.open(config, tokens, "train", 0)
    assert prompts.end_token_ids == (trained[np.flatnonzero(mask)[-1]], 2), "the end of a turn, and that of a text"


def test_a_question_opens_thoughts_where_the_template_does(tmp_path: Path) -> None:
    """`mimo ask --think` does this, too. HF's generation prompt with and without `enable_thinking` is the reference."""
    folder = write_tokenizer(tmp_path / "tokenizer", special=CHATML_TOKENS, chat_template=NEMOTRON3)
    tokens = replace(TOKENS, vocab_size=400, image_token_id=390)
    config = replace(config_for(tmp_path, folder, RECORDS), prompt_format="tokenizer")
    request = DataRequest(tokens=tokens, num_image_tokens=lambda height, width: 1, num_lanes=1, micro_batch_size=1,
                          seq_length=99, seed=0)
    hf = load_tokenizer(str(folder))
    for thinks in (False, True):
        found = files.question(config, request, "a b", [], thinks=thinks).sample.tokens.tolist()
        assert found == hf.apply_chat_template([{"role": "user", "content": "a b"}], add_generation_prompt=True,
                                               enable_thinking=thinks)["input_ids"]
    write_tokenizer(folder, special=CHATML_TOKENS, chat_template=QWEN3)
    assert len(files.question(config, request, "a b", [], thinks=False).sample.tokens)
    with pytest.raises(ValueError, match="^--think: --tokenizer .* writes the same before every answer"):
        files.question(config, request, "a b", [], thinks=True)


def test_the_end_of_an_answer_is_no_text_of_it(tmp_path: Path) -> None:
    """Not even where the tokenizer has the end of a turn among its ordinary tokens."""
    folder = write_tokenizer(tmp_path / "tokenizer", special=CHATML_TOKENS, chat_template=NEMOTRON3)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        saved = json.loads((folder / name).read_text())
        saved.pop("extra_special_tokens", None)
        for token in saved.get("added_tokens", []):
            token["special"] = token["special"] and token["content"] not in CHATML_TOKENS
        (folder / name).write_text(json.dumps(saved))
    records = [{"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "red cat"}]}]
    config = replace(config_for(tmp_path, folder, records), prompt_format="tokenizer")
    prompts = provider.open(config, replace(TOKENS, vocab_size=400, image_token_id=390), "train", 0)
    completion = (*prompts.tokenizer.encode("red cat", add_special_tokens=False), prompts.end_token_id)
    assert prompts.tokenizer.decode(completion, skip_special_tokens=True) == "red cat<|im_end|>"
    assert prompts.decode(completion) == "red cat" and prompts.decode((prompts.end_token_id,)) == ""


def test_pictures_are_the_pixels_of_training_in_eight_bits(tmp_path: Path, tokenizer: Path) -> None:
    config = config_for(tmp_path, tokenizer, RECORDS[2:])
    prompts = provider.open(config, TOKENS, "train", 0)
    request = DataRequest(tokens=TOKENS, num_image_tokens=lambda height, width: 1, num_lanes=1, micro_batch_size=1,
                          seq_length=99, seed=0)
    encoder = VlmTaskEncoder(config, request, ErrorLog(0))
    for number, picture in enumerate(prompts.prompt(0).pictures()):
        (trained,) = encoder.drawn(np.array([120]), [("image", (tmp_path / f"{number}.png").read_bytes())], [],
                                   normalise=False)
        assert np.array_equal(picture.transpose(2, 0, 1), trained) and prompts.normalisation == encoder.normalisation


def test_each_pass_has_every_record_once_in_an_order_of_its_own(tmp_path: Path, tokenizer: Path) -> None:
    records = [{"question": f"{number}?", "answer": str(number)} for number in range(20)]
    prompts = provider.open(config_for(tmp_path, tokenizer, records), TOKENS, "train", 1)
    passes = [[prompts.prompt(20 * epoch + place).ground_truth for place in range(20)] for epoch in range(2)]
    assert sorted(passes[0], key=int) == sorted(passes[1], key=int) == [str(number) for number in range(20)]
    assert passes[0] != passes[1]
    prompts.leave_out({prompts.prompt(0).key})
    assert prompts.num_prompts == 19 and passes[0][0] not in {prompts.prompt(place).ground_truth for place in range(19)}


@pytest.mark.parametrize("split", ["train", "valid"])
def test_prompts_are_not_shuffled_on_request(tmp_path: Path, tokenizer: Path, split: str) -> None:
    records = [{"question": f"{number}?", "answer": str(number)} for number in range(20)]
    config = replace(config_for(tmp_path, tokenizer, records), shuffle=False,
                     valid_data_path=str(tmp_path / "train.jsonl"))
    prompts = provider.open(config, TOKENS, split, 1)
    assert [prompts.prompt(index).ground_truth for index in range(40)] == 2 * [str(number) for number in range(20)]
    prompts.leave_out({prompts.prompt(1).key})
    assert [prompts.prompt(index).ground_truth for index in range(18, 21)] == ["19", "0", "2"]


@pytest.mark.parametrize(("flags", "expected"), [
    ({"packing_buffer_size": 50}, "--packing-buffer-size 50 has no effect"),
    ({"packing_balance": True}, "--packing-balance has no effect"),
    ({"shuffle_buffer_size": 9}, "--shuffle-buffer-size 9 has no effect"),
    ({"max_samples_per_sequence": 5}, "--max-samples-per-sequence 5 has no effect"),
    ({"max_bad_samples": -1}, "--max-bad-samples -1: must be at least 0"),
])
def test_flags_that_prompts_cannot_honour_are_refused(tmp_path: Path, tokenizer: Path, flags: dict[str, Any],
                                                      expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{expected}"):
        provider.validate(replace(config_for(tmp_path, tokenizer, RECORDS), **flags), TOKENS)


@pytest.mark.parametrize(("record", "columns", "expected"), [
    ({"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}], "system": "c",
      "id": 7, "answer": "d", "tests": [{"in": [1, 2.5], "out": None, "strict": True}]}, (),
     {"id": 7, "answer": "d", "tests": [{"in": [1, 2.5], "out": None, "strict": True}]}),
    ({"question": "a?", "answer": "b", "image": "0.png", "level": "hard", "text": "why b"}, (),
     {"level": "hard", "text": "why b"}),
    ({"problem": "a?", "solution": "b", "answer": "c"}, ("question=problem", "answer=solution"), {"answer": "c"}),
])
def test_a_reward_gets_the_other_fields_of_a_record(tmp_path: Path, tokenizer: Path, record: dict[str, Any],
                                                    columns: tuple[str, ...], expected: dict[str, Any]) -> None:
    config = replace(config_for(tmp_path, tokenizer, [record]), data_columns=columns)
    prompt = provider.open(config, TOKENS, "train", 0).prompt(0)
    assert prompt.metadata == expected and prompt.ground_truth == "b"


def test_fields_of_a_table_are_plain_and_without_bytes(tmp_path: Path, tokenizer: Path) -> None:
    config = config_for(tmp_path, tokenizer, [])
    table = pyarrow.table({"question": ["a?"], "answer": ["b"], "made": [datetime.date(2026, 1, 2)], "raw": [b"x" * 99],
                           "pages": [[{"bytes": b"y", "path": "1.png"}]], "scores": [[1, 2]]})
    parquet.write_table(table, tmp_path / "train.parquet")
    config = replace(config, data_path=str(tmp_path / "train.parquet"))
    metadata = provider.open(config, TOKENS, "train", 0).prompt(0).metadata
    assert metadata == {"made": "2026-01-02", "pages": [{"path": "1.png"}], "scores": [1, 2]}


def test_records_that_cannot_be_used_are_bad_prompts(tmp_path: Path, tokenizer: Path) -> None:
    unanswered = {"messages": [{"role": "user", "content": "why?"}]}
    config = replace(config_for(tmp_path, tokenizer, [unanswered, *RECORDS]), shuffle=False)
    provider.validate(config, TOKENS)
    prompts = provider.open(config, TOKENS, "train", 0)
    assert isinstance(prompts, SkippingPromptSet) and prompts.max_bad_samples == 100
    with pytest.raises(BadPromptError, match=r"line:1: has no answer at its end") as found:
        prompts.prompt(0)
    assert found.value.key.endswith("train.jsonl line:1")
    prompts.leave_out({found.value.key})
    image = (tmp_path / "0.png").read_bytes()
    (tmp_path / "0.png").write_bytes(image[:len(image) // 2])
    prompt = prompts.prompt(0)
    with pytest.raises(BadPromptError, match=r"--data-path .*train\.jsonl line:2: undecodable image .*0\.png") as found:
        prompt.pictures()
    assert found.value.key == prompt.key


def test_records_that_are_left_out_move_no_prompt_before_them(tmp_path: Path, tokenizer: Path) -> None:
    records = [{"question": f"{number}?", "answer": str(number)} for number in range(20)]
    prompts = provider.open(config_for(tmp_path, tokenizer, records), TOKENS, "train", 1)
    before = [prompts.prompt(place) for place in range(20)]
    prompts.leave_out({before[7].key})
    assert [prompts.prompt(place).key for place in range(19)] == [each.key for each in before[:7] + before[8:]]


def table_of(folder: Path, count: int, size: int) -> Path:
    """Write a Parquet file of `count` questions in row groups of `size`."""
    numbers = [str(number) for number in range(count)]
    parquet.write_table(pyarrow.table({"question": numbers, "answer": numbers}), folder / "t.parquet",
                        row_group_size=size)
    return folder / "t.parquet"


@pytest.fixture
def read_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the row groups that are read."""
    found: list[int] = []
    read = ParquetRecords.read_block
    monkeypatch.setattr(ParquetRecords, "read_block", lambda self, block: found.append(block) or read(self, block))
    return found


def test_a_pass_reads_each_row_group_once(tmp_path: Path, tokenizer: Path, read_blocks: list[int]) -> None:
    config = replace(config_for(tmp_path, tokenizer, []), data_path=str(table_of(tmp_path, 120, 10)))
    prompts = provider.open(config, TOKENS, "train", 1)
    read_blocks.clear()
    passes = [[int(prompts.prompt(12 * 10 * epoch + place).ground_truth) for place in range(120)]
              for epoch in range(2)]
    assert len(read_blocks) <= 2 * 12
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(120)) and passes[0] != passes[1]
    assert read_blocks[:12] != sorted(read_blocks[:12]) and passes[0][:10] != sorted(passes[0][:10])
    assert len({number // 10 for number in passes[0][:40]}) == 4, "the records of four row groups are mixed"
    # A resumed run, and a rank that encodes images, find the same prompt at an index.
    again = provider.open(config, TOKENS, "train", 1)
    assert [int(again.prompt(place).ground_truth) for place in (170, 3)] == [passes[1][50], passes[0][3]]


def test_prompts_are_measured_in_stored_order(tmp_path: Path, tokenizer: Path, read_blocks: list[int]) -> None:
    config = replace(config_for(tmp_path, tokenizer, []), data_path=str(table_of(tmp_path, 120, 10)))
    prompts = provider.open(config, TOKENS, "train", 1)
    assert isinstance(prompts, StoredPromptSet)
    order = prompts.in_stored_order(range(120))
    assert [int(prompts.prompt(index).ground_truth) for index in order] == list(range(120))
    read_blocks.clear()
    run = parse_as(RlRunConfig, ["--model-provider", "causal_lm", "--seq-length", "64", "--max-completion-tokens", "8",
                                 "--skip-long-prompts"], "")
    fit_prompts(prompts, "train", run, None, 1)
    assert [block for block, _ in itertools.groupby(read_blocks)] == sorted(set(read_blocks)), "each once, in order"


def test_few_row_groups_are_shuffled_together_and_the_checkpoint_tells(tmp_path: Path, tokenizer: Path) -> None:
    """A reader keeps a few groups in memory. Older checkpoints have another order of more groups."""
    config = config_for(tmp_path, tokenizer, [])
    (tmp_path / "many").mkdir()
    few = replace(config, data_path=str(table_of(tmp_path, 40, 10)))
    many = replace(config, data_path=str(table_of(tmp_path / "many", 50, 10)))
    assert provider.stream_fields(few)["shuffle"] is True
    assert provider.stream_fields(many)["shuffle"] == "by row groups"
    assert provider.stream_fields(replace(many, shuffle=False))["shuffle"] is False
    prompts = provider.open(few, TOKENS, "train", 1)
    expected = np.random.default_rng([1, 0, 0]).permutation(40).tolist()
    assert [int(prompts.prompt(place).ground_truth) for place in range(40)] == expected


def test_errors_name_file_and_line(tmp_path: Path, tokenizer: Path) -> None:
    config = config_for(tmp_path, tokenizer, [{"messages": [{"role": "user", "content": "why?"}]}])
    with pytest.raises(ValueError, match=r"--data-path .*train\.jsonl line:1: has no answer at its end"):
        provider.validate(config, TOKENS)


CALL = {"role": "assistant", "content": "I look.", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}


@pytest.mark.parametrize(("answer", "message"), [
    (CALL, "its last answer calls a tool, and completions are scored against text alone"),
    (CALL | {"content": None}, "its last answer calls a tool"),
    ({"role": "assistant", "content": " \n"}, "its last answer, against which completions are scored, has no text"),
    ({"role": "assistant"}, "its last answer, against which completions are scored, has no text"),
])
def test_an_answer_that_is_not_text_is_refused(tmp_path: Path, tokenizer: Path, answer: Any, message: str) -> None:
    config = config_for(tmp_path, tokenizer, [{"messages": [{"role": "user", "content": "why?"}, answer]}])
    with pytest.raises(ValueError, match=rf"--data-path .*train\.jsonl line:1: {message}"):
        provider.validate(config, TOKENS)
