"""A tokenizer of words, for the scripts that write shards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from data.prompts import IMAGE_MARKER

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endgeneration %}"
    "{% else %}{{ ' ' + message['content'] }}{% endif %}{% endfor %}"
)


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
