"""A byte-level tokenizer of a few hundred tokens, saved as Hugging Face saves them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = ["what is in the picture?", "a red cat and a blue dog\n\nthe user and the assistant see <image>"] * 4
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
# An image in rows that are made with this tokenizer: a token that it does not have.
IMAGE = 390


def write_tokenizer(
    folder: Path, *, special: Sequence[str] = (), chat_template: str | None = None, bos: bool = True, eos: bool = True
) -> Path:
    """Ids: `<pad>` 0, `<s>` 1, `</s>` 2, then `special`, then bytes and merges."""
    from transformers import PreTrainedTokenizerFast  # imported late: it imports torch

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<pad>", "<s>", "</s>", *special],
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Saved with limits, which are those of whoever trained it and must not reach the data set.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>" if bos else None,
                                    eos_token="</s>" if eos else None, additional_special_tokens=list(special))
    saved.chat_template = chat_template
    saved.save_pretrained(folder)
    return folder


def shown(tokenizer: str | Path, tokens: Any, mask: Any) -> str:
    """Return tokens as text, an image as #, runs of targets between brackets. `tokenizer` is a folder."""
    from transformers import AutoTokenizer

    backend = AutoTokenizer.from_pretrained(tokenizer)
    text = ""
    for is_target, run in itertools.groupby(zip(tokens.tolist(), mask.tolist(), strict=True), key=lambda pair: pair[1]):
        words = "".join("#" if token == IMAGE else backend.decode([token]) for token, _ in run)
        text += f"[{words}]" if is_target else words
    return text


def text_of(config: Any, row: Any) -> str:
    """Return a row of a data set as `shown` shows it."""
    return shown(config.tokenizer, row.tokens, row.target_mask)
