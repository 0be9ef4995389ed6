"""Rollouts with --top-p and --top-k: the log-probs that come with them, and what importance weights make of them."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from mimo.config.cli import parse_as
from mimo.config.rl import RlConfig
from mimo.config.rl_run import DESCRIPTION, RlRunConfig
from mimo.rl.launch_engine import engine_options
from mimo.rl.losses import SampledTokens, importance_weights, mismatch_metrics, mismatch_totals
from mimo.rollout.engine import Rollout, RolloutEngine, Sampling


def answers(config: RlRunConfig, folder: str, prompts: Sequence[Sequence[int]],
            samplings: Sequence[Sampling]) -> list[list[list[Rollout]]]:
    """Return the engine's answers to all prompts for each way of sampling."""
    engine = RolloutEngine(replace(engine_options(config, Path(folder)), load_format="auto"))
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [engine.generate(asked, sampling, seeds=range(len(prompts))) for sampling in samplings]


pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

VOCAB_SIZE, TEMPERATURE, TOP_P, TOP_K = 99, 0.8, 0.7, 5
MODEL = {"model_type": "qwen3", "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48,
         "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
         "max_position_embeddings": 64, "tie_word_embeddings": False, "initializer_range": 0.25}
PROMPTS = [[1, 2, 3], [50], [7, 7, 7, 7, 90, 3], [98, 11]]
FLAGS = """--model-provider causal_lm --device cpu --no-bf16 --transformer-impl local --seq-length 64 --train-iters 1
--engine-kv-cache-mib 64""".split()
SAMPLINGS = {"top-p": Sampling(8, TEMPERATURE, top_p=TOP_P, n=6, ignore_eos=True),
             "top-k": Sampling(8, TEMPERATURE, top_k=TOP_K, n=6, ignore_eos=True),
             "both": Sampling(8, TEMPERATURE, top_p=TOP_P, top_k=TOP_K, n=6, ignore_eos=True),
             "all": Sampling(8, TEMPERATURE, n=6, ignore_eos=True)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    """A small model and where it is saved."""
    torch.manual_seed(0)
    fields = dict(MODEL)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    built = transformers.AutoModelForCausalLM.from_config(config).eval()
    folder = tmp_path_factory.mktemp("model")
    built.save_pretrained(folder)
    return folder, built.double()


@pytest.fixture(scope="module")
def drawn(model: tuple[Path, transformers.PreTrainedModel]) -> dict[str, list[list[Rollout]]]:
    """Answers of a live engine."""
    config = parse_as(RlRunConfig, FLAGS, DESCRIPTION)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(answers, config, str(model[0]), PROMPTS, list(SAMPLINGS.values())).result(timeout=280)
    return dict(zip(SAMPLINGS, found, strict=True))


def log_probs_of(model: transformers.PreTrainedModel, prompt: list[int], answer: Rollout) -> torch.Tensor:
    """Return the log-probs of the vocabulary at each place of an answer, float64 `[tokens, vocabulary]`."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0, len(prompt) - 1:-1]
    return (logits / TEMPERATURE).log_softmax(-1)


def truncated(log_probs: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the distribution of the likeliest tokens alone: `top_k` of them, of these the fewest with `top_p`."""
    if sampling.top_k:
        least = log_probs.topk(sampling.top_k, dim=-1).values[:, -1:]
        log_probs = log_probs.masked_fill(log_probs < least, -math.inf).log_softmax(-1)
    ordered, order = log_probs.exp().sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    cut = torch.zeros_like(log_probs, dtype=torch.bool).scatter(-1, order, before >= sampling.top_p)
    return log_probs.masked_fill(cut, -math.inf).log_softmax(-1)


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_the_engines_log_probs_are_of_the_truncated_distribution(model, drawn, kind):
    sampling, seen = SAMPLINGS[kind], set()
    for prompt, group in zip(PROMPTS, drawn[kind], strict=True):
        for answer in group:
            expected = truncated(log_probs_of(model[1], prompt, answer), sampling)
            picked = expected[range(len(answer.token_ids)), list(answer.token_ids)]
            torch.testing.assert_close(torch.tensor(answer.logprobs).double(), picked, atol=1e-4, rtol=0)
            seen.add(answer.token_ids)
    assert len(seen) > 12, "answers differ"


def test_importance_weights_are_the_share_of_probability_that_was_kept(model, drawn):
    kept, old, rollout = [], [], []
    for prompt, group in zip(PROMPTS, drawn["top-p"], strict=True):
        for answer in group:
            whole = log_probs_of(model[1], prompt, answer)
            old.append(whole[range(len(answer.token_ids)), list(answer.token_ids)])
            rollout.append(torch.tensor(answer.logprobs))
            kept.append(whole.exp().masked_fill(truncated(whole, SAMPLINGS["top-p"]).isinf(), 0.0).sum(-1))
    ours, theirs, shares = torch.cat(old).float(), torch.cat(rollout), torch.cat(kept)
    sampled = SampledTokens(torch.ones(len(ours), dtype=torch.bool), torch.zeros(len(ours), dtype=torch.long), 1)
    weights, totals = importance_weights(RlConfig(top_p=TOP_P), sampled, ours, theirs)
    torch.testing.assert_close(weights.double(), shares, atol=1e-4, rtol=0)
    assert TOP_P - 1e-4 <= weights.min() < weights.max() <= 1 + 1e-4 and totals.sums["importance_clipped"] == 0
    # So the figures of the mismatch tell of the truncation, within these bounds, though engine and trainer agree.
    metrics = mismatch_metrics(mismatch_totals(sampled, ours, theirs) | totals)
    assert 1e-3 < metrics["gen_kl"] < TOP_P - 1 - math.log(TOP_P)
    assert metrics["max_abs_dlogp"] <= -math.log(TOP_P) + 1e-4
