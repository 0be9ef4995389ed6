"""The pages of configuration keys have every key that is read, and say what happens to it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from providers.common import hf, hf_deepseek, hf_nemotron, hf_qwen3_vl, hf_qwen_vl, hf_radio, hf_text
from providers.common.hf_text import ALIASES
from tests.support import hf_keys


def test_the_page_says_what_happens_to_every_key() -> None:
    pytest.importorskip("transformers")
    assert hf_keys.table() in hf_keys.PAGE.read_text(encoding="utf-8"), "run python -m tests.support.hf_keys"


def test_other_names_of_keys_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for family in hf_keys.families():
        if family.name != "NemotronH_Nano_VL_V2":
            theirs = transformers.AutoConfig.for_model(family.name).attribute_map
            ours = ALIASES.get(family.name, {})
            assert {frozenset(pair) for pair in theirs.items()} == {frozenset(pair) for pair in ours.items()}


PAGE = Path(__file__).resolve().parents[3] / "docs" / "hf_config.md"
NEMOTRON_FIXED = {key for fixed in hf_nemotron.FIXED.values() for key in fixed}
# Heading -> keys with class defaults and keys of which one value is taken, and the functions that read others.
FAMILIES = {
    "Text models": ({key for keys in hf_text.TEXT_DEFAULTS.values() for key in keys} | hf_text.TEXT_FIXED.keys(),
                    (hf_text.text_sizes, hf_text.rope_of, hf_text._check_fixed)),
    "LLaVA": ({key for keys in hf.VISION_DEFAULTS.values() for key in keys},
              (hf.llava_vision, hf._vision_sizes, hf._tower_sizes)),
    "DeepSeek-V3": ({key for keys in hf_deepseek.DEEPSEEK_DEFAULTS.values() for key in keys} | hf_deepseek.FIXED.keys()
                    | set(hf_deepseek.RENAMED.values()), (hf_deepseek.deepseek_sizes,)),
    "Nemotron-H": ({key for keys in hf_nemotron.NEMOTRON_DEFAULTS.values() for key in keys} | NEMOTRON_FIXED,
                   (hf_nemotron.nemotron_sizes, hf_nemotron._check_fixed, hf_nemotron._check_router)),
    "Nemotron VLM": (set(hf_radio.VISION_FIXED), (hf_nemotron.vlm_sizes, hf_radio.radio_sizes,
                                                  hf_radio._transformer_sizes, hf_radio._image_size,
                                                  hf_radio._class_tokens)),
    "Qwen2.5-VL": ({*hf_qwen_vl.TEXT_DEFAULTS, *hf_qwen_vl.VISION_DEFAULTS, *hf_qwen_vl.TOKEN_DEFAULTS},
                   (hf_qwen_vl.qwen2_5_vl_sizes, hf_qwen_vl.language_sizes, hf_qwen_vl.vision_sizes)),
    "Qwen3-VL": ({key for keys in hf_qwen3_vl.TEXT_DEFAULTS.values() for key in keys}
                 | {*hf_qwen3_vl.VISION_DEFAULTS, *hf_qwen_vl.TOKEN_DEFAULTS},
                 (hf_qwen3_vl.qwen3_vl_sizes, hf_qwen3_vl.language_sizes, hf_qwen3_vl.vision_sizes)),
}
# `config["rope_theta"]`, `text.get("head_dim")`
READ = re.compile(r"""\b(?:config|text|values|vision|args)(?:\.get\(|\[)"(\w+)\"""")


def keys_of(functions: Iterable[object]) -> set[str]:
    return {key for function in functions for key in READ.findall(inspect.getsource(function))}  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_that_is_read_is_documented(family: str) -> None:
    section = re.search(rf"^## {family}.*?(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    assert section is not None, "no such heading"
    told = set(re.findall(r"\w+", section[0]))
    known, functions = FAMILIES[family]
    assert sorted((known | keys_of(functions)) - told - {"quantization_config", "vision_config"}) == []
