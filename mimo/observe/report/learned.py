"""Sections on what was learned."""

from __future__ import annotations

from collections.abc import Sequence

from mimo.observe.report.html import any_above, by_module, chart, evaluated, lines_of, prefixed, section, varies
from mimo.observe.report.lines import line_chart
from mimo.observe.report.run import EVALUATED, Run


def learned(runs: Sequence[Run]) -> str:
    """Losses, held-out figures, learning rates, gradients."""
    return section("Learning", [_losses(runs), *_held_out(runs), _further_losses(runs), _rates(runs), _gradients(runs),
                                _loss_scale(runs)])


def _losses(runs: Sequence[Run]) -> str:
    rewarded = any(run.learns_from_rewards for run in runs)
    if rewarded:
        lines = lines_of(runs, {"reward": "as drawn in training"})
        return line_chart("Reward", lines + evaluated(runs, "reward" + EVALUATED, "held-out"))
    lines = lines_of(runs, {"lm loss": "training"}) + evaluated(runs, "lm loss" + EVALUATED, "held-out")
    return line_chart("Loss (nats per target token)", lines)


def _held_out(runs: Sequence[Run]) -> list[str]:
    """Other figures of evaluations, such as the share of exact matches."""
    shown = {"lm loss", "reward", "samples"}
    names = dict.fromkeys(key.removesuffix(EVALUATED) for run in runs for key in run.evaluations.columns
                          if key.endswith(EVALUATED))
    if any(run.learns_from_rewards for run in runs):  # the rest are figures of completions
        return []
    return [line_chart(f"Held-out: {name}", evaluated(runs, name + EVALUATED, name, colour=0), zero=True)
            for name in names if name not in shown]


def _further_losses(runs: Sequence[Run]) -> str:
    """Of MoE balance, of each depth of multi-token prediction; of the policy in reinforcement learning."""
    keys = {key: key for run in runs for key in run.steps.columns
            if key != "lm loss" and (key.endswith(" loss") or key.endswith("_loss")) and not key.startswith("moe/")}
    policy = chart("Policy loss", runs, {"loss": "policy loss"}) if any(run.learns_from_rewards for run in runs) else ""
    return chart("Further losses", runs, keys) + policy


def _rates(runs: Sequence[Run]) -> str:
    parts = prefixed(runs, "learning-rate/")
    return chart("Learning rate", runs, parts or {"learning-rate": "learning rate"}, zero=True)


def _gradients(runs: Sequence[Run]) -> str:
    note = "Logarithmic axis." + (" Skipped steps have none." if any_above(runs, "skipped-iterations") else "")
    return chart("Gradient norm, before clipping", runs, {"grad-norm": "gradient norm"}, log=True, note=note)


def _loss_scale(runs: Sequence[Run]) -> str:
    if not varies(runs, "loss-scale"):
        return ""
    return chart("Loss scale", runs, {"loss-scale": "loss scale"}, log=True, note="Logarithmic axis.")


def lanes(runs: Sequence[Run]) -> str:
    """How evenly lanes, and with them the ranks of the encoder, are filled."""
    imbalance = chart("Encoder imbalance", runs, {"encoder-imbalance": "as trained",
                                                  "encoder-imbalance-unbalanced": "without balanced packing"},
                      note="Image tokens of the fullest lane over the mean of all lanes. 1 is even.")
    uneven = ("encoder-imbalance", "encoder-imbalance-unbalanced")
    charts = [imbalance if any(any_above(runs, key, 1.0) for key in uneven) else ""]
    for kind in ("image", "text"):
        least, most = (f"timeline/{kind}-tokens-per-lane/{end}" for end in ("min", "max"))
        differs = any(run.steps.has(most) and bool((run.steps.get(least) < run.steps.get(most)).any()) for run in runs)
        if differs:
            charts.append(chart(f"{kind.capitalize()} tokens of a lane", runs, {most: "fullest lane",
                                                                                least: "emptiest lane"}, zero=True))
    return section("Lanes", charts, "A lane is the data of one replica of the language model. The one with most image "
                                    "tokens keeps the others waiting.")


def memory(runs: Sequence[Run]) -> str:
    """Peak memory of each module."""
    return section("Memory", [chart("Peak memory of the fullest rank (GiB)", runs,
                                    by_module(runs, "peak-memory-bytes/*"), scale=2.0**-30, zero=True)])
