"""Load the tokenizer of a Hugging Face folder, and refuse what transformers would read wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Tokenizer classes of transformers that use tokenizer.json unchanged.
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def load_tokenizer(folder: str) -> Any:
    """Load the fast Hugging Face tokenizer of a folder as AutoTokenizer does, with the chat template of its processor.

    Raises:
        ValueError: there is none, or transformers would read it wrongly; the message names --tokenizer.
    """
    if not folder:
        raise ValueError("--tokenizer: give the folder of a Hugging Face model; the model's own has no tokenizer")
    if not Path(folder).is_dir():
        raise ValueError(f"--tokenizer {folder}: there is no such folder")
    # Takes seconds to import, and --help does not need it.
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    try:
        saved, named = Path(folder) / "tokenizer.json", _tokenizer_class(folder)
        if saved.is_file() and named in GENERIC_CLASSES:
            # AutoTokenizer returns the same after an import of many seconds, for which every rank would wait.
            logging.set_verbosity_error()
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        else:
            from transformers import AutoTokenizer

            # Where vLLM is installed, transformers would read Mistral's own file, with a class that has no offsets.
            own = {"mistral_format": False} if (Path(folder) / "tekken.json").is_file() else {}
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **own)
        template = Path(folder) / "chat_template.json"
        if template.is_file() and not template.with_suffix(".jinja").is_file():
            tokenizer.chat_template = json.loads(template.read_text())["chat_template"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise ValueError(f"--tokenizer {folder}: not a Hugging Face tokenizer: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
    if not tokenizer.is_fast:
        raise ValueError(f"--tokenizer {folder}: has no tokenizer.json, whose offsets the loss mask needs")
    if not tokenizer.get_vocab():
        raise ValueError(f"--tokenizer {folder}: has no vocabulary; is it the folder of a tokenizer?")
    if saved.is_file() and named not in GENERIC_CLASSES:
        _check_class(folder, tokenizer, named)
    return tokenizer


def _tokenizer_class(folder: str) -> str:
    """Return the class that transformers uses; empty if only the model's config.json names it."""
    path = Path(folder) / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    if "auto_map" in config:  # The class is in the folder itself, and its code is not run.
        return GENERIC_CLASSES[0]
    has_model = (Path(folder) / "config.json").is_file()
    return str(config.get("tokenizer_class") or ("" if has_model else GENERIC_CLASSES[0]))


def _check_class(folder: str, tokenizer: Any, named: str) -> None:
    """Refuse a tokenizer class with which ordinary text has other tokens than in tokenizer.json.

    transformers rebuilds some classes from the vocabulary alone. That is right for their own vocabularies. With others,
    such as a byte-level vocabulary under the name LlamaTokenizer, text is lost.
    """
    file = type(tokenizer.backend_tokenizer).from_file(str(Path(folder) / "tokenizer.json"))
    text = "Two words, 3.14 and\n  na\u00efve lines"
    wanted, given = (each.encode(text, add_special_tokens=False).ids for each in (file, tokenizer.backend_tokenizer))
    if wanted != given:
        raise ValueError(
            f"--tokenizer {folder}: {text!r} has {len(wanted)} tokens in its tokenizer.json and other {len(given)} in "
            f"transformers' class {named}, which tokenizer_config.json names as tokenizer_class; name "
            f"{GENERIC_CLASSES[0]} there to use tokenizer.json as it is")


def keep_spaces(backend: Any) -> None:
    """Let the offsets of a `tokenizers.Tokenizer` include spaces. Ids stay the same.

    A post-processor of byte-level tokenizers may trim spaces off the offsets. A token of spaces alone then has no
    character, and nothing tells whether it belongs to an answer.
    """
    processor = backend.post_processor
    if processor is None:
        return
    # Only what pickle uses tells and sets the options of a post-processor of any kind.
    state = json.loads(processor.__getstate__())
    for each in [state, *state.get("processors", [])]:
        if "trim_offsets" in each:
            each["trim_offsets"] = False
    processor.__setstate__(json.dumps(state).encode())
    backend.post_processor = processor
