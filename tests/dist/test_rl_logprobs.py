"""Log-probs and entropy over several processes: those of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
