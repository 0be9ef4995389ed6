"""Mixtures of experts in a policy update: what load balancing weighs, and that padding is no load."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mimo.config.rl import RlConfig
from mimo.training.step_metrics import TRACKED
from tests.support import policy_moe
from tests.support.policy_updates import assert_same_updates
from tests.support.spawn import WorkerPool

pytestmark = pytest.mark.slow

# Neither reward, entropy nor reference: what moves parameters is the load-balancing loss.
CONFIG = RlConfig(completions_per_prompt=2, importance_correction="none", max_tokens_per_microbatch=24)
AGGREGATIONS = {
    "token-mean": CONFIG,
    "seq-mean-token-mean": dataclasses.replace(CONFIG, loss_aggregation="seq-mean-token-mean"),
    "seq-mean-token-sum-norm": dataclasses.replace(CONFIG, loss_aggregation="seq-mean-token-sum-norm",
                                                   loss_norm_length=16),
}


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> policy_moe.Outcome:
    (found,) = pool.run(policy_moe.update, (), 1, CONFIG, world_size=1)
    return found


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_load_balancing_weighs_the_same_however_the_policy_loss_is_averaged(pool, alone, aggregation):
    (found,) = pool.run(policy_moe.update, (), 1, AGGREGATIONS[aggregation], world_size=1)
    assert found.results[0].grad_norm == pytest.approx(alone.results[0].grad_norm, rel=1e-5)
    assert alone.results[0].grad_norm > 1e-6 and alone.results[0].metrics["loss"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("world_size", "flags"), [(1, ""), (2, "--llm-dp 2 --llm-ep 2")], ids=["1", "dp2-ep2"])
def test_microbatches_of_equal_load_weigh_as_one(pool, world_size, flags):
    """If all completions are equal, every microbatch has the same loss, however many completions it holds."""
    config = AGGREGATIONS["seq-mean-token-mean"]
    (one,) = pool.run(policy_moe.update, (), 1, dataclasses.replace(config, max_tokens_per_microbatch=100), True,
                      world_size=1)
    found = pool.run(policy_moe.update, tuple(flags.split()), world_size, config, True, world_size=world_size)
    assert_same_updates(one, found, 4 // world_size)


def test_loads_of_all_lanes_are_one(pool):
    """Lanes whose rows differ in length add up their loads as one row of all completions has them.

    Megatron weighs this loss, which is that of all lanes together, by the tokens of one: half as much as one lane does.
    """
    kind = ("--moe-router-load-balancing-type", "global_aux_loss")
    config = dataclasses.replace(CONFIG, max_tokens_per_microbatch=200)
    (expected,) = pool.run(policy_moe.update, kind, 1, config, world_size=1)
    found = pool.run(policy_moe.update, (*kind, "--llm-dp", "2", "--llm-ep", "2"), 2, config, world_size=2)
    (alone,) = expected.results
    for (result,) in (outcome.results for outcome in found):
        assert (result.num_microbatches, result.num_tokens) == (1, alone.num_tokens)
        assert result.moe_losses == pytest.approx(alone.moe_losses, rel=1e-5)
        assert 2 * result.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)


@pytest.mark.parametrize(("kind", "world_size", "flags"), [
    ("seq_aux_loss", 2, "--llm-pp 2"), ("aux_loss", 4, "--llm-pp 2 --llm-tp 2 --sequence-parallel"),
    ("global_aux_loss", 2, "--llm-tp 2 --sequence-parallel"),
], ids=["pp2", "pp2-tp2", "tp2"])
def test_padding_is_no_load(pool, kind, world_size, flags):
    """Pipeline stages hand over microbatches of one size; here one in three of their tokens is padding."""
    kind_flags = ("--moe-router-load-balancing-type", kind, "--moe-per-layer-logging")
    config = dataclasses.replace(CONFIG, max_tokens_per_microbatch=32)
    (expected,) = pool.run(policy_moe.update, kind_flags, 1, config, world_size=1)
    found = pool.run(policy_moe.update, (*kind_flags, *flags.split()), world_size, config, world_size=world_size)
    assert_same_updates(expected, found, expected.results[0].num_microbatches)
    (layer,) = expected.biases
    assert expected.biases[layer].abs().max() > 0
    name, (result,) = TRACKED[kind], expected.results
    assert result.moe_losses.keys() == {name, f"moe/{name}_layer_0", f"moe/{name}_layer_1"}
    # One layer of two has experts, and the least is 1, of an even load.
    assert result.moe_losses[f"moe/{name}_layer_0"] == 0 and 0.9 < result.moe_losses[name] < 4
    assert result.moe_losses[name] == pytest.approx(result.moe_losses[f"moe/{name}_layer_1"])
    for outcome in found:
        assert outcome.results[0].moe_losses == pytest.approx(result.moe_losses, rel=1e-5)
        assert outcome.results[0].peak_memory_bytes == found[0].results[0].peak_memory_bytes
        assert outcome.results[0].peak_memory_bytes["language"] > 0
        assert all(torch.equal(bias, expected.biases[layer]) for bias in outcome.biases.values())
