"""Train, save, load in fresh processes' trainers and go on, with everything that must continue kept for comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mimo.grid.spec import Layout
from tests.support.equality import TOLERANCE
from tests.support.global_state import Piece, assemble, read_parameters, worst_errors
from tests.support.steps import inner_optimizers, trainer_of

SAVED_AT = 2
NUM_STEPS = 7
# A schedule that moves in every step, and a length for it.
SCHEDULE = ("--global-batch-size", "4", "--train-iters", "10", "--lr-decay-style", "cosine", "--lr-warmup-iters", "3",
            "--min-lr", "1e-4")


@dataclass
class Run:
    """Results of a run on one rank.

    Attributes:
        losses, grad_norms: losses and gradient norms of each step.
        keys: sample keys of each step on this rank.
        learning_rates: by part, after each step.
        parameters: after the last step.
        exact: every parameter and optimizer tensor after the last step, bit for bit.
        updates: Adam's counts by `module part`, all that were seen.
        lines: what the start reported.
        iteration, consumed_samples: at the end.
        saved_bytes: bytes of tensors that this rank wrote in its last save.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    keys: list[list[str]] = field(default_factory=list)
    learning_rates: list[dict[str, float]] = field(default_factory=list)
    parameters: list[Piece] = field(default_factory=list)
    exact: dict[str, np.ndarray] = field(default_factory=dict)
    updates: dict[str, set[int]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    iteration: int = 0
    consumed_samples: int = 0
    saved_bytes: int = 0


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy of a tensor's bytes. The tensor's own memory could not be resized once numpy has seen it."""
    return tensor.detach().flatten().cpu().clone().view(torch.uint8).numpy()


@torch.no_grad()
def spoil(parts: Any) -> None:
    """Make every parameter and fp32 copy NaN: what a load does not set shows."""
    for parameter in parts.built.model.parameters():
        parameter.fill_(float("nan"))
    parts.optimizer.reload_model_params()


def exact_state(parts: Any) -> dict[str, np.ndarray]:
    """Return this rank's parameters, buffers and optimizer tensors; names compare between equal layouts only."""
    found = {name: bits(value) for name, value in parts.built.model.state_dict().items()
             if isinstance(value, torch.Tensor)}
    for module, info in parts.optimizer.module_infos.items():
        if info.is_active and info.optimizer is not None:
            for number, one in enumerate(inner_optimizers(info.optimizer)):
                for group in one.optimizer.param_groups if one.optimizer is not None else ():
                    for parameter in group["params"]:
                        name = f"{module} optimizer {number} tensor {len(found)}"
                        found[name] = bits(parameter)
                        for kind, value in sorted(one.optimizer.state[parameter].items()):
                            found[f"{name} {kind}"] = bits(value)
    return found


def update_counts(parts: Any) -> dict[str, set[int]]:
    """Adam's counts by module, the projector's apart, read from the optimizers themselves."""
    counts: dict[str, set[int]] = {}
    for module, info in parts.optimizer.module_infos.items():
        if info.is_active and info.optimizer is not None:
            for one in inner_optimizers(info.optimizer):
                for group in one.optimizer.param_groups if one.optimizer is not None else ():
                    # In these tests the projector has a learning rate of its own.
                    projector = group["max_lr"] == parts.config.optim.projector_lr
                    for parameter in group["params"]:
                        name = "projector" if projector and module != "language" else module
                        counts.setdefault(name, set()).add(int(one.optimizer.state[parameter].get("step", 0)))
    return counts


def sample_keys(microbatches: Any) -> list[str]:
    """Keys of the samples of a step, as this rank holds them."""
    sides = [side for batch in microbatches
             for side in ([batch.text] if batch.text is not None else batch.encoders.values())]
    return [key for side in sides for key in side.keys]


@contextlib.contextmanager
def started(rank: int, flags: tuple[str, ...], world_size: int, layout: Layout | None = None
            ) -> Iterator[tuple[Any, Any, Any, Any, list[str]]]:
    """A trainer that has loaded what its flags ask for: (parts, loader, state, progress, lines).

    Where there is something to load, all parameters are NaN before.
    """
    from mimo.registry import model_provider
    from mimo.training.setup import run_state, start

    with trainer_of(rank, (*SCHEDULE, *flags), world_size, layout) as (parts, loader):
        if parts.config.checkpoint.load is not None:
            spoil(parts)
        state = run_state(parts, loader)
        progress, lines = start(state, model_provider(parts.config.model.model_provider), loader, parts.watchdog)
        yield parts, loader, state, progress, lines


def train(rank: int, flags: tuple[str, ...], world_size: int, until: int = NUM_STEPS,
          save_at: tuple[int, ...] = (SAVED_AT,), layout: Layout | None = None) -> Run:
    """Train on this rank until iteration `until`, from the checkpoint of --load if given; save with --save."""
    from mimo.checkpoint.save import Saver
    from mimo.training.optimizer import current_learning_rates
    from mimo.training.step import train_step

    run = Run()
    with started(rank, flags, world_size, layout) as (parts, loader, state, progress, run.lines):
        saver = None if parts.config.checkpoint.save is None else Saver(state, parts.watchdog)
        while progress.iteration < until:
            microbatches = loader.next_step()
            result = train_step(parts, microbatches)
            assert result.success
            progress.iteration += 1
            progress.consumed_samples += parts.config.train.global_batch_size
            run.losses.append(result.loss)
            run.grad_norms.append(result.grad_norm)
            run.keys.append(sample_keys(microbatches))
            run.learning_rates.append(current_learning_rates(parts.config, parts.scheduler, ("vision",)))
            if saver is not None and progress.iteration in save_at:
                state.streams = loader.state_dict()
                saver.save(replace(progress))
                run.saved_bytes = saver.last_bytes
        if saver is not None:
            saver.finish()
        # An overlapped gather of the last step's parameters would only happen in the next forward pass.
        parts.built.finish_gathers("the test")
        parts.built.model.disable_forward_pre_hook()
        run.parameters = read_parameters(parts.built.model)
        run.exact = exact_state(parts)
        run.updates = update_counts(parts)
        run.iteration, run.consumed_samples = progress.iteration, progress.consumed_samples
    return run


def resave(rank: int, flags: tuple[str, ...], world_size: int) -> None:
    """Load on this rank and save at once."""
    from mimo.checkpoint.save import Saver

    with started(rank, flags, world_size) as (parts, loader, state, progress, _):
        state.streams = loader.state_dict()
        Saver(state, parts.watchdog).save(progress)


def refusal(rank: int, flags: tuple[str, ...], world_size: int) -> str | None:
    """Return the message that refuses the flags, None if they are taken, "" on ranks that leave it to others."""
    from mimo.watchdog.process_exit import ReportedElsewhereError

    try:
        with started(rank, flags, world_size):
            return None
    except ValueError as error:
        return str(error)
    except ReportedElsewhereError:
        return ""


def assert_same_bits(uninterrupted: list[Run], resumed: list[Run]) -> None:
    """Check that every rank of a resumed run did and holds exactly what the uninterrupted one did."""
    for rank, (whole, rest) in enumerate(zip(uninterrupted, resumed, strict=True)):
        steps = len(rest.losses)
        assert 0 < steps < len(whole.losses)
        for what in ("losses", "grad_norms", "keys", "learning_rates"):
            assert vars(rest)[what] == vars(whole)[what][-steps:], f"{what} of rank {rank}"
        assert rest.updates == whole.updates
        assert (rest.iteration, rest.consumed_samples) == (whole.iteration, whole.consumed_samples)
        assert rest.exact.keys() == whole.exact.keys()
        wrong = [name for name, value in whole.exact.items() if not np.array_equal(value, rest.exact[name])]
        assert not wrong, f"rank {rank}: {wrong}"


def whole_parameters(runs: list[Run]) -> dict[str, np.ndarray]:
    """Return the global tensors after a run."""
    return assemble([piece for run in runs for piece in run.parameters])


def find_differences(uninterrupted: list[Run], resumed: list[Run], tolerance: float = TOLERANCE) -> list[str]:
    """List where a resumed run, on any layout, differs by more than `tolerance`: losses, norms, rates, parameters."""
    whole, found = uninterrupted[0], list[str]()
    for rank, rest in enumerate(resumed):
        steps = len(rest.losses)
        assert 0 < steps < len(whole.losses)
        for what in ("losses", "grad_norms"):
            for step, (value, expected) in enumerate(zip(vars(rest)[what], vars(whole)[what][-steps:], strict=True)):
                if not abs(value - expected) <= tolerance * abs(expected):
                    found.append(f"{what} of step {step} after the load on rank {rank}: {value} is not {expected}")
        if rest.learning_rates != whole.learning_rates[-steps:]:
            found.append(f"learning rates on rank {rank}: {rest.learning_rates}")
        if (rest.iteration, rest.consumed_samples) != (whole.iteration, whole.consumed_samples):
            found.append(f"progress on rank {rank}: {rest.iteration}, {rest.consumed_samples}")
    errors = worst_errors(whole_parameters(uninterrupted), [rest.parameters for rest in resumed])
    found += [f"parameter {name}: relative error {error:.2e}" for name, error in errors.items()
              if not error < tolerance]
    for step in range(len(resumed[0].losses)):
        expected, seen = ({key for run in runs for key in run.keys[step - len(resumed[0].losses)]}
                          for runs in (uninterrupted, resumed))
        if seen != expected:
            found.append(f"samples of step {step} after the load: {sorted(seen)} are not {sorted(expected)}")
    wanted = {name: counts for run in uninterrupted for name, counts in run.updates.items()}
    for rank, rest in enumerate(resumed):
        found += [f"updates of {name} on rank {rank}: {counts}" for name, counts in rest.updates.items()
                  if counts != wanted[name]]
    return found
