"""The adapter of the rollout engine around a small model: caches, versions, answers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mimo.refit.rendezvous import RefitError
from mimo.rl.probe import Expected, compare_logprobs
from mimo.rollout.engine import EngineOptions, RolloutEngine, Sampling
from tests.support.echo_engine import engine_options
from tests.support.refit_faults import PROMPTS, Ranks, logprobs_of, whole_weights

pytestmark = pytest.mark.usefixtures("plain_engine")
CACHES = ["prefix", "mm", "encoder"]


def synced(seed: int = 0) -> tuple[Ranks, RolloutEngine]:
    ranks, engine = Ranks.of(1, seed), RolloutEngine(engine_options())
    assert ranks.connect(engine, 1) == [None]
    ranks.send("policy 7")
    return ranks, engine


def test_caches_of_old_weights_are_emptied_before_and_after() -> None:
    """Bug 32: prefix, inputs of images and outputs of encoders; before, too, for the update may fail."""
    ranks, engine = Ranks.of(1), RolloutEngine(engine_options())
    ranks.connect(engine, 1)
    emptied = engine._llm.emptied
    engine.start_weight_update()
    assert emptied == CACHES
    ranks.send("policy")
    assert emptied == CACHES * 3


def test_every_answer_has_the_version_of_its_weights() -> None:
    ranks, engine = synced()
    sampling = Sampling(max_tokens=1, temperature=0.0)
    assert [each.version for answers in engine.generate(PROMPTS, sampling) for each in answers] == ["policy 7"] * 2
    ranks.set(1)
    ranks.send("policy 8")
    (answer,), _ = engine.generate(PROMPTS, sampling)
    tokens = [*PROMPTS[0]["prompt_token_ids"], answer.token_ids[0]]
    assert (answer.version, answer.finish_reason) == ("policy 8", "length")
    assert answer.logprobs[0] == pytest.approx(logprobs_of(whole_weights(1), tokens)[-1], abs=1e-5)


def test_an_update_without_a_trainer_is_refused() -> None:
    engine = RolloutEngine(engine_options(load_format="auto"))
    assert engine.version == "initial"
    with pytest.raises(RefitError, match="has not met a trainer"):
        engine.start_weight_update()
    with pytest.raises(RefitError, match="no complete weights"):
        engine.prompt_logprobs(PROMPTS)


def test_finishing_what_has_not_come_is_refused() -> None:
    _, engine = synced()
    engine.start_weight_update()
    with pytest.raises(RefitError, match="ends without all of its weights"):
        engine.finish_weight_update("policy 9")
    with pytest.raises(RefitError, match="no complete weights"):
        engine.generate(PROMPTS, Sampling(max_tokens=1))


def test_the_probe_finds_one_wrong_weight() -> None:
    ranks, engine = synced()
    ours = [logprobs_of(whole_weights(0), prompt["prompt_token_ids"]) for prompt in PROMPTS]
    expected = Expected(ours, ours, 2.0)
    assert compare_logprobs(engine, PROMPTS, expected).num_tokens == 5
    with torch.no_grad():
        engine._llm.workers[0].model.blocks[3].weight[2, 4] += 0.1
    with pytest.raises(RefitError, match="engine and trainer do not compute with the same weights"):
        compare_logprobs(engine, PROMPTS, expected)


def test_extra_arguments_replace_those_of_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    options = dataclasses.replace(engine_options(), extra={"dtype": "bfloat16", "enforce_eager": True})
    assert RolloutEngine(options)._llm.others["dtype"] == "bfloat16"
    assert EngineOptions("m", "float32", tensor_parallel_size=2, pipeline_parallel_size=3).num_workers == 6
    for asked in ({"extra": {"data_parallel_size": 2}}, {"environment": {"VLLM_DP_SIZE": "2"}}):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="2: the size of vLLM"):
            patch.setenv("VLLM_DP_SIZE", "1")  # and undone
            RolloutEngine(dataclasses.replace(engine_options(), **asked))


def test_an_answer_of_a_ping_may_come_after_the_errors_of_the_call_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM raises the first worker's error and keeps those of the others, each for a later call."""
    engine = RolloutEngine(dataclasses.replace(engine_options(), tensor_parallel_size=4))
    left = [RefitError("worker 1"), RefitError("worker 2"), RefitError("worker 3")]

    def answer(call: str) -> None:
        if left:
            raise left.pop(0)

    monkeypatch.setattr(engine, "_rpc", answer)
    engine.ping()
    left += 4 * [RefitError("a worker that is ill")]
    with pytest.raises(RefitError, match="is ill"):
        engine.ping()
