"""The trainer's sections as train_rl.py has them: flags that mean something else there, or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, override

from mimo.config.checks import refuse, refuse_below
from mimo.config.optim import OptimConfig
from mimo.config.trainer import DataConfig, LayoutConfig, ObserveConfig, TrainConfig


@dataclass(frozen=True)
class RlTrainConfig(TrainConfig):
    """Run: batch sizes, length, evaluation, device, safety."""

    micro_batch_size: int = 1
    """train_hetero.py only: --max-tokens-per-microbatch makes the microbatches."""
    global_batch_size: int = 8
    """Completions of one iteration; a multiple of --completions-per-prompt."""
    seq_length: int = 2048
    """Largest number of tokens of a prompt and its completion together, after image expansion."""
    train_samples: int | None = None
    """Length of the run in completions; schedules then count completions."""
    eval_interval: int = 0
    """Iterations between evaluations of --eval-prompts; 0: only before the first update and at the end."""
    eval_iters: int = 0
    """train_hetero.py only: --eval-prompts says how large an evaluation is."""
    num_generations: int = 20
    """Completions of held-out prompts to print after the last evaluation; needs --eval-prompts."""
    encoder_prefetch_depth: int = 0
    """train_hetero.py only."""
    dry_run: bool = False
    """Print grids, engine, GPUs and batch, check what the flags name, then exit; needs no GPU and starts nothing."""
    world_size: int | None = None
    """Number of trainer ranks for --dry-run. A run takes it from torchrun."""


@dataclass(frozen=True)
class RlLayoutConfig(LayoutConfig):
    """Grids: which ranks hold the encoder, which the language model, and how each is split."""

    llm_only: bool = False
    """train_hetero.py only: a model with an encoder is trained with it."""


@dataclass(frozen=True)
class RlOptimConfig(OptimConfig):
    """Optimizer: one per module, clipped by one global norm."""

    correct_encoder_grad_for_partial_participation: bool = False
    """train_hetero.py only."""


@dataclass(frozen=True)
class RlObserveConfig(ObserveConfig):
    """Logging: the run folder, TensorBoard, the console."""

    completions_interval: int | None = None
    """Iterations between those whose completions are recorded: generations.jsonl gets two prompts of the first
    iteration and of every n-th one, with rewards and advantages; 0: none. Default: a tenth of the run."""

    def records_completions(self, iteration: int, total_iterations: int) -> bool:
        """Return whether generations.jsonl has completions of an iteration, counted from 1."""
        interval = self.completions_interval
        if interval is None:
            interval = max(1, total_iterations // 10)
        return bool(self.generations_mib and interval) and (iteration == 1 or iteration % interval == 0)

    @override
    def check(self) -> None:
        super().check()
        refuse_below(self, {"completions_interval": 0})
        refuse(bool(self.completions_interval) and not self.generations_mib,
               f"--completions-interval {self.completions_interval} with --generations-mib 0, which writes no "
               "generations.jsonl: leave one of them out")


@dataclass(frozen=True)
class PromptDataConfig(DataConfig):
    """Data: which prompts."""

    dataset_provider: str = "arithmetic"
    """Prompt data set: a name (arithmetic, conversations, digits, gsm8k) or pkg.module:attr."""
    lane_loader: Literal["routed", "per-lane"] = "routed"
    """train_hetero.py only."""
    skip_long_prompts: bool = False
    """Leave out the prompts of files to which --seq-length leaves no room for --max-completion-tokens; without it they
    are refused before the run begins."""
