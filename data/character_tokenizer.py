"""A tokenizer whose tokens are printable ASCII characters and the line break, for models of a few thousand weights.

`python -m data.character_tokenizer FOLDER` writes it as a Hugging Face tokenizer.
"""

from __future__ import annotations

import argparse
import string
from pathlib import Path
from typing import Any

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
CHARACTERS = "\n" + "".join(chr(code) for code in range(ord(" "), ord("~") + 1))
VOCAB_SIZE = len(SPECIAL) + len(CHARACTERS)
assert set(string.digits + string.ascii_letters + string.punctuation) < set(CHARACTERS)


def build() -> Any:
    """Build the tokenizer. Its ids are `<pad>` 0, `<s>` 1, `</s>` 2, `<unk>` 3, then `CHARACTERS`."""
    # Seconds to import, and --help needs none of it.
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
    # Byte-pair encoding without any merged pair.
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
                                   unk_token="<unk>", clean_up_tokenization_spaces=False)


def write(folder: Path) -> Path:
    """Save the tokenizer in Hugging Face's format and return the folder."""
    build().save_pretrained(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m data.character_tokenizer", description=__doc__)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder to write the tokenizer's files into")
    print(write(parser.parse_args().folder))
