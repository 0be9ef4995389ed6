"""Change a rank's trainer, or look into it, while `run_layout` trains; inside a worker process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mimo.config.validate import validate
from mimo.data.batch import Microbatch
from mimo.grid.spec import Layout
from mimo.protocols import LANGUAGE
from tests.support import equality
from tests.support.global_state import set_parameters


@contextlib.contextmanager
def trainer_changed_by(change: Callable[[pytest.MonkeyPatch, Any], None]) -> Iterator[list[Any]]:
    """Inside, `change(patch, parts)` is applied to every trainer that is built; gives the trainers built so far.

    What `patch` replaces is put back at the end: worker processes live on.
    """
    built: list[Any] = []
    make_trainer = equality.make_trainer

    def make_and_change(*args: Any) -> Any:
        parts = make_trainer(*args)
        change(patch, parts)
        built.append(parts)
        return parts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equality, "make_trainer", make_and_change)
        yield built


def inner_optimizers(module_optimizer: Any) -> list[Any]:
    """Megatron Core's optimizers of one module: one, or one each for dense and expert parameters."""
    return list(vars(module_optimizer).get("chained_optimizers", [module_optimizer]))


def trainer_of(rank: int, flags: tuple[str, ...], world_size: int, layout: Layout | None = None,
               parse: Callable[..., Any] = equality.parse_config
               ) -> contextlib.AbstractContextManager[tuple[Any, Any]]:
    """Open a trainer as in `run_layout`, and its loader, for tests that take their own steps.

    Args:
        rank: this process.
        flags: arguments of `parse`.
        world_size: number of processes.
        layout: the grids, if not those of the flags.
        parse: makes the configuration.
    """
    config = parse(*flags)
    return equality.open_training(config, layout or validate(config, world_size), rank)


def run_loop(rank: int, flags: tuple[str, ...], world_size: int, run_dir: str,
             change: Callable[[Any], None] = lambda parts: None) -> list[Any]:
    """Run the whole training loop on this rank.

    Args:
        rank: this process.
        flags: added to the tests' small model.
        world_size: number of processes.
        run_dir: where the logging rank writes.
        change: applied to the trainer once it is built.

    Returns:
        The `StepRecord` of every iteration, as this rank sees it.
    """
    from mimo.grid.groups import Grids
    from mimo.platform import current_platform
    from mimo.registry import dataset_provider, model_provider
    from mimo.training import loop

    config = equality.parse_config(*flags, "--run-dir", run_dir)
    records = []
    with pytest.MonkeyPatch.context() as patch, Grids(validate(config, world_size), "gloo") as grids:
        setup_trainer, make_record = loop.setup_trainer, loop.TrainingLoop._record

        def set_up(*args: Any) -> Any:
            parts = setup_trainer(*args)
            set_parameters(parts.built.model)
            parts.optimizer.reload_model_params()
            change(parts)
            return parts

        def keep_record(self: Any, *args: Any) -> Any:
            records.append(make_record(self, *args))
            return records[-1]

        patch.setattr(loop, "setup_trainer", set_up)
        patch.setattr(loop.TrainingLoop, "_record", keep_record)
        loop.TrainingLoop(config, grids, current_platform(), model_provider(config.model.model_provider),
                          dataset_provider(config.data.dataset_provider)).run()
    return records


@torch.no_grad()
def logits_by_sample(parts: Any, batches: Sequence[Microbatch]) -> dict[str, torch.Tensor]:
    """Logits `[s, padded vocabulary]` of this rank's samples by key, without dropout; none before the last stage."""
    from mimo.model.build import set_training
    from mimo.training.evaluate import forward_values, whole_rows
    from mimo.training.step import run_schedule

    found: dict[str, torch.Tensor] = {}

    def collect(batch: Microbatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        groups = parts.grids.collections[LANGUAGE]
        assert batch.text is not None
        logits = whole_rows(batch.text, logits, groups.cp).contiguous()
        shards = [torch.empty_like(logits) for _ in range(groups.tp.size())]
        dist.all_gather(shards, logits, group=groups.tp)
        found.update(zip(batch.text.keys, torch.cat(shards, dim=-1), strict=True))
        zero = torch.zeros((), device=logits.device)
        return zero, zero.int(), zero

    set_training(parts.built.model, False)
    run_schedule(parts, list(batches), partial(forward_values, function=None, consume=collect), forward_only=True)
    return found
