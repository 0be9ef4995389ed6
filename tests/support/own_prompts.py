"""Prompts of one's own, lines of {"question": "...", "answer": "..."}, and a reward for their completions."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mimo.rl.prompts import Prompt


@dataclass(frozen=True)
class Config:
    """Prompts: questions with answers."""

    qa_folder: str = "qa"
    """Folder of train.jsonl and valid.jsonl."""
    tokenizer: str = ""
    """Folder of the model's Hugging Face tokenizer."""


class Questions:  # a PromptSet
    def __init__(self, config, split, seed):
        from data.hf_tokenizer import load_tokenizer  # not at the top: seconds to import, and --help needs none of it

        self.rows = [json.loads(line) for line in (Path(config.qa_folder) / f"{split}.jsonl").read_text().splitlines()]
        self.tokenizer, self.split, self.seed = load_tokenizer(config.tokenizer), split, seed
        self.end_token_id, self.pad_token_id = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id

    def prompt(self, index):  # without end; the same for the same seed, split and index
        epoch, place = divmod(index, len(self.rows))
        number = int(np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))[place])
        text, answer = self.rows[number]["question"], self.rows[number]["answer"]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Prompt(f"{self.split}/{number}", text, tuple(ids), answer)

    def decode(self, token_ids):
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


class OwnPrompts:
    Config = Config

    def validate(self, config, tokens):  # before anything starts; the user sees the message of a ValueError
        for split in ("train", "valid"):
            if not (Path(config.qa_folder) / f"{split}.jsonl").exists():
                raise ValueError(f"--qa-folder {config.qa_folder}: has no {split}.jsonl")

    def open(self, config, tokens, split, seed):
        return Questions(config, split, seed)


def reward(prompt, completion, ground_truth, metadata):  # a finite number: 1 for the answer, less for other digits
    said = completion.strip()
    return 1.0 if said == ground_truth else 0.5 * sum(letter.isdigit() for letter in said) / max(len(said), 1)


provider = OwnPrompts()
