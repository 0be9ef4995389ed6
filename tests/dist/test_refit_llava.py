"""Weights of a LLaVA, of a LLaVA-NeXT and of Qwen-VLs from disjoint vision and language grids in a live vLLM engine.

Both sides see the same images. Log-probs of prompts with and without images after every sync equal the trainer's and
Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mimo.refit.options import RefitOptions
from mimo.rollout.process import EngineProcess
from tests.support import hf_families, refit, refit_llava
from tests.support.spawn import WorkerPool

pytestmark = pytest.mark.slow

MAX_ERROR = 1e-5
MIN_CHANGE = 1e-2
STEPS = 3
LAYOUTS = {"colocated": (1, "--layout colocated"), "disjoint": (2, ""),
           "disjoint-tp2-pp2": (4, "--encoder-tp 2 --llm-pp 2"), "disjoint-pp2": (3, "--llm-pp 2")}
OPTIONS = RefitOptions(backend="gloo", dtype="float32", timeout_s=60, chunk_bytes=10_000, verify=True)


@dataclass(frozen=True)
class Served:
    """The saved model and its engine.

    Attributes:
        folder: with weights, tokenizer and processor.
        process: the engine, which starts with made-up weights.
        prompts: by sample, as vLLM takes them.
        tokens: tokens of each sample, `s`.
        logits: logits of each sample `[s, vocab]`, by transformers.
        names: names of the saved tensors.
    """

    folder: Path
    process: EngineProcess
    prompts: dict[str, dict[str, Any]]
    tokens: dict[str, list[int]]
    logits: dict[str, torch.Tensor]
    names: list[str]


@pytest.fixture(scope="module")
def served(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One engine for the module."""
    yield from _served(pool, tmp_path_factory.mktemp("llava"), refit_llava.NAME)


@pytest.fixture(scope="module")
def served_qwen(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Another one, of a Qwen2.5-VL."""
    yield from _served(pool, tmp_path_factory.mktemp("qwen"), refit_llava.QWEN)


def _served(pool: WorkerPool, folder: Path, name: str) -> Iterator[Served]:
    saved = pool.run(refit_llava.save, str(folder), name, world_size=1)[0]
    options = refit.engine_options(folder, skip_tokenizer_init=False, block_size=32)
    if name == refit_llava.NEXT:
        options = replace(options, max_model_len=96)
    process = EngineProcess(options, setup=refit_llava.allow_stale_caches)
    yield Served(folder, process, **saved)
    process.close()


def next_token(log_probabilities: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Select the log-prob of each token but the first: `[s, vocab]` to `[s - 1]`."""
    return log_probabilities[:-1].gather(-1, torch.tensor(tokens[1:]).unsqueeze(-1)).squeeze(-1)


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_after_three_syncs_equal_the_trainers(pool: WorkerPool, served: Served, layout: str) -> None:
    # Not as the engine's loader spells it: `vision_tower.vision_model.embeddings.class_embedding`.
    assert "vision_tower.embeddings.class_embedding" in served.names
    check_log_probs(pool, served, layout, refit_llava.NAME)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_of_a_qwen_after_three_syncs_equal_the_trainers(pool: WorkerPool, served_qwen: Served,
                                                                  layout: str) -> None:
    check_log_probs(pool, served_qwen, layout, refit_llava.QWEN)


@pytest.mark.timeout(900)
def test_log_probs_of_a_llava_next_after_three_syncs_equal_the_trainers(
        pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> None:
    for served in _served(pool, tmp_path_factory.mktemp("next"), refit_llava.NEXT):
        assert "image_newline" in served.names
        for layout in ("colocated", "disjoint-tp2-pp2"):
            check_log_probs(pool, served, layout, refit_llava.NEXT)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["refit-qwen3-vl", "refit-qwen3-vl-moe"])
def test_log_probs_of_a_qwen3_after_three_syncs_equal_the_trainers(
        pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    for served in _served(pool, tmp_path_factory.mktemp("qwen3"), name):
        for layout in ("colocated", "disjoint-pp2"):
            check_log_probs(pool, served, layout, name)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", refit_llava.QWENS)
def test_the_engine_answers_prompts_with_videos_as_the_trainer(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    (found,) = pool.run(refit_llava.video_log_probs, str(tmp_path), name, world_size=1)
    prompt, tokens, ours = found
    options = refit.engine_options(tmp_path, skip_tokenizer_init=False, limit_mm_per_prompt={"image": 1, "video": 2})
    process = EngineProcess(replace(options, load_format="auto", max_model_len=128))
    try:
        theirs = process.handle.prompt_logprobs([prompt])[0]
    finally:
        process.close()
    assert len(theirs) == len(tokens) - 1
    assert error(ours, torch.tensor(theirs)) <= MAX_ERROR


def check_log_probs(pool: WorkerPool, served: Served, layout: str, name: str) -> None:
    """Compare the engine's log-probs with the trainer's after each sync, and after the first with transformers'."""
    world_size, flags = LAYOUTS[layout]
    numbers = {len(prompt.get("multi_modal_data", {"image": ()})["image"]) for prompt in served.prompts.values()}
    assert numbers == {0, 1, 2}, "prompts without images, with one and with two"
    by_rank = pool.run(refit_llava.sync, str(served.folder), tuple(flags.split()), world_size, served.process.handle,
                       OPTIONS, served.prompts, STEPS, "", name, world_size=world_size, timeout_s=300)
    before: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        ours = {key: value for rank in by_rank for key, value in rank[step]["ours"].items()}
        theirs, answers = by_rank[0][step]["theirs"], by_rank[0][step]["answers"]
        assert ours.keys() == theirs.keys() == answers.keys() == served.logits.keys()
        report = by_rank[0][step]["report"]
        assert 0 < report.direct_bytes < report.wire_bytes == sum(rank[step]["report"].sent_bytes for rank in by_rank)
        for key, mine in ours.items():
            prompt = next_token(mine, served.tokens[key])
            assert error(prompt, torch.tensor(theirs[key])) <= MAX_ERROR, (step, key)
            token, logprob, version = answers[key]
            assert version == f"step {step}"
            # The answer, unlike the prompt's log-probs, may come out of the caches.
            assert error(mine[-1, token], torch.tensor(logprob)) <= MAX_ERROR, (step, key)
            if step == 0:
                hugging_face = served.logits[key][:, :hf_families.VOCAB_SIZE].double().log_softmax(-1).float()
                assert error(mine, hugging_face) <= MAX_ERROR, key
            else:
                assert error(mine, before[key]) > MIN_CHANGE
        before = ours


@pytest.mark.timeout(600)
@pytest.mark.parametrize("left", ["", "prefix", "encoder"], ids=lambda left: f"{left or 'no'}-cache-left")
def test_a_prompt_asked_before_a_sync_is_answered_by_the_new_weights(pool: WorkerPool, served: Served,
                                                                     left: str) -> None:
    """And by old ones if the sync leaves one of the engine's caches as it is: so those are in use here."""
    prompts = {key: prompt for key, prompt in served.prompts.items() if "multi_modal_data" in prompt}
    (_, new), = pool.run(refit_llava.sync, str(served.folder), ("--layout", "colocated"), 1, served.process.handle,
                         OPTIONS, prompts, 2, left, world_size=1, timeout_s=300)
    errors = [error(new["ours"][key][-1, token], torch.tensor(logprob)) for key, (token, logprob, _)
              in new["answers"].items()]
    assert len(errors) == len(prompts) > 0
    if left:
        # What an old picture changes of one token may be little, but far more than the error of new ones.
        assert min(errors) > 10 * MAX_ERROR
    else:
        assert max(errors) <= MAX_ERROR
