"""Reference policies on any layout: what a swap leaves as it was, and whose log-probs it gives; in worker processes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mimo.checkpoint.load import find_checkpoint
from mimo.checkpoint.save import Saver
from mimo.checkpoint.state import Progress, RunState
from mimo.config.cli import parse
from mimo.config.rl import RlConfig
from mimo.config.validate import validate
from mimo.registry import model_provider
from mimo.rl.policy import PolicyResult, PolicyTrainer
from mimo.rl.reference import ReferencePolicy, reference_policy
from mimo.watchdog.process_exit import ReportedElsewhereError
from tests.support import equality, hf_families, policy_updates
from tests.support.policy_updates import FLAGS, MOE, VOCAB_SIZE, completions
from tests.support.resuming import bits, exact_state

CONFIG = RlConfig(completions_per_prompt=2, temperature=0.7, importance_cap=1.1, max_tokens_per_microbatch=24)


@dataclass
class Updated:
    """Results on a rank.

    Attributes:
        results: results of each update.
        state: everything that a step reads or writes, bit for bit, at the end.
        references: log-probs of the first completions, by the policy at the start, and by the reference before each
            update and at the end.
        lines: that say where the reference is from.
        error: why there was none.
    """

    results: list[PolicyResult] = field(default_factory=list)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    references: list[list[torch.Tensor]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    error: str = ""


def moe_trainer(flags: tuple[str, ...], world_size: int) -> contextlib.AbstractContextManager[Any]:
    """Open a small mixture of experts on this rank."""
    run = parse([*FLAGS, *MOE, "--lr", "1e-2", "--seq-length", str(CONFIG.max_tokens_per_microbatch), *flags])
    return equality.open_trainer(run, validate(run, world_size))


def everything(parts: Any) -> dict[str, np.ndarray]:
    """Parameters, buffers that are not saved, too, and optimizers of this rank, their gathers finished."""
    parts.built.model.disable_forward_pre_hook()
    parts.built.model.enable_forward_pre_hook()
    found = exact_state(parts)
    return found | {f"buffer {name}": bits(value) for name, value in parts.built.model.named_buffers()}


def updates(rank: int, flags: tuple[str, ...], world_size: int) -> tuple[Updated, Updated]:
    """The same two updates without a reference, and with one that is the policy at the start and has no weight."""
    plain, watched = Updated(), Updated()
    with moe_trainer(flags, world_size) as parts:
        trainer = PolicyTrainer(parts, CONFIG, VOCAB_SIZE, pad_token_id=0)
        plain.results = [trainer.update(completions(step)) for step in range(2)]
        plain.state = everything(parts)
    with moe_trainer(flags, world_size) as parts:
        reference = ReferencePolicy(parts.built, parts.platform.device)
        trainer = PolicyTrainer(parts, CONFIG, VOCAB_SIZE, pad_token_id=0, reference=reference)
        own = trainer.microbatches(completions(0))
        watched.references.append(trainer.old_log_probs(own))
        for step in range(2):
            with reference.in_place():
                watched.references.append(trainer.old_log_probs(own))
            watched.results.append(trainer.update(completions(step)))
        with reference.in_place():
            watched.references.append(trainer.old_log_probs(own))
        watched.state = everything(parts)
    return plain, watched


def save(rank: int, flags: tuple[str, ...], world_size: int, folder: str) -> None:
    """A checkpoint of the model with other weights, 1.1 times those of every test."""
    with moe_trainer((*flags, "--save", folder), world_size) as parts:
        with torch.no_grad():
            for parameter in parts.built.model.parameters():
                parameter.mul_(1.1)
        parts.optimizer.reload_model_params()
        saver = Saver(_state(parts), parts.watchdog)
        saver.save(Progress(3, 24, 0))
        saver.finish()


def update_from(rank: int, flags: tuple[str, ...], world_size: int, config: RlConfig, resumed: bool = False,
                other: bool = False) -> Updated:
    """Take one update with the reference that the flags name.

    Args:
        rank: this process.
        flags: flags of the run.
        world_size: number of processes.
        config: the algorithm.
        resumed: the weights are not those that the run started from.
        other: take `other_reference` instead.
    """
    done = Updated()
    with moe_trainer(flags, world_size) as parts:
        before = everything(parts)
        try:
            if other:
                reference: ReferencePolicy | None = policy_updates.other_reference(parts)
            else:
                state = _state(parts)
                if parts.config.checkpoint.save is not None:
                    state.source = find_checkpoint(state)
                reference, done.lines = reference_policy(
                    state, model_provider("causal_lm"), config, parts.watchdog, resumed=resumed)
        except (ValueError, ReportedElsewhereError) as error:
            done.error = f"{type(error).__name__}: {error}"
            return done
        assert all(np.array_equal(value, before[name]) for name, value in everything(parts).items())
        trainer = PolicyTrainer(parts, config, VOCAB_SIZE, pad_token_id=0, reference=reference)
        done.results = [trainer.update(completions(0))]
        done.state = everything(parts)
    return done


def update_hf(rank: int, name: str, policy: str, reference: str, layout: tuple[str, ...], world_size: int,
              config: RlConfig, rewards: Sequence[float] | None = None) -> Updated:
    """Take one update of a saved model, with another as the reference.

    Args:
        rank: this process.
        name: name of `hf_families.MODELS`.
        policy: folder of the policy.
        reference: folder of the reference.
        layout: flags.
        world_size: number of processes.
        config: the algorithm; --ref-load-hf is added where it has a --kl-coeff.
        rewards: rewards of the completions; None: their own.
    """
    done = Updated()
    flags = hf_families.flags_of(name, policy, ("--micro-batch-size", "1", *layout, "--seq-length",
                                                str(config.max_tokens_per_microbatch)))
    asked = completions(0)
    if rewards is not None:
        asked = [replace(each, reward=reward) for each, reward in zip(asked, rewards, strict=True)]
    with hf_families.trainer_of(flags, world_size) as parts:
        hf_families.load(parts, model=policy)
        parts.optimizer.reload_model_params()
        if config.kl_coeff:
            config = replace(config, ref_load_hf=reference)
        found, done.lines = reference_policy(_state(parts), model_provider(parts.config.model.model_provider), config,
                                             parts.watchdog, resumed=False)
        trainer = PolicyTrainer(parts, config, hf_families.VOCAB_SIZE, pad_token_id=0, reference=found)
        done.results = [trainer.update(asked)]
        done.state = everything(parts)
    return done


def save_hf(rank: int, name: str, policy: str, reference: str) -> None:
    """Save a model, and one with other weights."""
    model = hf_families.build_hf(name)
    model.save_pretrained(policy)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    model.save_pretrained(reference)


def hf_log_probs(rank: int, folder: str, temperature: float) -> list[torch.Tensor]:
    """Log-probs of the tokens of each completion by transformers, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    with torch.no_grad():
        for each in completions(0):
            ids = torch.tensor([(*each.prompt_ids, *each.token_ids)])
            scores = (model(ids).logits[0, :-1].double() / temperature).log_softmax(-1)
            picked = scores.gather(-1, ids[0, 1:, None]).squeeze(-1)
            found.append(picked[len(each.prompt_ids) - 1:])
    return found


def _state(parts: Any) -> RunState:
    return RunState(parts.config, parts.grids, parts.platform, parts.built, parts.optimizer, parts.scheduler)
