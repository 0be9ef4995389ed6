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
from mimo.protocols import Question
from mimo.registry import model_provider
from providers import causal_lm

SMALL = """--model-provider causal_lm --num-layers 2 --hidden-size 64 --num-attention-heads 2 --ffn-hidden-size 64
--vocab-size 128 --max-position-embeddings 64 --seq-length 64"""
LLAVA = f"{SMALL} --model-provider llava --max-position-embeddings 2048 --image-token-id 5"
NEMOTRON = "--model-provider nemotron-moe-vlm-tiny --no-vision-dynamic-resolution"


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


@pytest.mark.parametrize("flags", [
    "--recompute selective --recompute-modules moe_act --transformer-impl transformer_engine",
    "--recompute full --recompute-num-layers 1"])
def test_an_answer_recomputes_nothing(flags: str) -> None:
    """The layers of a CPU cannot recompute moe_act, for example."""
    config = parse(f"""{LLAVA} --num-experts 4 --moe-ffn-hidden-size 64 --dataset-provider mock --train-iters 1
        --device cuda --encoder-recompute selective --encoder-recompute-modules mlp {flags}
        --seq-length 1024""".split())
    validate_without_data(config, 2)
    for name in ("cpu", "cuda"):
        platform: Any = SimpleNamespace(name=name)
        found = ask._for_one_process(config, platform, 8)
        validate_without_data(found, 1)
        assert (found.model.recompute, found.model.encoder_recompute) == ("none", "none")


@pytest.mark.parametrize("flags", ["", "--model-provider llava --image-token-id 5 --llm-only"])
def test_a_model_of_text_is_asked_in_one_process(flags: str) -> None:
    config = parse(f"{SMALL} --dataset-provider mock --mock-text-only-fraction 1 --train-iters 1 {flags}".split())
    platform: Any = SimpleNamespace(name="cpu")
    assert validate_without_data(ask._for_one_process(config, platform, 8), 1).encoders == ()


@pytest.mark.parametrize(("flags", "length"), [
    (f"{LLAVA} --vision-image-size 336", 577), (f"{LLAVA} --vision-image-size 28", 8),
    (f"{LLAVA} --vision-dynamic-resolution --no-vision-class-token", 8),
    (f"{LLAVA} --model-provider llava_next", 577 + 24 * 25),  # the whole image, then 24 rows of its tile
    (f"{NEMOTRON} --vision-image-size 64 --vision-image-width 128", 33)])
def test_an_image_may_have_more_tokens_than_the_answer(flags: str, length: int) -> None:
    """The default of 64 tokens leaves no room for an image of LLaVA-1.5, which has 576."""
    config = parse(f"{flags} --dataset-provider mock --train-iters 1".split())
    platform: Any = SimpleNamespace(name="cpu")
    found = ask._for_one_process(config, platform, 8)
    assert validate_without_data(found, 1).encoders and found.train.seq_length == length


def test_a_question_may_be_shorter_than_an_image_and_not_longer_than_the_model() -> None:
    platform: Any = SimpleNamespace(name="cpu")
    config = ask._for_one_process(parse(f"{LLAVA} --dataset-provider mock --train-iters 1".split()), platform, 8)
    layout, provider = validate_without_data(config, 1), model_provider("llava")

    def check(length: int) -> None:
        sample: Any = SimpleNamespace(tokens=[0] * length, image_sizes=[])
        question = Question(sample, end_token_ids=())
        ask._check_length(ask.Asked(config, Path(), False, provider, question, 8), layout)

    check(5)
    check(2040)
    with pytest.raises(ValueError, match="a question of 2041 tokens with --max-tokens 8: --seq-length 2049 exceeds"):
        check(2041)


def test_sizes_that_fit_no_model_are_named() -> None:
    config = parse(f"{LLAVA} --vision-patch-size 0 --dataset-provider mock --train-iters 1".split())
    platform: Any = SimpleNamespace(name="cpu")
    with pytest.raises(ValueError, match="--vision-patch-size 0"):
        ask._for_one_process(config, platform, 8)


def test_a_data_set_without_questions_is_refused(tmp_path: Path) -> None:
    values = causal_lm.provider.hf_config(parse([*SMALL.split(), "--dataset-provider", "mock"]).model_family)
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="--dataset-provider mock does not say how a question is written"):
        ask._config_of_hf(tmp_path, ["--dataset-provider", "mock"])
