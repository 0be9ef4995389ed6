"""Policy updates on made-up completions, on any layout; inside a worker process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from mimo.config.cli import parse
from mimo.config.rl import RlConfig
from mimo.config.validate import validate
from mimo.rl.policy import PolicyResult, PolicyTrainer
from mimo.rl.reference import ReferencePolicy
from mimo.rl.rollouts import Completion
from mimo.watchdog.process_exit import ReportedElsewhereError
from tests.support import equality
from tests.support.global_state import Piece, assemble, read_parameters, worst_errors

VOCAB_SIZE = 93
FLAGS = f"""--model-provider causal_lm --dataset-provider mock --device cpu --no-bf16 --transformer-impl local
--global-batch-size 8 --micro-batch-size 1 --train-iters 1 --lr-decay-style constant --num-generations 0
--watchdog-timeout-s 60 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2
--ffn-hidden-size 48 --vocab-size {VOCAB_SIZE} --make-vocab-size-divisible-by 64""".split()
PROMPTS = ((3, 4), (5,), (7, 8, 9, 10), (11, 12))
LENGTHS = (9, 4, 1, 12, 6, 15, 3, 7)
MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --qk-layernorm --moe-aux-loss-coeff 0".split()
NUM_ROLLOUTS = 2


@dataclass
class Outcome:
    """Results on a rank.

    Attributes:
        results: results of each update.
        before, after: parameters.
        error: what the last update raised.
    """

    results: list[PolicyResult] = field(default_factory=list)
    before: list[Piece] = field(default_factory=list)
    after: list[Piece] = field(default_factory=list)
    error: str = ""


@dataclass
class Schedule:
    """The schedule of one update on a rank.

    Attributes:
        calls: calls of the schedule: microbatches, and whether forward only.
        passes: forward (F) and backward (B) passes of the calls with gradient, in their order.
        finalizes: the schedule has a function that sums gradients over ranks.
        grad_norm: gradient norm of the update.
    """

    calls: list[tuple[int, bool]] = field(default_factory=list)
    passes: str = ""
    finalizes: bool = False
    grad_norm: float | None = None


def completions(step: int) -> list[Completion]:
    """Return two completions of each prompt, with log-probs near those of an untrained model."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
        log_probs = (-math.log(VOCAB_SIZE) - 0.5 * torch.rand(length, generator=generator)).tolist()
        reward = torch.rand((), generator=generator).item()
        found.append(Completion(f"prompt {number // 2}#{number % 2}", number // 2, PROMPTS[number // 2], tuple(ids),
                                tuple(log_probs), "length", reward))
    return found


def other_reference(parts: Any) -> ReferencePolicy:
    """Return a policy with other weights than the model has, the same ones on every layout."""
    reference = ReferencePolicy(parts.built, parts.platform.device)
    with torch.no_grad():
        for parameter in parts.built.model.parameters():
            parameter.mul_(1.1)
    reference.exchange()
    return reference


MODEL = (*FLAGS, *MOE, "--adam-eps", "1e-4", "--lr", "1e-2")


def open_trainer(flags: tuple[str, ...], world_size: int, config: RlConfig, model: Sequence[str] = MODEL
                 ) -> contextlib.AbstractContextManager[Any]:
    """Open a small mixture of experts on this rank, with microbatches as long as the algorithm says."""
    run = parse([*model, "--seq-length", str(config.max_tokens_per_microbatch), *flags])
    return equality.open_trainer(run, validate(run, world_size))


def update(rank: int, flags: tuple[str, ...], world_size: int, config: RlConfig, spoil: bool = False,
           num_rollouts: int = NUM_ROLLOUTS, max_gen_kl: float | None = None) -> Outcome:
    """Take steps on this rank of a layout.

    Args:
        rank: this process.
        flags: flags of the model and the layout.
        world_size: number of processes.
        config: the algorithm; with --kl-coeff the reference is `other_reference`.
        spoil: make the loss NaN.
        num_rollouts: each of other completions.
        max_gen_kl: limit of gen-kl.
    """
    with open_trainer(flags, world_size, config) as parts:
        outcome = Outcome(before=read_parameters(parts.built.model))
        reference = other_reference(parts) if config.kl_coeff else None
        trainer = PolicyTrainer(parts, config, VOCAB_SIZE, pad_token_id=0, reference=reference, max_gen_kl=max_gen_kl)
        if spoil:
            with torch.no_grad():
                for parameter in parts.built.model.parameters():
                    parameter.fill_(math.nan)
        try:
            outcome.results = [trainer.update(completions(step)) for step in range(num_rollouts)]
        except (ValueError, ReportedElsewhereError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.after = read_parameters(parts.built.model)
    return outcome


def update_by_halves(rank: int, config: RlConfig) -> Outcome:
    """Take an update on each half of the completions; the log-probs of both are those before the first."""
    with open_trainer((), 1, config) as parts:
        trainer = PolicyTrainer(parts, config, VOCAB_SIZE, pad_token_id=0, reference=other_reference(parts))
        outcome, found = Outcome(), completions(0)
        middle = len(found) // 2
        fixed = [trainer._fixed_log_probs(trainer.microbatches(half)) for half in (found[:middle], found[middle:])]
        for half, log_probs in zip((found[:middle], found[middle:]), fixed, strict=True):
            with mock.patch.object(trainer, "_fixed_log_probs", lambda _, given=log_probs: given):
                outcome.results.append(trainer.update(half))
        outcome.after = read_parameters(parts.built.model)
    return outcome


def watched_update(rank: int, flags: tuple[str, ...], world_size: int, config: RlConfig) -> Schedule:
    """Take one update on this rank and note the calls of the schedule and the passes of the model."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.utils import get_model_config

    seen = Schedule()
    with open_trainer(flags, world_size, config) as parts:

        def noted(**groups: Any) -> Any:
            schedule = get_forward_backward_func(**groups)

            def run(**arguments: Any) -> Any:
                seen.calls.append((arguments["num_microbatches"], arguments["forward_only"]))
                return schedule(**arguments)

            return run

        def note_passes(model: Any, arguments: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                seen.passes += "F"
                tensor = next(iter(output.values())) if isinstance(output, dict) else output[0]
                tensor.register_hook(note_backward)

        def note_backward(gradient: torch.Tensor) -> None:
            seen.passes += "B"

        parts.built.model.register_forward_hook(note_passes)
        seen.finalizes = get_model_config(parts.built.model).finalize_model_grads_func is not None
        with mock.patch("mimo.training.step.get_forward_backward_func", noted):
            result = PolicyTrainer(parts, config, VOCAB_SIZE, pad_token_id=0).update(completions(0))
        seen.grad_norm = result.grad_norm
    return seen


TOLERANCE = 1e-5


def assert_same_updates(expected: Outcome, found: Sequence[Outcome], num_microbatches: int) -> None:
    """Figures of every update and the parameters after them are the expected ones."""
    for outcome in found:
        assert not outcome.error
        for mine, wanted in zip(outcome.results, expected.results, strict=True):
            assert mine.num_microbatches == num_microbatches and mine.num_tokens == wanted.num_tokens
            assert mine.metrics == pytest.approx(wanted.metrics, rel=TOLERANCE, abs=TOLERANCE)
            assert mine.grad_norm == pytest.approx(wanted.grad_norm, rel=TOLERANCE)
    errors = worst_errors(assemble(expected.after), [outcome.after for outcome in found])
    assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}
