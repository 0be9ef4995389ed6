"""The page of configuration keys says what happens to each of them."""

from __future__ import annotations

import pytest

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
