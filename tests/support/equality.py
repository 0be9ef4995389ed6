"""The same model and global batches on one process in plain PyTorch, and on any layout through the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mimo.config.cli import parse
from mimo.config.trainer import RunConfig
from mimo.config.validate import num_microbatches, row_multiple, validate
from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import LANGUAGE
from tests.support.global_state import (
    Piece,
    assemble,
    read_gradients,
    read_parameters,
    set_parameters,
    worst_errors,
)

NUM_STEPS = 3
TOLERANCE = 1e-5
BASE = """--dataset-provider mock --device cpu --no-bf16 --transformer-impl local
--seq-length 64 --global-batch-size 12 --micro-batch-size 1 --train-iters 3 --lr-decay-style constant
--lr 2e-3 --encoder-lr 1e-3 --projector-lr 4e-3 --weight-decay 0.1 --encoder-weight-decay 0.05 --adam-eps 1e-5
--clip-grad 0.5 --mock-images-max 3 --mock-text-only-fraction 0.45 --mock-min-length 5 --mock-max-length 30
--num-generations 0 --watchdog-timeout-s 60""".split()
MODEL = """--model-provider mock --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2
--ffn-hidden-size 64 --vocab-size 96 --vision-num-layers 2 --vision-hidden-size 32 --vision-num-attention-heads 4
--vision-ffn-hidden-size 64 --vision-image-size 16 --vision-patch-size 8 --image-token-id 95
--mock-image-size 16""".split()
DENSE: tuple[str, ...] = ()
MOE = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32", "--moe-aux-loss-coeff", "0.01")


@dataclass
class Outcome:
    """Results of a run as plain arrays.

    Attributes:
        losses: loss of each step.
        grad_norms: global norm of each step before clipping.
        gradients: after the first backward pass, normalised, before clipping.
        parameters: after the last step.
        routing: (layer, sample key) -> bool `[tokens, experts]` of the first step.
        optimizer_tensors: number of optimizer state tensors of each module on this rank.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[Piece] = field(default_factory=list)
    parameters: list[Piece] = field(default_factory=list)
    routing: list[tuple[int, str, tuple[int, int], np.ndarray]] = field(default_factory=list)
    optimizer_tensors: dict[str, int] = field(default_factory=dict)
    batch_facts: dict[str, int] = field(default_factory=dict)


def parse_config(*flags: str) -> RunConfig:
    """The tests' small model with more flags; a model of other flags, or of a config.json, brings its own sizes."""
    named = flags[flags.index("--model-provider") + 1] if "--model-provider" in flags else "mock"
    sizes = ["--model-provider", named, "--mock-image-size", "16"] if "--hf-config" in flags else MODEL
    return parse([*BASE, *(() if named.startswith(("nemotron", "qwen")) else sizes), *flags])


def make_loader(config: RunConfig, layout: Layout, rank: int, split: str = "train", *, whole_rows: bool = False) -> Any:
    """The loader of a rank."""
    from mimo.data.loader import open_loader
    from mimo.registry import dataset_provider, model_provider

    return open_loader(layout, rank, model_provider=model_provider(config.model.model_provider),
                       model_config=config.model_family, data_provider=dataset_provider(config.data.dataset_provider),
                       data_config=config.dataset, micro_batch_size=config.train.micro_batch_size,
                       num_microbatches=num_microbatches(config), seq_length=config.train.seq_length,
                       row_multiple=None if whole_rows else row_multiple(config, layout), seed=config.train.seed,
                       split=split, microbatch_order=config.data.microbatch_order, prefetch=False)


def make_trainer(config: RunConfig, layout: Layout) -> Any:
    """Grids and trainer parts of this rank, with parameters that depend on their names only."""
    from mimo.grid.groups import Grids
    from mimo.platform import current_platform
    from mimo.registry import model_provider
    from mimo.training.setup import setup_trainer
    from mimo.watchdog.watchdog import Watchdog

    grids = Grids(layout, current_platform().backend)
    watchdog = Watchdog(config.train.watchdog_timeout_s, grids.describe())
    parts = setup_trainer(config, model_provider(config.model.model_provider), grids, current_platform(), watchdog)
    set_parameters(parts.built.model)
    parts.optimizer.reload_model_params()
    return parts


@contextmanager
def open_trainer(config: RunConfig, layout: Layout) -> Iterator[Any]:
    """Context of `make_trainer`, whose process groups and watchdog end with it."""
    parts = make_trainer(config, layout)
    try:
        yield parts
    finally:
        parts.watchdog.close()
        parts.grids.destroy()


@contextmanager
def open_training(config: RunConfig, layout: Layout, rank: int) -> Iterator[tuple[Any, Any]]:
    """Context of a trainer and its loader."""
    with open_trainer(config, layout) as parts, closing(make_loader(config, layout, rank)) as loader:
        yield parts, loader


def watch_routing(model: torch.nn.Module, found: list[tuple[int, np.ndarray]]) -> list[Any]:
    """Record every router's decision of a forward pass: (layer number, bool `[tokens, experts]`)."""
    from megatron.core.transformer.moe.router import TopKRouter

    def record(router: Any, inputs: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():  # a forward pass that will be recomputed has no graph
            found.append((router.layer_number, outputs[1].detach().bool().cpu().numpy().copy()))

    return [part.register_forward_hook(record) for part in model.modules() if isinstance(part, TopKRouter)]


def note_gradients(parts: Any, outcome: Any) -> None:
    """Have the first step of the optimizer put the model's gradients into `outcome.gradients`."""
    real_step = parts.optimizer.step

    def capture_then_step() -> Any:
        if not outcome.gradients:
            outcome.gradients = read_gradients(parts.built.model)
        return real_step()

    parts.optimizer.step = capture_then_step


def run_layout(rank: int, flags: tuple[str, ...], world_size: int, force_all_reduce: bool = True) -> Outcome:
    """Train NUM_STEPS steps on this rank of a layout; for `WorkerPool.run`."""
    from mimo.training.step import train_step

    config = parse_config(*flags)
    layout = validate(config, world_size)
    with open_training(config, layout, rank) as (parts, loader):
        outcome = Outcome()
        routing: list[tuple[int, np.ndarray]] = []
        note_gradients(parts, outcome)
        for step in range(NUM_STEPS):
            microbatches = loader.next_step()
            hooks = watch_routing(parts.built.model, routing) if step == 0 else []
            result = train_step(parts, microbatches, force_all_reduce=force_all_reduce and step == 0)
            if step == 0:
                outcome.routing = _by_sample(parts, layout, rank, microbatches, routing)
            for hook in hooks:
                hook.remove()
            assert result.success
            outcome.losses.append(result.loss)
            outcome.grad_norms.append(result.grad_norm)
        # An overlapped gather of the last step's parameters would only happen in the next forward pass.
        parts.built.model.disable_forward_pre_hook()
        outcome.parameters = read_parameters(parts.built.model)
        outcome.optimizer_tensors = count_optimizer_tensors(parts)
    return outcome


def count_optimizer_tensors(parts: Any) -> dict[str, int]:
    """Optimizer state tensors with elements, for each module of this rank."""
    counts = {}
    for name, info in parts.optimizer.module_infos.items():
        if info.is_active:
            state = (
                []
                if info.optimizer is None
                else [
                    value
                    for chained in vars(info.optimizer).get("chained_optimizers", [info.optimizer])
                    for entry in chained.optimizer.state.values()
                    for value in entry.values()
                ]
            )
            counts[name] = sum(isinstance(value, torch.Tensor) and value.numel() > 1 for value in state)
    return counts


def _by_sample(
    parts: Any, layout: Layout, rank: int, microbatches: Any, routing: list[tuple[int, np.ndarray]]
) -> list[tuple[int, str, tuple[int, int], np.ndarray]]:
    """(layer, sample key, context- and tensor-parallel rank, bool `[tokens of this rank, experts]`)."""
    if rank not in layout.language.ranks or not routing:
        return []
    place = layout.language.coordinates(rank)
    split = place["cp"], place["tp"] if parts.config.layout.sequence_parallel else 0
    layers = len({layer for layer, _ in routing})
    found = []
    for index, (layer, choice) in enumerate(routing):
        keys = microbatches[index // layers].text.keys
        by_token = choice.reshape(-1, len(keys), choice.shape[-1])
        found += [(layer, key, split, by_token[:, sample]) for sample, key in enumerate(keys)]
    return found


def gather_routing(outcomes: list[Outcome]) -> dict[tuple[int, str], np.ndarray]:
    """Decisions of whole samples, sequence shards joined in order."""
    from mimo.data.batch import context_positions

    shards: dict[tuple[int, str], dict[tuple[int, int], np.ndarray]] = {}
    for outcome in outcomes:
        for layer, key, split, choice in outcome.routing:
            shards.setdefault((layer, key), {})[split] = choice
    found = {}
    for place, parts in shards.items():
        by_rank = np.concatenate([parts[split] for split in sorted(parts)])
        cp = 1 + max(split[0] for split in parts)
        order = np.concatenate([context_positions((len(by_rank),), cp, rank) for rank in range(cp)])
        found[place] = np.empty_like(by_rank)
        found[place][order] = by_rank
    return found


def run_oracle(rank: int, flags: tuple[str, ...], num_steps: int = NUM_STEPS, frozen: frozenset[str] = frozenset(),
               frozen_steps: int = 0) -> Outcome:
    """Train on one process in plain PyTorch, one sample at a time: no schedule, DDP, bridge or Megatron optimizer.

    Args:
        rank: this process.
        flags: added to the tests' small model.
        num_steps: steps to train.
        frozen: parts that do not train in the first `frozen_steps` steps.
        frozen_steps: how many steps that are.
    """
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    config = parse_config(*flags)
    config = replace(
        config, layout=type(config.layout)(layout="colocated"), train=replace(config.train, micro_batch_size=1)
    )
    layout = Layout("colocated", 1, (GridSpec("vision"),), GridSpec(LANGUAGE))
    with open_trainer(replace(config, optim=replace(config.optim, use_distributed_optimizer=False)), layout) as parts:
        model = _unwrapped(parts.built.model)
        # Nothing may depend on how long rows are.
        loader = make_loader(config, layout, 0, whole_rows=True)
        outcome = Outcome(batch_facts={"text_only": 0, "with_images": 0, "different_targets": 0})
        optimizer = _torch_adam(config, model)
        device = parts.platform.device
        routing: list[tuple[int, np.ndarray]] = []
        for step in range(num_steps):
            for name, parameter in model.named_parameters() if frozen else ():
                parameter.requires_grad_(step >= frozen_steps or part_of(name) not in frozen)
            microbatches = loader.next_step()
            hooks = watch_routing(model, routing) if step == 0 else []
            loss_sum, num_tokens = 0.0, 0.0
            for batch in microbatches:
                for bridge in model.colocated_comms.values():
                    bridge.begin_step(
                        [[sum(batch.encoders["vision"].token_counts)]], [[sum(batch.text.token_counts["vision"])]]
                    )
                MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=device))
                batch = batch.to(device)
                loss = (model(batch) * batch.text.loss_mask).sum()
                loss.backward()
                loss_sum += loss.item()
                num_tokens += batch.text.loss_mask.sum().item()
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad /= num_tokens
            if step == 0:
                outcome.gradients = read_gradients(model)
                outcome.routing = _by_sample(parts, layout, 0, microbatches, routing)
                _note_facts(outcome, microbatches)
            for hook in hooks:
                hook.remove()
            outcome.losses.append(loss_sum / num_tokens)
            outcome.grad_norms.append(torch.nn.utils.clip_grad_norm_(parameters, config.optim.clip_grad).item())
            optimizer.step()
            optimizer.zero_grad()
        outcome.parameters = read_parameters(model)
    return outcome


def part_of(name: str) -> str:
    """Return the part of --freeze to which a parameter belongs, by its name or its global key."""
    if "modality_submodules" not in name:
        return "language"
    return "projector" if "input_projections" in name else "vision"


def _note_facts(outcome: Outcome, microbatches: Any) -> None:
    counts = [sum(batch.text.token_counts["vision"]) for batch in microbatches]
    outcome.batch_facts["text_only"] = counts.count(0)
    outcome.batch_facts["different_images"] = len(set(counts))
    outcome.batch_facts["different_targets"] = len({batch.text.loss_mask.sum().item() for batch in microbatches})


def _unwrapped(model: Any) -> Any:
    """The model without data-parallel wrappers and their gradient hooks."""
    from megatron.core.distributed import DistributedDataParallel

    def bare(part: Any) -> Any:
        if not isinstance(part, DistributedDataParallel):
            return part
        # The wrapper's hooks live on gradient accumulators that it keeps alive.
        part.grad_accs.clear()
        for parameter in part.module.parameters():
            if "main_grad" in vars(parameter):
                del parameter.main_grad
                parameter.data = parameter.data.clone()
        return part.module

    model.language_model = bare(model.language_model)
    for name in model.modality_submodules:
        model.modality_submodules[name] = bare(model.modality_submodules[name])
    return model


def _torch_adam(config: RunConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW with the run's learning rates and decays, grouped by hand."""
    flags = config.optim
    groups = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        vision = "modality_submodules" in name
        lr = flags.projector_lr if "input_projections" in name else flags.encoder_lr if vision else flags.lr
        decay = flags.encoder_weight_decay if vision else flags.weight_decay
        no_decay = parameter.ndim == 1 or name.endswith("bias")
        groups.append({"params": [parameter], "lr": lr, "weight_decay": 0.0 if no_decay else decay})
    return torch.optim.AdamW(groups, betas=(flags.adam_beta1, flags.adam_beta2), eps=flags.adam_eps)


def reference(outcome: Outcome) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The oracle's gradients and parameters as whole tensors."""
    return assemble(outcome.gradients), assemble(outcome.parameters)


def find_differences(oracle: Outcome, outcomes: list[Outcome]) -> list[str]:
    """List where ranks differ from the oracle by more than TOLERANCE: losses, norms, routing, gradients, parameters.

    Each entry starts with `loss`, `grad norm`, `routing`, `gradient NAME` or `parameter NAME`.
    """
    found = []
    for rank, outcome in enumerate(outcomes):
        for what, ours, theirs in (("loss", outcome.losses, oracle.losses),
                                   ("grad norm", outcome.grad_norms, oracle.grad_norms)):
            for step, (value, expected) in enumerate(zip(ours, theirs, strict=True)):
                if not abs(value - expected) <= TOLERANCE * abs(expected):
                    found.append(f"{what} of step {step} on rank {rank}: {value} is not {expected}")
    expected_routing, routing = gather_routing([oracle]), gather_routing(outcomes)
    assert routing.keys() == expected_routing.keys()
    # The oracle's rows are whole, and those of a layout may have less padding.
    found += [f"routing of {place}" for place, choice in expected_routing.items()
              if not np.array_equal(routing[place], choice[:len(routing[place])])]
    gradients, parameters = reference(oracle)
    for what, whole, by_rank in (("gradient", gradients, [outcome.gradients for outcome in outcomes]),
                                 ("parameter", parameters, [outcome.parameters for outcome in outcomes])):
        for name, error in worst_errors(whole, by_rank).items():
            if not error < TOLERANCE:
                found.append(f"{what} {name}: relative error {error:.2e}")
    return found


def assert_equal(oracle: Outcome, outcomes: list[Outcome]) -> None:
    """Check that every rank equals the oracle; see `find_differences`."""
    found = find_differences(oracle, outcomes)
    assert not found, "\n".join(found[:8] + [f"... {len(found)} differences"])
