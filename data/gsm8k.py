"""Prompts from GSM8K (arXiv:2110.14168), or other questions with a number as answer, in the files of a folder.

The folder has files `train.jsonl` or `train-*.jsonl`, and `test` likewise, or .parquet files of these names. Rows have
the fields `question` and `answer`. An answer is a number, or ends with `#### <number>`. The folders
`grade_school_math/data` of github.com/openai/grade-school-math and `main` of openai/gsm8k on the Hugging Face Hub have
this format. Other files, such as `train_socratic.jsonl` with the same questions, are not read. The test files are held
out.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from data.digests import TOKENIZER_FILES, content, content_of_folder
from data.indexed import ShuffledRecords
from mimo.protocols import TokenSpec
from mimo.rl.prompts import Prompt, without_ends
from mimo.rl.rewards.gsm8k import answer as number_of

FILES = {"train": "train", "valid": "test"}
SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Config:
    """Prompts `gsm8k`: word problems from files."""

    data_path: str = ""
    """Folder with train.jsonl or train-*.jsonl, and test likewise, or .parquet; rows have question and answer."""
    tokenizer: str = ""
    """Folder of the model's Hugging Face tokenizer."""
    gsm8k_format: Literal["chat", "plain"] = "chat"
    """chat: a turn of a user in the tokenizer's chat template; plain: "Question: ... Answer:", for base models."""
    gsm8k_instruction: str = 'Let\'s think step by step and output the final answer after "####".'
    """Text that follows each question."""
    gsm8k_thinking: bool = True
    """Value of enable_thinking in the chat template, if it has such a switch, as Qwen3's does."""


@dataclass(frozen=True)
class Problem:
    """Row of a file.

    Attributes:
        question: the problem.
        answer: text with the number.
    """

    question: str
    answer: str


class Gsm8k:
    """One split in the order of a seed, over and over; a `mimo.rl.prompts.PromptSet`.

    Attributes:
        end_token_id: ends a completion.
        end_token_ids: all tokens that do: the one that the chat template writes after an answer, and the tokenizer's.
        pad_token_id: fills rows.
        problems: all problems in the order of the files, including those that are left out.
    """

    def __init__(self, config: Config, tokens: TokenSpec, split: str, seed: int) -> None:
        """Read the files of a split and open the tokenizer.

        Raises:
            ValueError: the data cannot work; the message names flags and values, or file and row.
        """
        self.problems = read_problems(config.data_path, split)
        self._config, self._split = config, split
        self._rows = ShuffledRecords(len(self.problems), seed, split)
        from data.hf_tokenizer import load_tokenizer  # takes seconds to import, and --help does not need it

        self._tokenizer = load_tokenizer(config.tokenizer)
        largest = max(self._tokenizer.get_vocab().values())
        if largest >= tokens.vocab_size:
            raise ValueError(f"--tokenizer {config.tokenizer} has token ids up to {largest}, the model's --vocab-size "
                             f"is {tokens.vocab_size}")
        if self._tokenizer.eos_token_id is None:
            raise ValueError(f"--tokenizer {config.tokenizer} has no token that ends a text (eos_token)")
        if config.gsm8k_format == "chat" and not self._tokenizer.chat_template:
            raise ValueError(f"--tokenizer {config.tokenizer} has no chat template; give --gsm8k-format plain")
        self.end_token_ids: tuple[int, ...] = (self._tokenizer.eos_token_id,)
        if config.gsm8k_format == "chat":
            from data.chat_template import ChatTemplate

            self._template = ChatTemplate(f"--tokenizer {config.tokenizer}", str(self._tokenizer.get_chat_template()),
                                          self._tokenizer)
            self.end_token_ids = tuple(dict.fromkeys((*self._end_of_turn(), *self.end_token_ids)))
        self.end_token_id = self.end_token_ids[0]
        padding = self._tokenizer.pad_token_id
        self.pad_token_id: int = self._tokenizer.eos_token_id if padding is None else padding
        self.prompt(0)  # so that a template that refuses it raises its error now

    @property
    def num_prompts(self) -> int:
        return len(self._rows)

    def leave_out(self, keys: Collection[str]) -> None:
        """Leave out the problems of these names. The others keep their names."""
        self._rows.leave_out(keys, self._key)

    def prompt(self, index: int) -> Prompt:
        """Return the problem at an index. Every pass over the files has another order."""
        number = self._rows[index]
        problem = self.problems[number]
        said = f"{problem.question.strip()} {self._config.gsm8k_instruction}".strip()
        if self._config.gsm8k_format == "chat":
            text = self._chat(said)
            ids = self._tokenizer(text, add_special_tokens=self._template.adds_special_tokens(text))["input_ids"]
        else:
            text = f"Question: {said}\nAnswer:"
            ids = self._tokenizer(text)["input_ids"]
            if ids and ids[-1] == self._tokenizer.eos_token_id:
                ids = ids[:-1]
        if not ids:
            raise ValueError(f"--tokenizer {self._config.tokenizer} makes no tokens of {text!r}; does the folder have "
                             "its vocabulary (tokenizer.json)?")
        return Prompt(self._key(number), text, tuple(ids), problem.answer,
                      {"question": problem.question})

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(without_ends(token_ids, self.end_token_ids), skip_special_tokens=True))

    def _key(self, number: int) -> str:
        return f"gsm8k/{self._split}/{number:06d}"

    def _end_of_turn(self) -> list[int]:
        """Return the token that the template writes after an answer, as a list; empty if it writes none.

        Base models have a template whose end of a turn is not the tokenizer's end of a text.
        """
        turns = [self._template.message("user", "one"), self._template.message("assistant", "two")]
        try:
            text, _ = self._template.render(turns)
        except ValueError:
            return []  # a template for questions alone
        _, answer, after = text.rpartition("two")
        written = {token.content: number for number, token in self._tokenizer.added_tokens_decoder.items()
                   if answer and after.lstrip().startswith(token.content)}
        return [written[max(written, key=len)]] if written else []

    def _chat(self, said: str) -> str:
        """Render a user's turn by the template, up to where the model continues."""
        try:
            text, _ = self._template.render([self._template.message("user", said)], add_generation_prompt=True,
                                            enable_thinking=self._config.gsm8k_thinking)
        except ValueError as error:
            raise ValueError(f"{error}; --gsm8k-format plain needs no chat template") from error
        if said not in text:
            raise ValueError(f"--tokenizer {self._config.tokenizer}: the chat template leaves out what the user says; "
                             "give --gsm8k-format plain")
        return text


class Gsm8kProvider:
    """The `gsm8k` prompts; see the docstring of this module."""

    Config: ClassVar[type] = Config

    def stream_fields(self, config: Config) -> dict[str, Any]:
        """Return all fields, with digests of the tokenizer and of the training problems in place of their paths."""
        return vars(config) | {
            "data_path": content(problem_files(config.data_path, "train"), Path(config.data_path)),
            "tokenizer": content_of_folder(config.tokenizer, TOKENIZER_FILES)}

    def validate(self, config: Config, tokens: TokenSpec) -> None:
        """Raise ValueError, with flags and values, if the flags cannot work. Reads both splits."""
        for split in FILES:
            self.open(config, tokens, split, 0)

    def open(self, config: Config, tokens: TokenSpec, split: str, seed: int) -> Gsm8k:
        """Open a split, `train` or `valid`. Raises the errors of `validate`."""
        return Gsm8k(config, tokens, split, seed)


def read_problems(folder: str, split: str) -> list[Problem]:
    """Read all rows of a split, in the order of file names.

    Args:
        folder: `--data-path`.
        split: `train` or `valid`.

    Raises:
        ValueError: there is no such folder or file, a row cannot be used, or files repeat a question.
    """
    if not folder:
        raise ValueError("--data-path: give the folder of the data set gsm8k")
    if not Path(folder).is_dir():
        raise ValueError(f"--data-path {folder}: there is no such folder")
    files = problem_files(folder, split)
    if not files:
        name = FILES[split]
        raise ValueError(f"--data-path {folder}: has no {name}.jsonl or {name}-*.jsonl, and no such .parquet")
    if len({path.suffix for path in files}) > 1:
        raise ValueError(f"--data-path {folder}: has {' and '.join(path.name for path in files)}: the same problems "
                         "twice? Leave one kind of file there")
    by_file = {path: [_checked(path, number, row) for number, row in enumerate(_rows(path), 1)] for path in files}
    if not any(by_file.values()):
        raise ValueError(f"{files[0]}: has no row")
    _refuse_repeats(by_file)
    return [problem for problems in by_file.values() for problem in problems]


def problem_files(folder: str, split: str) -> list[Path]:
    """Return the files of a split, in the order of their names."""
    # Other files may begin with the same word, such as train_socratic.jsonl with the same questions.
    return sorted(path for separator in ".-" for path in Path(folder).glob(f"{FILES[split]}{separator}*")
                  if path.suffix in SUFFIXES)


def _refuse_repeats(by_file: Mapping[Path, Sequence[Problem]]) -> None:
    """Raise ValueError if two files share a question, which would count twice."""
    first: dict[str, Path] = {}
    for path, problems in by_file.items():
        for problem in problems:
            other = first.setdefault(problem.question.strip(), path)
            if other != path:
                raise ValueError(f"{path}: has a question of {other.name} again, {problem.question[:100]!r}; leave one "
                                 "of the files there")


def _rows(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}: line {number} is not JSON: {error}") from error


def _parquet_rows(path: Path) -> list[Any]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"{path}: Parquet needs the package pyarrow (pip install pyarrow); .jsonl needs "
                         "none") from error
    try:
        rows: list[Any] = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are subclasses of these
        raise ValueError(f"{path}: cannot be read: {error}") from error
    return rows


def _checked(path: Path, number: int, row: Any) -> Problem:
    fields = [row.get(name) if isinstance(row, dict) else None for name in ("question", "answer")]
    if not all(isinstance(value, str) and value.strip() for value in fields):
        raise ValueError(f"{path}: row {number} has no question and answer as text: {str(row)[:100]}")
    if number_of(fields[1]) is None:
        raise ValueError(f"{path}: the answer of row {number} has no number: {fields[1][-100:]!r}")
    return Problem(*fields)


provider = Gsm8kProvider()
