"""Policy updates on made-up completions, on any layout; inside a worker process."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from mimo.config.cli import parse
from mimo.config.rl import RlConfig
from mimo.config.validate import validate
from mimo.observe.errors import ReportedElsewhereError
from mimo.rl.policy import PolicyResult, PolicyTrainer
from mimo.rl.rollouts import Completion
from tests.support import equality
from tests.support.global_state import Piece, read_parameters
from tests.support.policy_steps import FLAGS, VOCAB_SIZE

PROMPTS = ((3, 4), (5,), (7, 8, 9, 10), (11, 12))
LENGTHS = (9, 4, 1, 12, 6, 15, 3, 7)
MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --qk-layernorm --moe-aux-loss-coeff 0".split()
NUM_UPDATES = 2


@dataclass
class Outcome:
    """What a rank saw.

    Attributes:
        results: of each update.
        before, after: parameters.
        error: what the last update raised.
    """

    results: list[PolicyResult] = field(default_factory=list)
    before: list[Piece] = field(default_factory=list)
    after: list[Piece] = field(default_factory=list)
    error: str = ""


def completions(step: int) -> list[Completion]:
    """Two of each prompt, with log-probs near those of an untrained model."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
        log_probs = (-math.log(VOCAB_SIZE) - 0.5 * torch.rand(length, generator=generator)).tolist()
        reward = torch.rand((), generator=generator).item()
        found.append(Completion(f"prompt {number // 2}#{number % 2}", number // 2, PROMPTS[number // 2], tuple(ids),
                                tuple(log_probs), "length", reward))
    return found


def update(rank: int, flags: tuple[str, ...], world_size: int, config: RlConfig, spoil: bool = False) -> Outcome:
    """Take steps on this rank of a layout.

    Args:
        rank: this process.
        flags: of the model and the layout.
        world_size: number of processes.
        config: the algorithm.
        spoil: make the loss NaN.
    """
    run = parse([*FLAGS, *MOE, "--adam-eps", "1e-4", "--lr", "1e-2", "--seq-length",
                 str(config.max_tokens_per_microbatch), *flags])
    parts: Any = equality.make_trainer(run, validate(run, world_size))
    outcome = Outcome(before=read_parameters(parts.built.model))
    trainer = PolicyTrainer(parts, config, VOCAB_SIZE, pad_token_id=0)
    if spoil:
        with torch.no_grad():
            for parameter in parts.built.model.parameters():
                parameter.fill_(math.nan)
    try:
        outcome.results = [trainer.update(completions(step)) for step in range(NUM_UPDATES)]
    except (ValueError, ReportedElsewhereError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.after = read_parameters(parts.built.model)
    parts.watchdog.close()
    parts.grids.destroy()
    return outcome
