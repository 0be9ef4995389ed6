"""Log-probs, entropy and policy losses over several processes: those of one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mimo.config.rl import RlConfig
from tests.support import policy_steps
from tests.support.marks import fast_only
from tests.support.policy_steps import Outcome
from tests.support.spawn import WorkerPool

VOCAB, COLUMNS = 93, 128


def full_inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits `[5, 3, COLUMNS]` whose padding is large, labels, and weights of a loss."""
    generator = torch.Generator().manual_seed(2)
    logits = 4 * torch.randn(5, 3, COLUMNS, generator=generator, dtype=torch.float64)
    logits[..., VOCAB:] = 1e3
    labels = torch.randint(0, VOCAB, (5, 3), generator=generator)
    labels[0], labels[1, 0] = torch.tensor([0, VOCAB - 1, 31]), -1
    return logits.to(dtype), labels, torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)


def losses_of(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, shard: Any) -> dict[str, torch.Tensor]:
    """Log-probs and entropy of the same logits, and the gradient of a loss of both, found twice."""
    from mimo.rl.logprobs import entropy, log_probs

    leaf = logits.clone().requires_grad_()
    hidden = leaf * 1.0
    values = log_probs(hidden, labels, shard), entropy(hidden, shard)
    loss = (values[0] * weights[0]).sum() + (values[1] * weights[1]).sum()
    gradients = [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*gradients) and torch.equal(hidden, logits)
    return {"log_probs": values[0].detach(), "entropy": values[1].detach(), "gradient": gradients[0]}


CASES = [(torch.float64, 1.0), (torch.float32, 0.6), (torch.bfloat16, 1.0)]


def sharded(rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    """`losses_of` on this rank's columns, for each dtype and temperature of `CASES`."""
    import torch.distributed as dist

    from mimo.rl.logprobs import VocabShard

    found = []
    for dtype, temperature in CASES:
        logits, labels, weights = full_inputs(dtype)
        own = logits.chunk(world_size, dim=-1)[rank].contiguous()
        found.append(losses_of(own, labels, weights, VocabShard(VOCAB, dist.group.WORLD, temperature)))
    return found


# Of four ranks the last has no token of the vocabulary.
@pytest.mark.parametrize("world_size", [2, 4])
def test_log_probs_and_entropy_of_columns_over_ranks_are_those_of_one_process(pool: WorkerPool, world_size):
    by_rank = pool.run(sharded, world_size, world_size=world_size)
    for (dtype, temperature), found in zip(CASES, zip(*by_rank, strict=True), strict=True):
        logits, labels, weights = full_inputs(dtype)
        wide = logits[..., :VOCAB].double().requires_grad_()
        log_p = (wide / temperature).log_softmax(-1)
        picked = log_p.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1) * (labels >= 0)
        entropies = -(log_p.exp() * log_p).sum(-1)
        ((picked * weights[0]).sum() + (entropies * weights[1]).sum()).backward()
        tolerance = {"atol": 1e-12, "rtol": 1e-12} if dtype == torch.float64 else {"atol": 3e-6, "rtol": 3e-6}
        for outcome in found:
            torch.testing.assert_close(outcome["log_probs"].double(), picked.detach(), **tolerance)
            torch.testing.assert_close(outcome["entropy"].double(), entropies.detach(), **tolerance)
            for name in ("log_probs", "entropy"):
                assert torch.equal(outcome[name], found[0][name])
        gradient = torch.cat([outcome["gradient"] for outcome in found], dim=-1)
        assert gradient.dtype == dtype and (gradient[..., VOCAB:] == 0).all()
        if dtype == torch.bfloat16:  # two gradients are rounded before they are added
            tolerance = {"atol": 0.02, "rtol": 0.02}
        torch.testing.assert_close(gradient[..., :VOCAB].double(), wide.grad, **tolerance)


PPO = RlConfig(clip_ratio_low=0.2, clip_ratio_high=0.2, dual_clip_ratio=2.0, kl_coeff=0.1, entropy_coeff=0.01,
               temperature=0.8, max_tokens_per_microbatch=24)
LOSSES = {
    "ppo": PPO,
    "gspo": dataclasses.replace(PPO, policy_loss="gspo", loss_aggregation="seq-mean-token-mean", kl_type="k2",
                                importance_correction="icepop"),
    "cispo": dataclasses.replace(PPO, policy_loss="cispo", dual_clip_ratio=None, loss_norm_length=16, kl_type="k1",
                                 loss_aggregation="seq-mean-token-sum-norm", importance_correction="sequence",
                                 importance_low=0.9, importance_high=1.1),
}
# name -> ranks, flags, tokens of a microbatch, microbatches of each rank
LAYOUTS = {
    "five-microbatches": (1, "", 18, 5),
    "two-microbatches": (1, "", 48, 2),
    "dp2": (2, "--llm-dp 2", 24, 2),
    "dp2-larger": (2, "--llm-dp 2", 48, 1),
    "tp2": (2, "--llm-tp 2 --sequence-parallel", 24, 4),
    "pp2": (2, "--llm-pp 2", 24, 4),
    "dp2-tp2": (4, "--llm-dp 2 --llm-tp 2", 32, 2),
}


@pytest.fixture(scope="module")
def oracle_of(pool: WorkerPool) -> Callable[[str], Outcome]:
    """The whole batch as one microbatch on one process, computed once for each loss."""

    @functools.cache
    def oracle(kind: str) -> Outcome:
        config = dataclasses.replace(LOSSES[kind], max_tokens_per_microbatch=80)
        (outcome,) = pool.run(policy_steps.run, config, (), 1, 0, world_size=1)
        assert outcome.num_microbatches == 1 and outcome.metrics["clipped_low"] > 0
        assert outcome.metrics["importance_clipped_fraction"] > 0 and outcome.metrics["gen_kl"] > 0
        return outcome

    return oracle


@pytest.mark.parametrize(("layout", "kind"), fast_only(
    [("five-microbatches", "gspo"), ("dp2", "ppo"), ("tp2", "cispo")], itertools.product(LAYOUTS, LOSSES)))
def test_every_layout_and_budget_gives_the_loss_and_gradients_of_one_microbatch(pool, oracle_of, kind, layout):
    world_size, flags, budget, num_microbatches = LAYOUTS[layout]
    config = dataclasses.replace(LOSSES[kind], max_tokens_per_microbatch=budget)
    found = pool.run(policy_steps.run, config, tuple(flags.split()), world_size, budget if world_size > 1 else 0,
                     world_size=world_size)
    assert {outcome.num_microbatches for outcome in found} == {num_microbatches}
    assert policy_steps.differences(oracle_of(kind), found, 1e-5) == []


def test_rows_without_their_left_padding_give_the_log_probs_of_packed_sequences(pool, oracle_of):
    expected = oracle_of("ppo").log_probs
    (found,) = pool.run(policy_steps.log_probs_of_rows, PPO, world_size=1)
    assert sum(values.count_nonzero().item() for values in expected.values()) > 50
    for row, values in expected.items():
        torch.testing.assert_close(found[row], values, atol=1e-5, rtol=1e-5)
