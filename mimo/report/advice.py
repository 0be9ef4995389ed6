"""Advice of a report: flags to try next, as far as the figures of the run itself support them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np

from mimo.config.validate import may_have_graphs
from mimo.observability.spans import Kind
from mimo.protocols import LANGUAGE
from mimo.report.charts import run_name
from mimo.report.html import section
from mimo.report.rules import Rules
from mimo.report.run_reader import Run
from mimo.report.summary import (
    ModuleTime,
    learning,
    mean,
    module_times,
    most_waiting,
    percent,
    rl_parts,
    rounded,
    steady,
)

# Gains below this are within what steps vary by.
LEAST_GAIN = 1.05
# Shares of a step, of tokens and of prompts from which on something is worth a change.
BRIDGE_SHARE, DATA_SHARE, SYNC_SHARE, PIPELINE_SHARE, HOST_SHARE = 0.1, 0.1, 0.05, 0.15, 0.2
PADDING_SHARE, UNEVEN, EQUAL_SHARE, CUT_SHARE = 0.4, 1.2, 0.5, 0.2
# Share of iterations in which memory was full.
FULL_SHARE = 0.1


@dataclass(frozen=True)
class Advice:
    """Something to try.

    Attributes:
        found: what the figures say, a sentence.
        flags: flags to try; empty if there are none for it.
        gain: how many times as fast a step should be at most or about, as a sentence.
    """

    found: str
    flags: str
    gain: str = ""


def advice(run: Run) -> list[Advice]:
    """Return what the run's own figures support, the largest gain in time first, then data and learning.

    No flags are among it that the trainer would refuse.
    """
    flags = {name: value for each in run.flags.values() for name, value in each.items()}
    times = module_times(run)
    if not flags or not len(run.steps):
        return []
    rules = Rules(run)
    found = [*_from_memory(run, flags), *_from_timeline(run, times, flags, rules), *_from_data(run, flags)]
    if run.learns_from_rewards:
        found += _from_rollouts(run, flags, rules)
    best = learning(run)
    if best is not None and best.best is not None and best.key != "reward":
        at, batch = best.best[0], flags.get("global-batch-size")
        shorter = f"--train-iters {at}"
        if "train-samples" in flags:
            shorter = f"--train-samples {at * batch}" if isinstance(batch, int) else ""
        found.append(Advice(f"The held-out loss was best at iteration {at:,} ({rounded(best.best[1])}) and has risen "
                            "since.", shorter))
    # What was found is worth knowing, even if there are no flags for it.
    return [each if not each.flags or rules.accept(each.flags) else replace(each, flags="", gain="")
            for each in found]


# Time.


def _from_memory(run: Run, flags: Mapping[str, Any]) -> Iterator[Advice]:
    table = steady(run.steps)
    full = np.zeros(len(table), dtype=bool)
    for key, column in table.columns.items():
        if key.startswith("allocation-retries/"):
            full |= column > 0
    if full.mean() < FULL_SHARE:
        return
    kept = flags.get("encoder-activation-gib")
    change = f"--encoder-activation-gib {max(kept - 4, 0):g}" if kept else ""
    yield Advice(f"GPU memory was full in {percent(float(full.mean()))} of the iterations. The allocator then waits "
                 "for the GPU and gives back what it kept for later. Recompute more, or keep fewer activations.",
                 change)


def _from_timeline(run: Run, times: Mapping[str, ModuleTime], flags: Mapping[str, Any], rules: Rules
                   ) -> Iterator[Advice]:
    yield from _other_division(run, times, flags, rules)
    for name, each in times.items():
        sync = each.share(Kind.GRADIENT_SYNC)
        if name == LANGUAGE and sync >= SYNC_SHARE and flags.get("overlap-grad-reduce") is False and (
                flags.get("llm-dp", 1) > 1):
            yield Advice(f"The language grid reduces gradients for {percent(sync)} of its step, and nothing else runs "
                         "then.", "--overlap-grad-reduce", f"At most {rounded(1 / (1 - sync))} times as fast.")
        waited = each.share(Kind.PIPELINE_WAIT)
        rows = flags.get("micro-batch-size", 1)
        late = each.host_bound_s / each.step_s if each.step_s else 0.0
        if name == LANGUAGE and waited >= PIPELINE_SHARE and late < HOST_SHARE and rows % 2 == 0 and (
                _has_rows(flags, rows // 2)):
            yield Advice(f"The language grid waits for its own pipeline for {percent(waited)} of its step. Twice as "
                         "many microbatches fill it better.", f"--micro-batch-size {rows // 2}")
        if late >= HOST_SHARE:
            yield Advice(
                f"In passes of {name} that take {percent(late)} of a step, the GPU waits for its host, which launches "
                "short kernels too slowly.", _fewer_launches(run, name, flags, rules))
    waits = [each.share(Kind.DATA_WAIT) for each in times.values()]
    # In reinforcement learning the wait for completions is counted as one for data.
    if waits and max(waits) >= DATA_SHARE and not run.learns_from_rewards:
        workers = flags.get("num-workers")
        change = f"--num-workers {max(2 * workers, 2)}" if isinstance(workers, int) else ""
        yield Advice(f"Ranks wait for samples for {percent(max(waits))} of a step.", change,
                     f"At most {rounded(1 / (1 - max(waits)))} times as fast.")


def _fewer_launches(run: Run, module: str, flags: Mapping[str, Any], rules: Rules) -> str:
    """Return the flags with which the host launches less for a module; empty if none are known."""
    if run.learns_from_rewards:
        return ""
    if module == LANGUAGE and flags.get("cuda-graphs") is False and (
            rules.config is not None and may_have_graphs(rules.config)):
        return "--cuda-graphs"
    rows, lanes = flags.get("micro-batch-size", 1), flags.get("llm-dp", 1)
    fits = flags.get("global-batch-size", 1) % (2 * rows * lanes) == 0
    return f"--micro-batch-size {2 * rows}" if fits and not flags.get("packing-buffer-size") else ""


def _has_rows(flags: Mapping[str, Any], micro_batch_size: int) -> bool:
    """Whether every encoder replica gets a row of each microbatch of its lane, as the trainer demands."""
    # Encoder windows divide images, and a homogeneous layout has a replica for each lane.
    has_windows = flags.get("layout") == "colocated" and (
        "encoder-window" in flags or flags.get("llm-pp", 1) > 1 or flags.get("llm-cp", 1) > 1)
    if has_windows or flags.get("layout") == "homogeneous":
        return True
    return bool(flags.get("encoder-dp", 1) <= flags.get("llm-dp", 1) * micro_batch_size)


def _other_division(run: Run, times: Mapping[str, ModuleTime], flags: Mapping[str, Any], rules: Rules
                    ) -> Iterator[Advice]:
    """Advise to divide the ranks of disjoint grids in another way, if that balances their work."""
    encoders = [name for name in times if name != LANGUAGE]
    if flags.get("layout") != "disjoint" or len(times) != 2 or len(encoders) != 1 or any(
            each.beside_s for each in times.values()):
        return
    waiting = most_waiting(times)
    share = times[waiting].share(Kind.BRIDGE_WAIT)
    if share < BRIDGE_SHARE:
        return
    sizes = {part: flags.get(f"{part}-tp", 1) * flags.get(f"{part}-pp", 1) * (
        flags.get("llm-cp", 1) if part == "llm" else 1) for part in ("encoder", "llm")}
    now = flags.get("encoder-dp", 1), flags.get("llm-dp", 1)
    world = now[0] * sizes["encoder"] + now[1] * sizes["llm"]
    step_s = max(each.step_s for each in times.values())

    def predicted_s(name: str, replicas_now: int, replicas: int) -> float:
        """Predict a grid's step: its passes shrink with more replicas, its other work and other waits stay."""
        each = times[name]
        rest_s = each.step_s - each.passes_s - each.parts.get(Kind.BRIDGE_WAIT, 0.0)
        return each.passes_s * replicas_now / replicas + max(rest_s, 0.0)

    rows = flags.get("global-batch-size", 0), flags.get("micro-batch-size", 1)
    options = []
    for llm_dp in range(1, world):
        left = world - llm_dp * sizes["llm"]
        if left <= 0 or left % sizes["encoder"]:
            continue
        encoder_dp = left // sizes["encoder"]
        divides = max(encoder_dp, llm_dp) % min(encoder_dp, llm_dp) == 0
        # An encoder replica needs a row of each microbatch of its lane.
        shared = encoder_dp <= llm_dp * rows[1]
        if divides and shared and rows[0] % (rows[1] * llm_dp) == 0 and (encoder_dp, llm_dp) != now:
            slower_s = max(predicted_s(encoders[0], now[0], encoder_dp), predicted_s(LANGUAGE, now[1], llm_dp))
            offset = f" --llm-offset {encoder_dp * sizes['encoder']}" if "llm-offset" in flags else ""
            options.append((slower_s, f"--encoder-dp {encoder_dp} --llm-dp {llm_dp}{offset}"))
    found = f"The {escape(waiting)} grid waited for the other grid for {percent(share)} of its step"
    faster = [option for option in sorted(options) if step_s / option[0] >= LEAST_GAIN and not run.learns_from_rewards]
    # Experts, for example, may not divide over as many ranks.
    best = next((option for option in faster if rules.accept(option[1])), None)
    if best is not None:
        yield Advice(f"{found}.", best[1],
                     f"It should be {rounded(step_s / best[0])} times as fast, if passes shrink with the replicas.")
    else:
        yield Advice(f"{found}. No other division of the {world} ranks with the same splits should gain "
                     f"{100 * (LEAST_GAIN - 1):.0f} %. In colocated and homogeneous layouts no grid waits for another "
                     "one: <code>mimo plan</code> compares them.", "")


# Data.


def _from_data(run: Run, flags: Mapping[str, Any]) -> Iterator[Advice]:
    table = steady(run.steps)
    used, uneven, bad = (mean(table.get(key)) for key in ("packing-utilisation", "encoder-imbalance", "bad-samples"))
    packs = flags.get("packing-buffer-size")
    if used is not None and 1 - used >= PADDING_SHARE and packs == 0 and _has_rows(flags, 1):
        rows, length = flags.get("micro-batch-size", 1), flags.get("seq-length", 0)
        longer = (f" A row may then have up to the {rows * length:,} tokens that {rows} rows have now (--seq-length)."
                  if rows > 1 and length else "")
        yield Advice(f"{percent(1 - used)} of the tokens are padding. Packing puts several samples into a row.{longer}",
                     "--packing-buffer-size 64 --micro-batch-size 1",
                     f"At most {rounded(1 / used)} times the samples a second.")
    if uneven is not None and uneven >= UNEVEN and packs and flags.get("packing-balance") is False:
        yield Advice(f"The images of the fullest lane give the encoder {rounded(uneven)} times the mean work, and the "
                     "other lanes wait for it.", "--packing-balance")
    if bad:
        yield Advice(f"{rounded(float(run.steps.get('bad-samples')[-1]))} samples could not be used. "
                     "python scripts/data_stats.py lists them.", "")


# Reinforcement learning.


def _from_rollouts(run: Run, flags: Mapping[str, Any], rules: Rules) -> Iterator[Advice]:
    parts, total, waited = rl_parts(run)
    rollout, rest = parts.get("rollout", 0.0), total - parts.get("rollout", 0.0)
    if total and flags.get("rollout-mode") == "sync" and flags.get("engine-placement") in ("separate", "ray"):
        gain = total / max(rollout + parts.get("refit", 0.0), rest)
        if gain >= LEAST_GAIN:
            yield Advice(f"The trainer waits {percent(rollout / total)} of an iteration while completions are "
                         "generated, and the engine is idle the rest of the time.",
                         " ".join(["--rollout-mode one-step-off", *(
                             f"--{flag} 0" for flag in ("engine-restarts", "max-refills") if flags.get(flag))]),
                         f"It should be {rounded(gain)} times as fast.")
    equal, cut = (mean(steady(run.steps).get(key)) for key in ("equal-reward-prompts", "truncated-completions"))
    if equal is not None and equal >= EQUAL_SHARE and isinstance(flags.get("completions-per-prompt"), int):
        more = f"--completions-per-prompt {2 * flags['completions-per-prompt']}"
        # A batch counts completions, and has whole prompts.
        if not rules.accept(more) and isinstance(flags.get("global-batch-size"), int):
            more += f" --global-batch-size {2 * flags['global-batch-size']}"
        refills = "" if flags.get("max-refills") else " --max-refills asks for others in their place."
        yield Advice(f"All completions of {percent(equal)} of the prompts have the same reward, so these prompts teach "
                     f"nothing. Use prompts of another difficulty, or more completions.{refills}", more)
    if cut is not None and cut >= CUT_SHARE and isinstance(flags.get("max-completion-tokens"), int):
        limit, length = flags["max-completion-tokens"], flags.get("seq-length", 0)
        longer = f" --seq-length {length + limit}" if 2 * limit >= length else ""
        if longer and flags.get("max-tokens-per-microbatch", length + limit) < length + limit:
            longer += f" --max-tokens-per-microbatch {length + limit}"
        yield Advice(f"{percent(cut)} of the completions are cut off by the limit.",
                     f"--max-completion-tokens {2 * limit}{longer}")


def advice_section(runs: Sequence[Run]) -> str:
    """Show what to try next."""
    items = []
    for index, run in enumerate(runs):
        for each in advice(run):
            flags = f" Try <code>{escape(each.flags)}</code>." if each.flags else ""
            items.append(f"<li>{run_name(runs, index, '')}{each.found}{flags} {each.gain}</li>")
    return section("What to try next", [f'<ul style="grid-column:1/-1">{"".join(items)}</ul>'] if items else [],
                   "This advice follows from the figures of this page. Gains are predictions: change one thing at a "
                   "time, and compare the runs with <code>python scripts/report.py RUN1 RUN2</code>.")
