"""Prompts of GSM8K's files: order, template, held-out split, what is wrong with a file."""

from __future__ import annotations

import json
import shutil
import sys
from types import ModuleType, SimpleNamespace

import pytest

from data.gsm8k import Config, provider, read_problems
from mimo.protocols import TokenSpec
from mimo.registry import prompt_provider
from mimo.rl.prompts import ManyEndsPromptSet
from mimo.rl.rewards.gsm8k import reward
from tests.support.chat_templates import LLAVA
from tests.support.small_tokenizer import CHATML_TOKENS, write_tokenizer

TOKENS = TokenSpec(400, image_token_id=-1, image_size=0, num_channels=0)
CHATML = ("{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
          "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
          "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}")


def rows(count: int, first: int) -> list[dict[str, str]]:
    return [{"question": f"what is {number} and 1?", "answer": f"it is {number}+1.\n#### {number + 1}"}
            for number in range(first, first + count)]


@pytest.fixture
def files(tmp_path):
    """A folder of seven problems to train on and three that are held out, and a tokenizer."""
    for name, found in (("train-0", rows(4, 0)), ("train-1", rows(3, 4)), ("test", rows(3, 100))):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found) + "\n")
    write_tokenizer(tmp_path / "tokenizer", special=CHATML_TOKENS, chat_template=CHATML)
    return tmp_path


def opened(files, split: str = "train", seed: int = 3, **settings):
    config = Config(data_path=str(files), tokenizer=str(files / "tokenizer"), **settings)
    return provider.open(config, TOKENS, split, seed)


def test_every_pass_has_each_problem_once_in_an_order_of_its_seed(files):
    assert prompt_provider("gsm8k") is provider
    one, same, other = (opened(files, seed=seed) for seed in (3, 3, 4))
    keys = [one.prompt(index).key for index in range(21)]
    assert [same.prompt(index).key for index in reversed(range(21))] == keys[::-1]
    assert [other.prompt(index).key for index in range(21)] != keys
    for start in (0, 7, 14):
        assert sorted(keys[start:start + 7]) == [f"gsm8k/train/{number:06d}" for number in range(7)]
    assert len({*map(tuple, (keys[:7], keys[7:14], keys[14:]))}) > 1


def test_problems_that_are_left_out_never_come_and_the_others_keep_their_names(files):
    prompts = opened(files)
    assert prompts.num_prompts == 7
    prompts.leave_out({"gsm8k/train/000002", "gsm8k/train/000005"})
    assert prompts.num_prompts == 5
    shown = [prompts.prompt(index) for index in range(15)]
    for start in (0, 5, 10):
        assert sorted(prompt.key for prompt in shown[start:start + 5]) == [
            f"gsm8k/train/{number:06d}" for number in (0, 1, 3, 4, 6)]
    assert all(prompt.ground_truth == rows(7, 0)[int(prompt.key[-1])]["answer"] for prompt in shown)
    (again := opened(files)).leave_out({"gsm8k/train/000005", "gsm8k/train/000002"})
    assert [again.prompt(index).key for index in reversed(range(15))] == [prompt.key for prompt in shown][::-1]


def test_held_out_problems_are_those_of_the_test_file(files):
    held_out = opened(files, "valid")
    assert {held_out.prompt(index).metadata["question"] for index in range(9)} == {
        row["question"] for row in rows(3, 100)}


def test_other_forms_of_the_same_questions_beside_the_files_are_not_read(files):
    for split in ("train", "test"):
        (files / f"{split}_socratic.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(7, 0)))
    (files / "training.jsonl").write_text("no JSON")
    assert [len(read_problems(str(files), split)) for split in ("train", "valid")] == [7, 3]


def test_files_that_repeat_a_question_are_refused(files):
    (files / "train-2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(2, 6)))
    with pytest.raises(ValueError, match=r"train-2.jsonl: has a question of train-1.jsonl again, 'what is 6 and 1\?'"):
        read_problems(str(files), "train")
    (files / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(2, 6) * 2))
    assert len(read_problems(str(files), "valid")) == 4, "within one file they may be as they are"


@pytest.mark.parametrize("form", ["chat", "plain"])
def test_the_ground_truth_is_what_the_reward_reads(files, form):
    prompts = opened(files, gsm8k_format=form)
    for index in range(7):
        prompt = prompts.prompt(index)
        right = int(prompt.key.rpartition("/")[2]) + 1
        assert reward(prompt.text, f"so\n#### {right}", prompt.ground_truth, prompt.metadata) == 1.0
        assert reward(prompt.text, f"so\n#### {right + 1}", prompt.ground_truth, prompt.metadata) == 0.0


def test_a_chat_ends_where_the_model_goes_on(files):
    prompt = opened(files, gsm8k_instruction="now").prompt(0)
    question = prompt.metadata["question"]
    assert prompt.text == f"<|im_start|>user\n{question} now<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.token_ids[0] == 3 and prompt.token_ids.count(3) == 2, "special tokens, none added to the template's"
    without = opened(files, gsm8k_instruction="now", gsm8k_thinking=False).prompt(0)
    assert without.text == f"{prompt.text}<think>\n\n</think>\n\n"


def test_a_completion_ends_where_the_template_ends_an_answer(files):
    """Base models have a template whose end of a turn is not the end of a text (`</s>` here)."""
    prompts = opened(files)
    names = prompts._tokenizer.convert_ids_to_tokens(prompts.end_token_ids)
    assert names == ["<|im_end|>", "</s>"] and prompts.end_token_id == prompts.end_token_ids[0]
    assert isinstance(prompts, ManyEndsPromptSet)
    plain = opened(files, gsm8k_format="plain")
    assert plain._tokenizer.convert_ids_to_tokens(plain.end_token_ids) == ["</s>"]
    for template in (CHATML.replace("<|im_end|>", "</s>"), LLAVA,
                     "{% if messages|length > 1 %}{{ raise_exception('one') }}{% endif %}{{ messages[0].content }}"):
        write_tokenizer(files / "tokenizer", special=CHATML_TOKENS, chat_template=template)
        assert opened(files).end_token_ids == (2,)


def test_a_template_that_takes_only_content_parts_is_given_them(files):
    write_tokenizer(files / "tokenizer", special=["<image>"], chat_template=LLAVA)
    prompt = opened(files, gsm8k_instruction="now").prompt(0)
    assert prompt.text == f"USER: {prompt.metadata['question']} now ASSISTANT:"


def test_plain_text_has_no_template(files):
    prompts = opened(files, gsm8k_format="plain", gsm8k_instruction="")
    prompt = prompts.prompt(0)
    assert prompt.text == f"Question: {prompt.metadata['question']}\nAnswer:"
    assert prompts.decode((*prompt.token_ids, prompts.end_token_id)) == prompt.text


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("test.jsonl", None, "has no test.jsonl or test-*.jsonl, and no such .parquet"),
    ("test.jsonl", "\n", "test.jsonl: has no row"),
    ("test.jsonl", "{\n", "test.jsonl: line 1 is not JSON"),
    ("test.jsonl", '{"question": "q"}\n', "row 1 has no question and answer"),
    ("test.jsonl", '["q", "a"]\n', "row 1 has no question and answer"),
    ("test.jsonl", '{"question": "q", "answer": "none"}\n', "the answer of row 1 has no number: 'none'"),
    ("train.parquet", "", "train-0.jsonl and train-1.jsonl and train.parquet: the same problems twice?"),
])
def test_the_fault_of_a_file_is_named(files, name, text, expected):
    if text is None:
        (files / name).unlink()
    else:
        (files / name).write_text(text)
    with pytest.raises(ValueError) as found:
        provider.validate(Config(data_path=str(files), tokenizer=str(files / "tokenizer")), TOKENS)
    assert expected in str(found.value)


def test_flags_that_cannot_work_are_named(files, tmp_path):
    tokenizer = str(files / "tokenizer")
    # transformers makes a tokenizer of a folder that lacks the vocabulary.
    empty = shutil.copytree(write_tokenizer(tmp_path / "whole"), tmp_path / "empty")
    described = json.loads((empty / "tokenizer.json").read_text())
    described["model"] |= {"vocab": {}, "merges": []}
    (empty / "tokenizer.json").write_text(json.dumps(described))
    for config, tokens, expected in (
        (Config(tokenizer=tokenizer), TOKENS, "--data-path: give the folder"),
        (Config(data_path="nowhere", tokenizer=tokenizer), TOKENS, "--data-path nowhere: there is no such folder"),
        (Config(data_path=str(files)), TOKENS, "--tokenizer: give the folder"),
        (Config(data_path=str(files), tokenizer=tokenizer), TokenSpec(9, -1, 0, 0), "the model's --vocab-size is 9"),
        (Config(data_path=str(files), tokenizer=str(write_tokenizer(tmp_path / "bare"))), TOKENS,
         "has no chat template; give --gsm8k-format plain"),
        (Config(data_path=str(files), tokenizer=str(empty), gsm8k_format="plain"), TOKENS, "makes no tokens of"),
    ):
        with pytest.raises(ValueError) as found:
            provider.validate(config, tokens)
        assert expected in str(found.value)


def test_parquet_is_read_where_its_package_is(files, monkeypatch):
    for path in files.glob("*.jsonl"):
        path.rename(path.with_suffix(".parquet"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"test.parquet: Parquet needs the package pyarrow"):
        read_problems(str(files), "valid")
    package = ModuleType("pyarrow")
    package.parquet = SimpleNamespace(read_table=lambda path: SimpleNamespace(
        to_pylist=lambda: [json.loads(line) for line in path.read_text().splitlines() if line]))
    monkeypatch.setitem(sys.modules, "pyarrow", package)
    assert [problem.question for problem in read_problems(str(files), "valid")] == [
        row["question"] for row in rows(3, 100)]
