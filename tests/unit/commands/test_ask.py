"""`mimo ask` takes models of runs on any layout, and refuses data sets that have no questions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mimo.commands import ask
from mimo.config.cli import parse
from mimo.config.validate import validate, validate_without_data
from providers import causal_lm

SMALL = """--model-provider causal_lm --num-layers 2 --hidden-size 64 --num-attention-heads 2 --ffn-hidden-size 64
--vocab-size 128 --max-position-embeddings 64 --seq-length 64"""


@pytest.mark.parametrize("flags", [
    "--moe-token-dispatcher-type allgather --moe-static-rows --cuda-graphs",
    "--moe-token-dispatcher-type allgather --cuda-graphs", "--moe-gemm cutlass --cuda-graphs"])
def test_a_model_of_experts_on_several_ranks_is_asked_in_one_process(flags: str) -> None:
    config = parse(f"""{SMALL} --num-experts 4 --moe-ffn-hidden-size 64 --dataset-provider mock
        --mock-text-only-fraction 1 --train-iters 1 --llm-dp 2 --llm-ep 2 {flags}""".split())
    validate(config, 2)
    platform: Any = SimpleNamespace(name="cpu")
    found = ask._for_one_process(config, platform, 8)
    assert validate_without_data(found, 1).world_size == 1
    assert found.model_family == config.model_family


@pytest.mark.parametrize("flags", ["", "--model-provider llava --image-token-id 5 --llm-only"])
def test_a_model_of_text_is_asked_in_one_process(flags: str) -> None:
    config = parse(f"{SMALL} --dataset-provider mock --mock-text-only-fraction 1 --train-iters 1 {flags}".split())
    platform: Any = SimpleNamespace(name="cpu")
    assert validate_without_data(ask._for_one_process(config, platform, 8), 1).encoders == ()


def test_a_data_set_without_questions_is_refused(tmp_path: Path) -> None:
    values = causal_lm.provider.hf_config(parse([*SMALL.split(), "--dataset-provider", "mock"]).model_family)
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="--dataset-provider mock does not say how a question is written"):
        ask._config_of_hf(tmp_path, ["--dataset-provider", "mock"])
