"""Policy updates: from the completions of a global batch to microbatches, log-probs, losses and optimizer steps."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from mimo.config.rl import RlConfig
from mimo.config.trainer import RunConfig
from mimo.data.batch import EncoderBatch, Microbatch, TextBatch, with_part
from mimo.data.collate import Expanded
from mimo.grid.lanes import sequence_multiple
from mimo.grid.spec import Layout
from mimo.model.build import KINDS, params_dtype, set_training
from mimo.model.vocabulary import TokenFunction
from mimo.protocols import LANGUAGE
from mimo.rl.batching import aligned, plan_microbatches
from mimo.rl.images import EncoderSide, ImageTokens
from mimo.rl.kv_scales import KvRanges, KvScales
from mimo.rl.logprobs import VocabShard, entropy, log_normaliser, log_probs
from mimo.rl.losses import (
    IMPORTANCE_SUMS,
    LOSS_SUMS,
    MISMATCH_MAXIMA,
    MISMATCH_SUMS,
    PolicyBatch,
    SampledTokens,
    Totals,
    add_totals,
    advantages,
    importance_weights,
    kl_of_sequences,
    loss_count,
    loss_metrics,
    mismatch_metrics,
    mismatch_totals,
    policy_loss,
)
from mimo.rl.packing import PackedRow, pack_sequences
from mimo.rl.prompts import PromptSet
from mimo.rl.reference import ReferencePolicy
from mimo.rl.rollouts import Completion
from mimo.training.evaluate import whole_rows
from mimo.training.step import LossScale, TrainerParts, UpdateResult, clear_gradients, run_schedule, update_weights
from mimo.training.step_metrics import MoeLosses, peak_memory_bytes
from mimo.watchdog.process_exit import ReportedElsewhereError


@dataclass(frozen=True)
class PolicyResult:
    """Result of the updates on a global batch, equal on all ranks.

    Attributes:
        metrics: figures of the global batch by name.
        success: whether parameters were updated, every time.
        num_trained: completions whose update was not skipped.
        grad_norm: global norm before clipping, the mean over updates; None when all were skipped.
        num_zeros: zero gradients of the last update, where logged.
        num_microbatches: microbatches of each data-parallel rank.
        num_tokens: tokens of all sequences, prompts included.
        log_probs_s: seconds of the forward pass before the first update.
        reference_s: seconds of the reference policy's forward pass, the exchange of weights included; 0 without one.
        moe_losses: load-balancing losses, see `mimo.training.step_metrics.MoeLosses`; empty on other ranks than those
            of the language model.
        peak_memory_bytes: by module, the highest memory of any of its ranks so far.
        batches: this rank's microbatches.
        advantages: advantages of all completions.
        kv_scales: scales of an engine's FP8 cache for the policy before the first update; empty unless it is measured.
    """

    metrics: dict[str, float]
    success: bool
    num_trained: int
    grad_norm: float | None
    num_zeros: int | None
    num_microbatches: int
    num_tokens: int
    log_probs_s: float = 0.0
    reference_s: float = 0.0
    moe_losses: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    batches: Sequence[Microbatch] = ()
    advantages: Sequence[float] = ()
    kv_scales: KvScales = field(default_factory=dict)


@dataclass
class FixedLogProbs:
    """Log-probs of each microbatch, float32 `[t]`, without gradient; empty on all stages but the last.

    Attributes:
        old: log-probs of the policy before the first update.
        reference: log-probs of the reference policy; None without one.
        old_s, reference_s: seconds that they took.
        kv_scales: scales that `KvRanges` has measured with the policy before the first update.
    """

    old: list[torch.Tensor]
    reference: list[torch.Tensor] | None
    old_s: float
    reference_s: float
    kv_scales: KvScales = field(default_factory=dict)

    def part(self, first: int, last: int) -> FixedLogProbs:
        """Select the results of microbatches from `first` to before `last`."""
        reference = None if self.reference is None else self.reference[first:last]
        return replace(self, old=self.old[first:last], reference=reference)


Consume = Callable[[int, tuple[torch.Tensor, ...]], tuple[torch.Tensor, torch.Tensor, Any]]


@dataclass
class PolicyMicrobatch:
    """Whole sequences that a rank processes together. Tensors are on the device.

    Values belong to the positions that predict tokens; `t` counts this rank's positions where context-parallel ranks
    share the sequences. On ranks without the language model all but `batch` is empty.

    Attributes:
        keys: keys of the completions.
        members: numbers of the completions in the global batch.
        batch: the model's input, on the host.
        labels: int64 `[1, t]`.
        sampled: positions that predict tokens of completions.
        rollout_log_probs: the engine's log-probs, float32 `[t]`.
        padding: bool `[t]`, True at padding; in host memory.
    """

    keys: tuple[str, ...]
    members: tuple[int, ...]
    batch: Microbatch
    labels: torch.Tensor
    sampled: SampledTokens
    rollout_log_probs: torch.Tensor
    padding: torch.Tensor

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Select this microbatch's values of all completions and broadcast them over its tokens, `[t]`."""
        own = values[list(self.members)].to(self.labels.device)
        return self.sampled.spread(torch.cat([own, own.new_zeros(self.sampled.num_sequences - len(own))]))


class PolicyTrainer:
    """Trains the policy on completions that it has generated.

    Args:
        parts: this rank's trainer. Its sequence length is --max-tokens-per-microbatch, because pipeline stages exchange
            microbatches of one size.
        config: the algorithm.
        vocab_size: number of tokens, without the padding of the vocabulary.
        pad_token_id: fills the end of a microbatch.
        images: how the model takes images; None without an encoder.
        prompts: the prompts of the completions, from which ranks that encode images take the pixels; None elsewhere.
        reference: the reference policy of --kl-coeff.
        max_gen_kl: nats by which engine and trainer may differ; None for no limit.
        kv_ranges: measures what attention gets in each global batch, for an engine's FP8 cache; None without one.
    """

    def __init__(self, parts: TrainerParts, config: RlConfig, vocab_size: int, pad_token_id: int,
                 images: ImageTokens | None = None, prompts: PromptSet | None = None,
                 reference: ReferencePolicy | None = None, max_gen_kl: float | None = None,
                 kv_ranges: KvRanges | None = None) -> None:
        assert reference is not None or not config.kl_coeff, "--kl-coeff needs a reference policy"
        self.parts, self.config, self.pad_token_id, self.images = parts, config, pad_token_id, images
        self.reference, self._max_gen_kl, self.kv_ranges = reference, max_gen_kl, kv_ranges
        groups, layout = parts.grids.collections.get(LANGUAGE), parts.grids.layout
        self._shard = VocabShard(vocab_size, groups.tp if groups is not None else None, config.temperature)
        self._cp_group = groups.cp if groups is not None else None
        self._align, self._multiple = _multiples(parts.config, layout, config)
        self._moe_losses = MoeLosses(parts.built.model, groups, parts.platform.device,
                                     per_layer=parts.config.observe.moe_per_layer_logging)
        self._encoders = None
        if images is not None:
            self._encoders = EncoderSide(images, layout, parts.grids.rank, parts.config.lane_rows, prompts,
                                         params_dtype(parts.config))

    def update(self, completions: Sequence[Completion]) -> PolicyResult:
        """Take --updates-per-rollout optimizer steps on the completions of a global batch. Collective over the world.

        Args:
            completions: all completions, grouped by prompt, the same on every rank.

        Raises:
            ValueError: a loss is not finite (with --check-for-nan-in-loss), before anything is updated by it, naming
                the completions; or a sequence does not fit a microbatch; or gen-kl is above its limit.
            ReportedElsewhereError: the same, on ranks that do not hold those completions' losses.
        """
        parts, size = self.parts, len(completions) // self.config.updates_per_rollout
        # Log-probs and passes need no optimizer state. If it is arriving, the optimizer's step waits for it.
        parts.built.residency.require("a policy update", *KINDS, waits=False)
        starts = range(0, len(completions), size)
        by_update = [self.microbatches(completions[start:start + size], start) for start in starts]
        microbatches = list(itertools.chain.from_iterable(by_update))
        # Everything that the updates hold fixed is computed before the first one changes the weights.
        fixed = self._fixed_log_probs(microbatches)
        mismatch = self._mismatch(microbatches, fixed.old)
        scores, penalty = self._advantages(completions, microbatches, fixed)
        steps, first = [], 0
        for start, own in zip(starts, by_update, strict=True):
            last = first + len(own)
            steps.append(self._step(completions[start:start + size], own, fixed.part(first, last), scores))
            first = last
        results = [update for _, update in steps]
        totals = add_totals([figures for figures, _ in steps]) | mismatch
        metrics = loss_metrics(totals) | mismatch_metrics(totals) | penalty
        if self.reference is None:
            del metrics["reference_kl"]
        if fixed.kv_scales:
            metrics["largest_kv_scale"] = max(map(max, fixed.kv_scales.values()))
        with parts.watchdog.waiting("load-balancing losses and memory of all ranks"):
            moe_losses = self._moe_losses.take(len(microbatches))
            peaks = peak_memory_bytes(parts.grids, parts.platform)
        norms = [each.grad_norm for each in results if each.grad_norm is not None]
        return PolicyResult(
            metrics, all(each.success for each in results), size * sum(each.success for each in results),
            sum(norms) / len(norms) if norms else None, results[-1].num_zeros, len(microbatches),
            sum(each.length for each in completions), fixed.old_s, fixed.reference_s, moe_losses, peaks,
            [each.batch for each in microbatches], scores.tolist(), fixed.kv_scales)

    def _step(self, completions: Sequence[Completion], microbatches: list[PolicyMicrobatch], fixed: FixedLogProbs,
              scores: torch.Tensor) -> tuple[Totals, UpdateResult]:
        """Take one optimizer step on a part of the global batch. Collective.

        `scores` are the advantages of all completions of the global batch.

        Returns:
            Figures of this part, and the result of the step.
        """
        def values(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            # Log-probs and entropies share the normaliser, which is a collective and a pass over all logits.
            normaliser = log_normaliser(logits, self._shard)
            return log_probs(logits, labels, self._shard, normaliser), entropy(logits, self._shard, normaliser)

        totals: list[Totals] = []

        def loss(index: int, computed: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor, Totals]:
            (policy,), (entropies,) = computed
            own, old = microbatches[index], fixed.old[index]
            reference = None if fixed.reference is None else fixed.reference[index]
            weights, clipped = importance_weights(self.config, own.sampled, old, own.rollout_log_probs)
            batch = PolicyBatch(own.sampled, own.spread(scores), old, reference, weights)
            total, count, figures = policy_loss(self.config, batch, policy, entropies)
            totals.append(figures | clipped)
            return total, count, figures

        clear_gradients(self.parts)
        count = loss_count(self.config, [len(each.token_ids) for each in completions])
        # Routers multiply their losses by the tokens of a microbatch. Divided by all tokens, they weigh the same
        # however the policy loss is averaged.
        num_tokens = sum(each.length for each in completions)
        scale = LossScale(*torch.tensor([1 / count, 1 / num_tokens], device=self.parts.platform.device))
        self._run(microbatches, values, loss, scale)
        everywhere = self._over_world(totals)
        update = update_weights(
            self.parts, loss_sum=everywhere.sums["loss"], num_targets=everywhere.sums["loss_count"],
            num_samples=len(completions),
            refuse_loss=partial(_refuse_loss, microbatches, totals if self.parts.counts_losses else []))
        # This check waits for the device, so it comes after the update, whose preparation lets the host run ahead.
        assert everywhere.sums["loss_count"].item() == count, (everywhere.sums["loss_count"], count)
        # The records of this program have the whole update in seconds, not the optimizer's part.
        self.parts.optimizer_timer.drain_s()
        return everywhere, update

    def microbatches(self, completions: Sequence[Completion], start: int = 0) -> list[PolicyMicrobatch]:
        """Return this rank's share of a global batch, or of a part of it, as microbatches.

        Args:
            completions: the batch or part.
            start: number of its first completion in the global batch.

        Raises:
            ValueError: a sequence is longer than a microbatch, or they do not divide over the data-parallel ranks.
        """
        language = self.parts.grids.layout.language
        plan = plan_microbatches([aligned(each.length, self._align) for each in completions], language.dp,
                                 self.config.max_tokens_per_microbatch)
        encoders: list[dict[str, EncoderBatch]] = [{} for _ in plan[0]]
        if self._encoders is not None:
            encoders = self._encoders.batches(plan, completions)
        if self.parts.grids.rank not in language.ranks:
            nothing = torch.zeros(0, device=self.parts.platform.device)
            return [PolicyMicrobatch((), (), Microbatch(None, batches), nothing.long()[None],
                                     SampledTokens(nothing.bool(), nothing.long(), 0), nothing, nothing.bool())
                    for batches in encoders]
        own = plan[language.coordinates(self.parts.grids.rank)["dp"]]
        return [self._pack([start + member for member in members], [completions[each] for each in members], batches)
                for members, batches in zip(own, encoders, strict=True)]

    def old_log_probs(self, microbatches: Sequence[PolicyMicrobatch],
                      temperature: float | None = None) -> list[torch.Tensor]:
        """Return the present policy's log-probs, `[t]` for each microbatch. Collective.

        The list is empty on all pipeline stages but the last. `temperature` replaces --temperature.
        """
        found: list[torch.Tensor] = []
        shard = self._shard if temperature is None else replace(self._shard, temperature=temperature)

        def compute(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
            return (log_probs(logits, labels, shard),)

        def collect(index: int, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor, None]:
            found.append(values[0][0].detach())
            return found[-1].sum(), torch.ones((), dtype=torch.int32, device=found[-1].device), None

        model = self.parts.built.model
        set_training(model, False)
        with torch.no_grad(), self.parts.watchdog.waiting("log-probs before the update", is_work=True):
            self._run(microbatches, compute, collect)
        set_training(model, True)
        return found

    def measured_log_probs(self, microbatches: Sequence[PolicyMicrobatch], temperature: float | None = None
                           ) -> tuple[list[torch.Tensor], KvScales]:
        """Return `old_log_probs`, and the scales that an FP8 cache needs for these microbatches. Collective.

        The scales (`mimo.rl.kv_scales`) are empty without such a cache.
        """
        if self.kv_ranges is None:
            return self.old_log_probs(microbatches, temperature), {}
        with self.kv_ranges.recording():
            found = self.old_log_probs(microbatches, temperature)
        with self.parts.watchdog.waiting("largest keys, values and queries over the world"):
            return found, self.kv_ranges.scales()

    def _fixed_log_probs(self, microbatches: Sequence[PolicyMicrobatch]) -> FixedLogProbs:
        """Compute the log-probs that the updates hold fixed. Collective."""
        began = time.perf_counter()
        reference = None
        old, scales = self.measured_log_probs(microbatches)
        self.parts.platform.synchronize()
        between = time.perf_counter()
        if self.reference is not None:
            with self.reference.in_place():
                reference = self.old_log_probs(microbatches)
        return FixedLogProbs(old, reference, between - began, time.perf_counter() - between, scales)

    def _advantages(self, completions: Sequence[Completion], microbatches: Sequence[PolicyMicrobatch],
                    fixed: FixedLogProbs) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the advantages of all completions, float32 `[completions]`, and figures; the same on every rank.

        With --kl-in reward, the KL divergence of the policy before the update from the reference is estimated at each
        token and summed over a completion. The sum times --kl-coeff is subtracted from the completion's reward, as verl
        does (`apply_kl_penalty`, switched on by `use_kl_in_reward`). Collective over the world in this case.
        """
        rewards, figures = [each.reward for each in completions], {}
        if fixed.reference is not None and self.config.kl_in == "reward":
            sums = torch.zeros(len(completions), dtype=torch.float64, device=self.parts.platform.device)
            if self.parts.counts_losses:
                for own, old, reference in zip(microbatches, fixed.old, fixed.reference, strict=True):
                    kl = kl_of_sequences(own.sampled, old.double(), reference.double(), self.config.kl_type)
                    sums[list(own.members)] = kl[:len(own.members)]
            with self.parts.watchdog.waiting("KL divergence of each completion"):
                # Each is the sum over the context-parallel ranks of one lane; the others hold zeros.
                dist.all_reduce(sums)
            penalties = (self.config.kl_coeff * sums).tolist()
            rewards = [reward - penalty for reward, penalty in zip(rewards, penalties, strict=True)]
            figures["kl_penalty"] = sum(penalties) / len(penalties)
        return advantages(rewards, [each.prompt for each in completions], self.config.advantage), figures

    def _run(self, microbatches: Sequence[PolicyMicrobatch], compute: Callable[..., tuple[torch.Tensor, ...]],
             consume: Consume, scale: LossScale | None = None) -> None:
        """Run all microbatches through the schedule.

        On the last stage, `compute` turns logits and labels into numbers of each token, `[1, t]`, which go to
        `consume`. Backward passes run if there is a scale of the losses.
        """
        numbers = itertools.count()

        def step(batches: Iterator[Microbatch], model: Any) -> tuple[Any, Any]:
            index = next(numbers)
            if self.kv_ranges is not None:
                self.kv_ranges.next_row(microbatches[index].padding)
            function = TokenFunction(compute, (microbatches[index].labels,))
            return model(next(batches), function=lambda text: function), partial(consume, index)

        run_schedule(self.parts, [each.batch for each in microbatches], step, forward_only=scale is None,
                     loss_scale=scale)

    def _pack(self, members: Sequence[int], completions: Sequence[Completion],
              encoders: dict[str, EncoderBatch]) -> PolicyMicrobatch:
        expanded = None if self.images is None else [self.images.expanded(each) for each in completions]
        prompts = [np.array(each.prompt_ids) for each in completions] if expanded is None else [
            each.tokens for each in expanded]
        sequences, is_sampled, rollout_log_probs = [], [], []
        for each, prompt in zip(completions, prompts, strict=True):
            sequences.append(torch.cat([torch.from_numpy(prompt), torch.tensor(each.token_ids, dtype=torch.int64)]))
            # The loss counts what the policy has sampled, so neither prompts nor padding.
            is_sampled.append(torch.arange(each.length) >= len(prompt))
            rollout_log_probs.append(torch.tensor([0.0] * len(prompt) + list(each.logprobs)))
        row = pack_sequences(sequences, pad_token_id=self.pad_token_id, multiple=self._multiple, align=self._align)
        assert row.sequences.seq_idx is not None, "rows of text number their sequences"
        language, device = self.parts.grids.layout.language, self.parts.platform.device
        text = with_part(self._text(row, completions, expanded), language.cp,
                         language.coordinates(self.parts.grids.rank)["cp"])
        # One more sequence, for padding at the end of the row.
        sampled = SampledTokens(text.own(row.to_predictors(is_sampled)).to(device),
                                text.own(row.sequences.seq_idx[0].long()).to(device), len(completions) + 1,
                                self._cp_group)
        return PolicyMicrobatch(
            tuple(each.key for each in completions), tuple(members), Microbatch(text, encoders),
            text.own(row.labels).to(device), sampled, text.own(row.to_predictors(rollout_log_probs)).to(device),
            text.own(row.is_padding[0]))

    def whole_row(self, microbatch: PolicyMicrobatch, values: torch.Tensor) -> torch.Tensor:
        """Gather the values of all positions from those of this rank's, `[t]`. Collective over context-parallel ranks.

        Called on ranks with the language model.
        """
        text = microbatch.batch.text
        assert text is not None and self._cp_group is not None, "language ranks hold text"
        return whole_rows(text, values[None], self._cp_group)[0]

    def _text(self, row: PackedRow, completions: Sequence[Completion], prompts: Sequence[Expanded] | None) -> TextBatch:
        """Return a packed row as the language side of a microbatch. Its labels and loss mask are not used."""
        length, num_tokens = row.input_ids.shape[1], sum(each.length for each in completions)
        images: dict[str, Any] = {"keys": ("packed",), "token_counts": {}}
        placeholders: dict[str, torch.Tensor] = {}
        positions = None
        if self.images is not None and prompts is not None:
            images = self.images.text_parts(completions, self.parts.config.lane_rows)
            placeholders = self.images.placeholders(prompts, row.sequences.cu_seqlens.tolist()[:len(prompts)])
            positions = self.images.positions(completions, prompts, row.sequences.cu_seqlens)
        return TextBatch(input_ids=row.input_ids, labels=row.labels.clamp(min=0),
                         loss_mask=torch.ones(1, length),
                         position_ids=row.position_ids if positions is None else positions,
                         placeholders=placeholders, num_tokens=num_tokens, packed=row.sequences,
                         # Given even without padding: without a mask, routers assume that every lane has as many
                         # tokens as theirs.
                         padding=row.is_padding, **images)

    def _mismatch(self, microbatches: Sequence[PolicyMicrobatch], old: Sequence[torch.Tensor]) -> Totals:
        """Compare the engine's log-probs of the global batch with the trainer's, before anything is updated.

        Raises:
            ValueError: gen-kl is above its limit; raised on the first rank.
            ReportedElsewhereError: the same, on the other ranks.
        """
        found = self._over_world([mismatch_totals(own.sampled, values, own.rollout_log_probs)
                                  for own, values in zip(microbatches, old, strict=False)], MISMATCH_SUMS,
                                 MISMATCH_MAXIMA)
        limit, divergence = self._max_gen_kl, found.mean("gen_kl", "rollout_tokens")
        # NaN passes this test: it makes the loss NaN as well, which is refused with the names of the completions.
        if limit is not None and divergence > limit:
            if self.parts.grids.rank != 0:
                raise ReportedElsewhereError("rank 0 reports what is wrong")
            num_tokens, largest = found.sums["rollout_tokens"].item(), found.maxima["max_abs_dlogp"].item()
            raise ValueError(
                f"gen-kl {divergence:.3g} is above --max-gen-kl {limit:g}: on {num_tokens:.0f} sampled tokens the "
                f"engine's log-probs differ from the trainer's by {found.mean('abs_dlogp', 'rollout_tokens'):.3g} nats "
                f"on average and by {largest:.3g} at most, so the completions are not those of the policy that is "
                "trained. Nothing was updated, and checkpoints from before can be resumed. Check that "
                "--refit-verify-interval 1 passes on such a checkpoint, that engine/config.json in the run folder "
                "describes the model (rotary base, norm epsilon, vocabulary), and that the engine computes in the "
                "trainer's precision. --max-gen-kl sets the limit; 0 removes it")
        return found

    def _over_world(self, totals: list[Totals], sums: Sequence[str] = (*LOSS_SUMS, *IMPORTANCE_SUMS),
                    maxima: Sequence[str] = ()) -> Totals:
        """Sum the totals of ranks, each of which holds its own tokens, over the global batch."""
        none = Totals.zeros(sums, maxima, self.parts.platform.device)
        with self.parts.watchdog.waiting("sum of losses and figures over the world"):
            return (add_totals(totals) if self.parts.counts_losses else none).over_world()


def _multiples(run: RunConfig, layout: Layout, config: RlConfig) -> tuple[int, int]:
    """Return the tokens of which each sequence of a microbatch, and the microbatch, has a multiple."""
    align = sequence_multiple(layout)
    # Pipeline stages exchange tensors of one size, and sequence parallelism splits the tokens over ranks.
    if layout.language.pp > 1:
        return align, config.max_tokens_per_microbatch
    if not run.layout.sequence_parallel:
        return align, align
    multiple, fp8 = layout.language.tp * layout.language.cp, run.model.fp8(LANGUAGE)
    if fp8 is not None:  # each rank's part of the tokens is an operand of its own
        multiple *= fp8.multiple
    return align, math.lcm(align, multiple)


def _refuse_loss(microbatches: Sequence[PolicyMicrobatch], totals: Sequence[Totals], loss: float) -> NoReturn:
    message = f"the policy loss is {loss}; nothing was updated (--no-check-for-nan-in-loss goes on)"
    for own, figures in zip(microbatches, totals, strict=False):  # one rank of each lane has figures
        if not math.isfinite(figures.sums["loss"].item()):
            raise ValueError(f"{message}; it comes from completions {', '.join(own.keys)}")
    raise ReportedElsewhereError(f"{message}; the rank that it comes from names the completions")
