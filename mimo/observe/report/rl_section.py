"""Section of reinforcement learning: where an iteration went, completions, mismatch, refits."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from mimo.observe.report.bars import Bar, stacked_bars
from mimo.observe.report.html import any_above, chart, run_name, section, table
from mimo.observe.report.rl import CSS_OF_RL, rl_parts
from mimo.observe.report.run import Run
from mimo.observe.report.summary import finite, median, steady
from mimo.observe.report.text import number, seconds, size


def rl_section(runs: Sequence[Run]) -> str:
    """Nothing for runs without rewards."""
    runs_rl = [run for run in runs if run.learns_from_rewards]
    if not runs_rl:
        return ""
    bars = [Bar(run_name(runs, index, "iteration"), parts) for index, run in enumerate(runs)
            if (parts := rl_parts(run)[0])]
    split = stacked_bars("Where an iteration went, mean", bars, CSS_OF_RL,
                         note="Hatched: the trainer waits for completions. Solid: its own work.") if bars else ""
    return section("Reinforcement learning", [
        split, _refits(runs),
        chart("gen-kl: trainer against engine (nats per token)", runs, {"gen-kl": "gen-kl"}, log=True,
              note="Logarithmic axis. Large means that engine and trainer are not the same model."),
        chart("Length of completions (tokens)", runs, {"completion-length": "mean", "completion-length-max": "longest"},
              zero=True),
        chart("Entropy (nats per token)", runs, {"entropy": "entropy"}, zero=True),
        chart("Shares", runs, _shares(runs), zero=True),
        chart("Time of a refit (s)", runs, {"refit-s": "refit"}, zero=True),
        chart("KL divergence from the reference (nats per token)", runs,
              {"reference-kl": "reference-kl"} if any_above(runs, "reference-kl") else {}),
    ])


def _shares(runs: Sequence[Run]) -> dict[str, str]:
    names = {"equal-reward-prompts": "prompts whose completions have one reward", "truncated-completions": "cut by the "
             "limit", "importance-clipped-fraction": "clipped importance weights", "clipped-low": "clipped low",
             "clipped-high": "clipped high"}
    return {key: name for key, name in names.items() if any_above(runs, key)}


def _refits(runs: Sequence[Run]) -> str:
    rows = []
    for index, run in enumerate(runs):
        table_ = steady(run.steps)
        taken, moved = median(table_.get("refit-s")), median(table_.get("refit-bytes"))
        if taken is None or moved is None:
            continue
        rows.append([escape(run_name(runs, index, run.name)), number(len(finite(run.steps.get("refit-s")))),
                     seconds(taken), seconds(float(np.nanmax(run.steps.get("refit-s")))), size(moved),
                     f"{size(moved / taken)}/s" if taken else ""])
    return table(["", "refits", "median", "longest", "bytes", "rate"], rows, "Refits: weights to the engine")
