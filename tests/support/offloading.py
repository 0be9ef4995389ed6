"""Train with and without offloading between steps; inside worker processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tests.support import steps
from tests.support.global_state import read_parameters

NUM_STEPS = 5
# What goes away after each step, in order; before the next one all of it comes back. HALF is half of the optimizer
# state, of which the rest goes nowhere or follows with `optimizer`.
HALF = "half"
ROUNDS = (("gradients", "optimizer", "weights"), ("weights",), ("weights", HALF, "optimizer", "gradients"), (HALF,))


@dataclass
class Trained:
    """A rank's run.

    Attributes:
        losses, grad_norms: losses and gradient norms of each step.
        weights: at the end, by global name and offset.
        state: everything that the optimizers hold, in their order.
        freed: bytes that each offload said it gave back.
        left: storages that still had memory after all had gone.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    weights: dict[Any, Any] = field(default_factory=dict)
    state: list[torch.Tensor] = field(default_factory=list)
    freed: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def tensors_of(parts: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Kind -> name -> every tensor of it that a step reads or writes, found without the offload's help."""
    model = parts.built.model
    weights = dict((*model.named_parameters(), *model.named_buffers()))
    gradients = {f"{name} main_grad": vars(parameter)["main_grad"] for name, parameter in model.named_parameters()
                 if "main_grad" in vars(parameter)}
    state: dict[str, torch.Tensor] = {}
    for name, info in parts.optimizer.module_infos.items():
        if info.optimizer is None:
            continue
        for number, one in enumerate(steps.inner_optimizers(info.optimizer)):
            if one.optimizer is not None:
                for key, entry in enumerate(one.optimizer.state.items()):
                    state[f"{name} {number} {key} main"] = entry[0]
                    state |= {f"{name} {number} {key} {kind}": value for kind, value in entry[1].items()
                              if isinstance(value, torch.Tensor)}
    return {"weights": weights, "gradients": gradients, "optimizer": state}


def num_bytes(parts: Any) -> int:
    """Count the bytes of device memory behind all of a trainer's tensors."""
    device = next(parts.built.model.parameters()).device
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage()
                for tensors in tensors_of(parts).values() for tensor in tensors.values() if tensor.device == device}
    return sum(storage.nbytes() for storage in storages.values())


def with_memory(tensors: dict[str, torch.Tensor], device: torch.device) -> list[str]:
    """Names of those on the device that have some."""
    return [name for name, tensor in tensors.items()
            if tensor.device.type == device.type and tensor.untyped_storage().nbytes()]


def train(rank: int, flags: tuple[str, ...], world_size: int, offload: bool,
          watch: Callable[[str, Any], None] = lambda when, parts: None) -> Trained:
    """Take some steps; with `offload`, everything goes to the host and comes back after each of them.

    Args:
        rank: this process.
        flags: flags of the tests' small model.
        world_size: number of processes.
        offload: whether.
        watch: called `before` things go and while they are `away`.
    """
    from mimo.rl.offload import Offload
    from mimo.training.step import train_step

    done = Trained()
    with steps.trainer_of(rank, flags, world_size) as (parts, loader):
        moved = Offload(parts.built, parts.optimizer)
        for step in range(NUM_STEPS):
            result = train_step(parts, loader.next_step())
            assert result.success
            done.losses.append(result.loss)
            done.grad_norms.append(result.grad_norm)
            if offload and step < len(ROUNDS):
                _away_and_back(parts, moved, ROUNDS[step], done, watch)
        parts.built.model.disable_forward_pre_hook()
        done.weights = {(piece.key, piece.offset): piece.value for piece in read_parameters(parts.built.model)}
        done.state = [tensor.detach().clone().cpu() for tensor in tensors_of(parts)["optimizer"].values()]
    return done


def _away_and_back(parts: Any, moved: Any, kinds: tuple[str, ...], done: Trained,
                   watch: Callable[[str, Any], None]) -> None:
    from mimo.training.step import clear_gradients

    tensors, device = tensors_of(parts), next(parts.built.model.parameters()).device
    tensors[HALF] = tensors["optimizer"]
    pointers = {name: tensor.untyped_storage()._cdata for kind in kinds for name, tensor in tensors[kind].items()}
    watch("before", parts)
    for kind in kinds:
        done.freed[kind] = move(moved, kind)
    left = {kind: with_memory(tensors[kind], device) for kind in kinds}
    halves = len(left.pop(HALF, [])), len(tensors[HALF])
    assert kinds != (HALF,) or halves[1] == 0 or 0 < halves[0] < halves[1], f"{halves} storages still have memory"
    done.left += sum(left.values(), [])
    watch("away", parts)
    # What the memory held must not come back by luck.
    others = [torch.full((each,), 0xA5, dtype=torch.uint8, device=device) for each in done.freed.values()]
    others.clear()
    if kinds[0] == "weights" and "optimizer" in kinds:
        moved.bring_back("weights", "gradients")
        moved.prefetch_optimizer()
        # Passes run, and gradients are cleared, while the state arrives.
        clear_gradients(parts)
        parts.built.residency.require("passes", "weights", "gradients")
        assert "optimizer" in parts.built.residency.arriving
    else:
        moved.bring_back("optimizer" if kinds == (HALF,) else kinds[-1])
        moved.bring_back()
    assert not moved.offloaded
    tensors = tensors_of(parts)
    tensors[HALF] = tensors["optimizer"]
    assert pointers == {name: tensor.untyped_storage()._cdata for kind in kinds
                        for name, tensor in tensors[kind].items()}, "tensors lie in other storages than before"
    assert "gradients" not in kinds or not any(tensor.any() for tensor in tensors["gradients"].values())


def move(moved: Any, kind: str) -> int:
    """Offload one kind."""
    calls = {"weights": moved.weights, "gradients": moved.gradients, "optimizer": moved.optimizer,
             HALF: lambda: moved.optimizer(moved.num_bytes("optimizer") // 2)}
    return int(calls[kind]())


def refusals(rank: int, flags: tuple[str, ...], world_size: int, out: str) -> dict[str, str]:
    """Return the errors of requests to a trainer while tensors are away, by case."""
    from mimo.checkpoint.state import RunState
    from mimo.refit.trainer_shards import ModelWeights, WholeTensors
    from mimo.registry import model_provider
    from mimo.rl.offload import Offload
    from mimo.training.step import forward_step, run_schedule, train_step
    from tests.support.export_live import export_model

    found: dict[str, str] = {}

    def ask(case: str, part: Callable[[], Any]) -> None:
        try:
            part()
        except RuntimeError as error:
            found[case] = f"{type(error).__name__}: {error}"

    with steps.trainer_of(rank, flags, world_size) as (parts, loader):
        built, family = parts.built, parts.config.model_family
        provider = model_provider(parts.config.model.model_provider)
        state = RunState(parts.config, parts.grids, parts.platform, built, parts.optimizer, parts.scheduler)
        train_step(parts, loader.next_step())
        weights = ModelWeights(built, parts.grids, provider, family, "float32").locate()
        whole = WholeTensors(weights, parts.platform.device)
        moved, batches = Offload(built, parts.optimizer), loader.next_step()
        for kind in ("gradients", "optimizer", "weights"):
            move(moved, kind)
            ask(f"{kind}: step", lambda: train_step(parts, batches))
            ask(f"{kind}: own step", lambda: [each.zero_grad_buffer() for each in built.wrapped.values()])
            ask(f"{kind}: norms", parts.optimizer.prepare)
            ask(f"{kind}: update", parts.optimizer.step)
            ask(f"{kind}: evaluation", lambda: run_schedule(parts, batches, forward_step, forward_only=True))
            ask(f"{kind}: refit", lambda: list(whole))
            ask(f"{kind}: checkpoint", lambda: state.held(state.saved()))
            ask(f"{kind}: export", partial(export_model, built, parts.grids, provider, family, f"{out}/{kind}"))
        moved.bring_back("weights")
        ask("optimizer again: refit", lambda: list(whole))
        moved.bring_back()
        ask("back: step", lambda: train_step(parts, batches))
        move(moved, "optimizer")
        moved.prefetch_optimizer()
        parts.optimizer.prepare()
        assert not built.residency.arriving, "the optimizer waited for its state"
        assert not {"prepare", "step"} & vars(parts.optimizer).keys(), "nothing is guarded any longer"
        parts.optimizer.step()
    return found
