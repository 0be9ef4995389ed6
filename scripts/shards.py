"""Shards of several splits, and a tokenizer of words, for the scripts that prepare data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.energon.shards import Member, prepare_shards, write_shard
from data.prompts import IMAGE_MARKER

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endgeneration %}"
    "{% else %}{{ ' ' + message['content'] }}{% endif %}{% endfor %}"
)


def write_splits(folder: Path, splits: Mapping[str, range], num_shards: int,
                 members: Callable[[str, int], Iterable[Member]]) -> None:
    """Write the shards of the splits with Energon's metadata.

    Args:
        folder: the folder to write.
        splits: indices of the samples of each split.
        num_shards: shards of train; any other split has one.
        members: returns name and content of each part of a sample, from its split and index.
    """
    folder.mkdir(parents=True)
    names = []
    for split, all_indices in splits.items():
        count = min(num_shards if split == "train" else 1, len(all_indices))
        for shard, indices in enumerate(np.array_split(all_indices, count)):
            names.append(f"{split}-{shard:03d}.tar")
            write_shard(folder / names[-1], (member for index in indices for member in members(split, int(index))))
    prepare_shards(folder, names, list(splits))


def write_word_tokenizer(folder: Path, words: Mapping[str, int], pre_tokenizer: PreTokenizer) -> None:
    """Write a Hugging Face tokenizer with an id for each word.

    Args:
        folder: folder to write.
        words: ids by word, `<pad>`, `<bos>`, `<eos>` and the image marker among them. Other words become `<pad>`.
        pre_tokenizer: cuts text into words.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel(dict(words), unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizer
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        additional_special_tokens=[IMAGE_MARKER],
    )
    saved.chat_template = CHAT_TEMPLATE
    saved.save_pretrained(folder)
