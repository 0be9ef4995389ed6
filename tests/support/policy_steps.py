"""One backward pass of a policy loss through the trainer's schedule, on any layout; inside a worker process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mimo.config.cli import parse
from mimo.config.rl import RlConfig
from mimo.config.validate import validate
from mimo.data.batch import Microbatch, TextBatch
from mimo.protocols import LANGUAGE
from mimo.rl.batching import plan_microbatches
from mimo.rl.logprobs import VocabShard, entropy, log_normaliser, log_probs
from mimo.rl.losses import (
    IMPORTANCE_SUMS,
    LOSS_SUMS,
    MISMATCH_MAXIMA,
    MISMATCH_SUMS,
    PolicyBatch,
    Totals,
    add_totals,
    importance_weights,
    loss_count,
    loss_metrics,
    mismatch_metrics,
    mismatch_totals,
    policy_loss,
)
from mimo.rl.packing import NO_LABEL, PackedRows, pack_rows, token_runs
from tests.support import equality
from tests.support.global_state import Piece, assemble, read_gradients, worst_errors

VOCAB_SIZE = 93
# Rows have padding on both sides; prompts and completions of these lengths.
PROMPTS = (3, 1, 5, 2, 4, 1, 2, 3)
COMPLETIONS = (9, 4, 1, 12, 6, 15, 3, 7)
WIDTH = 24
FLAGS = f"""--model-provider causal_lm --dataset-provider mock --device cpu --no-bf16 --transformer-impl local
--global-batch-size 8 --micro-batch-size 1 --train-iters 1 --lr-decay-style constant --num-generations 0
--watchdog-timeout-s 60 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2
--ffn-hidden-size 48 --vocab-size {VOCAB_SIZE} --make-vocab-size-divisible-by 64""".split()


@dataclass
class Outcome:
    """Results on a rank.

    Attributes:
        metrics: metrics of the global batch.
        log_probs: log-probs of the sequences of this rank, row number -> `[WIDTH]`; last stage only.
        gradients: gradients of the loss.
        num_microbatches: number of microbatches of this rank.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    log_probs: dict[int, torch.Tensor] = field(default_factory=dict)
    gradients: list[Piece] = field(default_factory=list)
    num_microbatches: int = 0


def rollouts() -> dict[str, torch.Tensor]:
    """Return all rows of the global batch, `[8, WIDTH]` each, as rollouts would give them; the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(0, VOCAB_SIZE, (len(PROMPTS), WIDTH), generator=generator)
    attention, response = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        start = (5 * row) % (WIDTH - prompt - completion + 1)
        attention[row, start : start + prompt + completion] = True
        response[row, start + prompt : start + prompt + completion] = True
    noise = torch.randn(4, *ids.shape, generator=generator)
    old = -4.5 + noise[0]
    return {"ids": ids, "attention": attention, "response": response, "old": old, "rollout": old + 0.5 * noise[1],
            "reference": old + 0.3 * noise[2], "advantages": noise[3, :, :1].expand(ids.shape)}


def microbatch(packed: PackedRows) -> Microbatch:
    """Packed rows as the language side of a microbatch."""
    length = packed.input_ids.shape[1]
    return Microbatch(TextBatch(
        ("packed",), {}, packed.input_ids, packed.labels.clamp(min=0), torch.ones(1, length), packed.position_ids, {},
        length, packed.packed), {})


def policy_batch(config: RlConfig, packed: PackedRows, rows: dict[str, torch.Tensor]) -> tuple[PolicyBatch, Totals]:
    """Return the inputs of the loss for these rows and the figures of the mismatch."""
    sampled = packed.sampled(rows["response"])
    old, rollout = packed.take(rows["old"]), packed.take(rows["rollout"])
    weights, clipped = importance_weights(config, sampled, old, rollout)
    batch = PolicyBatch(sampled, packed.take(rows["advantages"]), old, packed.take(rows["reference"]), weights)
    return batch, clipped | mismatch_totals(sampled, old, rollout)


def run(rank: int, config: RlConfig, layout_flags: tuple[str, ...], world_size: int, seq_length: int) -> Outcome:
    """Loss and gradients of the whole batch on this rank of a layout.

    Args:
        rank: this process.
        config: loss and budget.
        layout_flags: flags of the layout.
        world_size: number of processes.
        seq_length: every microbatch is padded to it, as the pipeline needs; 0: to nothing, on one process.
    """
    from mimo.training.step import LossScale, run_schedule

    parts = equality.make_trainer(
        *_config_and_layout(layout_flags, world_size, seq_length or config.max_tokens_per_microbatch))
    grids, rows, outcome = parts.grids, rollouts(), Outcome()
    groups, place = grids.collections[LANGUAGE], grids.layout.language.coordinates(rank)
    lengths = [prompt + completion for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)]
    plan = plan_microbatches(lengths, grids.layout.language.dp, config.max_tokens_per_microbatch)[place["dp"]]
    chosen = [{name: values[members] for name, values in rows.items()} for members in plan]
    packed = [pack_rows(own["ids"], own["attention"], pad_token_id=0, multiple=max(seq_length, 1)) for own in chosen]
    remaining = iter(zip(plan, packed, chosen, strict=True))
    totals: list[Totals] = []

    def loss_of(logits: torch.Tensor) -> Any:
        members, own, values = next(remaining)
        shard = VocabShard(VOCAB_SIZE, groups.tp, config.temperature)
        normaliser = log_normaliser(logits, shard)
        policy = log_probs(logits, own.labels, shard, normaliser)[0]
        outcome.log_probs |= dict(zip(members, own.put_back(policy.detach()), strict=True))
        batch, figures = policy_batch(config, own, values)
        total, count, more = policy_loss(config, batch, policy, entropy(logits, shard, normaliser)[0])
        totals.append(more | figures)
        return total, count, more

    def forward(batches: Iterator[Microbatch], model: Any) -> Any:
        return model(next(batches), with_labels=False), loss_of

    for wrapped in parts.built.wrapped.values():
        wrapped.zero_grad_buffer()
    scale = torch.tensor(1 / loss_count(config, COMPLETIONS))
    run_schedule(parts, [microbatch(own) for own in packed], forward, forward_only=False, force_all_reduce=True,
                 loss_scale=LossScale(scale, scale))
    _finish(parts, outcome, totals)
    outcome.num_microbatches = len(plan)
    parts.watchdog.close()
    grids.destroy()
    return outcome


def remove_left_padding(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, *, pad_token_id: int
) -> tuple[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Shift rows so that every first token is in the first column, for models that take rows one by one.

    Args:
        input_ids: int64 `[b, s]`.
        attention_mask: bool `[b, s]`, as for `pack_rows`.
        pad_token_id: token for padding on the right.

    Returns:
        Rows and mask, `[b, s]`, and a function that shifts values of these rows, `[b, s, ...]`, back to where the
        tokens were, with 0 at padding.
    """
    starts, _ = token_runs(attention_mask)
    columns = torch.arange(input_ids.size(1), device=input_ids.device)
    shift = (columns[None] + starts[:, None]) % input_ids.size(1)
    mask = attention_mask.gather(1, shift)
    rows = torch.where(mask, input_ids.gather(1, shift), pad_token_id)
    back = (columns[None] - starts[:, None]) % input_ids.size(1)

    def put_back(values: torch.Tensor) -> torch.Tensor:
        extra = (1,) * (values.dim() - 2)
        moved = values.gather(1, back.view(*back.shape, *extra).expand_as(values))
        return torch.where(attention_mask.view(*attention_mask.shape, *extra), moved, torch.zeros_like(moved))

    return rows, mask, put_back


def log_probs_of_rows(rank: int, config: RlConfig) -> torch.Tensor:
    """Log-prob of each token of all rows, `[8, WIDTH]`, by rows whose padding is on the right; on one process."""
    from mimo.training.step import run_schedule

    parts = equality.make_trainer(*_config_and_layout(("--micro-batch-size", "8"), 1, WIDTH))
    values = rollouts()
    ids, mask, put_back = remove_left_padding(values["ids"], values["attention"], pad_token_id=0)
    has_next = torch.cat([mask[:, 1:], torch.zeros(len(mask), 1, dtype=torch.bool)], dim=1)
    labels = torch.where(has_next, ids.roll(-1, 1), NO_LABEL)
    text = TextBatch(("rows",) * len(ids), {}, ids, labels.clamp(min=0), has_next.float(),
                     torch.arange(WIDTH).expand_as(ids), {}, int(mask.sum()))
    found = []

    def loss_of(logits: torch.Tensor) -> Any:
        policy = log_probs(logits, labels, VocabShard(VOCAB_SIZE, parts.grids.collections[LANGUAGE].tp,
                                                      config.temperature))
        found.append(put_back(policy.roll(1, 1)))
        return policy.sum(), has_next.sum(dtype=torch.int32), policy.detach().sum()

    def forward(batches: Iterator[Microbatch], model: Any) -> Any:
        return model(next(batches), with_labels=False), loss_of

    run_schedule(parts, [Microbatch(text, {})], forward, forward_only=True)
    parts.watchdog.close()
    parts.grids.destroy()
    return found[0].detach()


def _config_and_layout(layout_flags: tuple[str, ...], world_size: int, seq_length: int) -> tuple[Any, Any]:
    config = parse([*FLAGS, "--seq-length", str(seq_length), *layout_flags])
    return config, validate(config, world_size)


def _finish(parts: Any, outcome: Outcome, totals: list[Totals]) -> None:
    """Totals over the world, and gradients."""
    names = (*LOSS_SUMS, *IMPORTANCE_SUMS, *MISMATCH_SUMS)
    none = Totals.zeros(names, MISMATCH_MAXIMA, parts.platform.device)
    everywhere = (add_totals(totals) if parts.counts_losses else none).over_group()
    outcome.metrics = loss_metrics(everywhere) | mismatch_metrics(everywhere)
    outcome.gradients = read_gradients(parts.built.model)


def differences(expected: Outcome, found: Sequence[Outcome], tolerance: float) -> list[str]:
    """List where ranks differ by more than `tolerance`: figures, log-probs, gradients relative to their norm."""
    wrong, seen = [], set()
    for rank, outcome in enumerate(found):
        assert outcome.metrics.keys() == expected.metrics.keys()
        wrong += [f"{name} on rank {rank}: {outcome.metrics[name]} instead of {value}"
                  for name, value in expected.metrics.items()
                  if not math.isclose(outcome.metrics[name], value, rel_tol=tolerance, abs_tol=tolerance)]
        for row, values in outcome.log_probs.items():
            seen.add(row)
            error = (values - expected.log_probs[row]).abs().max().item()
            if not error < tolerance:
                wrong.append(f"log-probs of row {row} on rank {rank}: {error:.1e}")
    assert seen == expected.log_probs.keys(), seen ^ expected.log_probs.keys()
    errors = worst_errors(assemble(expected.gradients), [outcome.gradients for outcome in found])
    return wrong + [f"gradient of {name}: {error:.1e}" for name, error in errors.items() if not error < tolerance]
