"""Made-up run folders whose figures a test knows."""

from __future__ import annotations

import json
import os
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from mimo.observability.trackers import Answer, Generation, GenerationKind, GenerationsTracker
from mimo.report.html import POLICY, plotly_script
from mimo.report.run_reader import IMAGE_URL, Run, read_run

FLAGS = """[train]
train-iters = {iterations}
global-batch-size = 8
device = "{device}"

[layout]
layout = "{layout}"

[model]
model-provider = "llava"

[optim]
lr = {lr}
"""
# Parts of a step of one second, by module.
PARTS = {"vision": {"forward": 0.1, "backward": 0.15, "bridge-wait": 0.6, "pipeline-wait": 0.0, "data-wait": 0.02,
                    "gradient-sync": 0.03, "optimizer": 0.05, "idle": 0.04, "other": 0.01},
         "language": {"forward": 0.3, "backward": 0.5, "bridge-wait": 0.07, "pipeline-wait": 0.0, "data-wait": 0.02,
                      "gradient-sync": 0.03, "optimizer": 0.05, "idle": 0.02, "other": 0.01}}


def step_record(iteration: int, loss: float, *, seconds: float = 1.0, **further: Any) -> dict[str, Any]:
    """Return an iteration as `StepRecord.to_dict` and the tracker write it; the clock runs 0.5 s between iterations."""
    timeline = {f"timeline/{module}/{part}-s": seconds * value for module, parts in PARTS.items()
                for part, value in parts.items()}
    most = {f"{key.removesuffix('-s')}-max-s": value for key, value in timeline.items()}
    steps = {f"timeline/{module}/step-s": seconds for module in PARTS}
    return {"iteration": iteration, "consumed_samples": 8 * iteration, "wall_time": 1.79e9 + 1.5 * iteration,
            "lm loss": loss, "grad-norm": 1.0 / iteration, "learning-rate": 1e-3, "learning-rate/language": 1e-3,
            "learning-rate/vision": 5e-4, "iteration-time": seconds, "tokens-per-s-per-gpu": 2000.0 / seconds,
            "tflops": 300.0, "mfu": 0.3, "data-wait-s": 0.02, "bridge-wait-s": 0.6, **timeline, **most, **steps,
            "peak-memory-bytes/vision": 2**30, "peak-memory-bytes/language": 3 * 2**30, "skipped-iterations": 0,
            "success": True, **further}


def evaluation(iteration: int, loss: float, exact: float) -> dict[str, Any]:
    """Return a record of an evaluation as `RunLogger.log_eval` writes it."""
    return {"iteration": iteration, "consumed_samples": 8 * iteration, "wall_time": 1.79e9 + 1.5 * iteration + 0.3,
            "lm loss validation": loss, "exact match validation": exact, "samples validation": 64}


def policy_record(iteration: int, reward: float, **further: Any) -> dict[str, Any]:
    """Return an iteration of reinforcement learning."""
    return {"iteration": iteration, "consumed_samples": 8 * iteration, "wall_time": 1.79e9 + 3.0 * iteration,
            "reward": reward, "loss": 0.01, "gen-kl": 1e-13, "entropy": 0.5, "completion-length": 3.0,
            "completion-length-max": 5.0, "grad-norm": 1.0, "learning-rate": 1e-4, "tokens-per-s-per-gpu": 500.0,
            "iteration-time": 2.0, "memory-s": 0.0, "refit-s": 0.2, "rollout-s": 0.6, "reward-s": 0.1,
            "rollout-wait-s": 1.0, "log-probs-s": 0.3, "update-s": 0.6, "refit-bytes": 2**20, "success": True,
            **further}


def write_generations(folder: Path, kind: GenerationKind, by_iteration: dict[int, list[Generation]]) -> None:
    """Add answers to generations.jsonl of a run folder, as a run writes them."""
    tracker = GenerationsTracker(folder / "generations.jsonl", 10**6, 1 << 24, print)
    for iteration, generations in by_iteration.items():
        tracker.show(iteration, generations, kind)
    tracker.close()


def rewarded_run(folder: Path, iterations: int = 40) -> Run:
    """Return a run of reinforcement learning on images, with completions of held-out prompts and of training."""
    write_run(folder, [policy_record(step, 0.2 + 0.01 * step) for step in range(1, iterations + 1)])

    def prompt(key: str, rewards: list[float], **more: Any) -> Generation:
        scan = np.full((28, 90, 1), 200, np.uint8)
        return Generation(key, [Answer(f"I read\n{reward:g} <end>", reward, **more) for reward in rewards], "42",
                          "<image> What is the number?\nAnswer: ", [scan])

    write_generations(folder, "held-out", {step: [prompt("valid/0", [step / iterations])]
                                           for step in (0, iterations // 2, iterations)})
    every = range(4, iterations + 1, 4)
    write_generations(folder, "training", {step: [prompt(f"train/{step}", [0.0, 1.0] * 6, advantage=0.5)]
                                           for step in (1, *every)})
    return read_run(folder)


def interval(kind: str, begin_s: float, end_s: float, module: str, microbatch: int | None = None) -> dict[str, Any]:
    """Return an interval as `timeline/step-N.json` has it."""
    return {"kind": kind, "name": kind, "module": module, "microbatch": microbatch, "begin_s": begin_s, "end_s": end_s}


def timeline(iteration: int, grids: dict[str, int], *, microbatches: int = 2) -> dict[str, Any]:
    """Return a step of grids of so many data-parallel ranks; a rank computes a little longer than the one before."""
    ranks, first = [], 0
    for module, count in grids.items():
        for index in range(count):
            at, found = 0.0, []
            for batch in range(microbatches):
                length = 0.01 + 1e-5 * index
                found += [interval("bridge-wait", at, at + 0.005, module, batch),
                          interval("forward", at + 0.005, at + 0.005 + length, module, batch)]
                at += 0.005 + length
            found.append(interval("other", at, at + 0.001, module))
            ranks.append({"rank": first + index, "place": "", "intervals": found,
                          "modules": {module: {"tp": 0, "cp": 0, "dp": index, "pp": 0}}})
        first += count
    return {"iteration": iteration, "tokens_per_lane": {"image": [1.0], "text": [1.0]}, "ranks": ranks}


def write_run(folder: Path, records: list[dict[str, Any]], *, planned: int | None = None, device: str = "cuda",
              layout: str = "disjoint", lr: float = 1e-3, timelines: tuple[dict[str, Any], ...] = ()) -> Path:
    """Write a run folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    iterations = planned or max((record["iteration"] for record in records), default=1)
    (folder / "run_config.toml").write_text(FLAGS.format(iterations=iterations, device=device, layout=layout, lr=lr))
    for found in timelines:
        (folder / "timeline").mkdir(exist_ok=True)
        (folder / "timeline" / f"step-{found['iteration']}.json").write_text(json.dumps(found))
    return folder


def run_of(folder: Path, records: list[dict[str, Any]], **further: Any) -> Run:
    """Return a run folder as the page reads it; `further` as of `write_run`."""
    return read_run(write_run(folder, records, **further))


def write_stall(folder: Path, name: str, text: str, *, after_s: float) -> None:
    """A file of a stall, so long after the clock's second 1.79e9: `usual_records` begin 0.5 s after that."""
    path = folder / name
    path.write_text(text)
    os.utime(path, (1.79e9 + after_s, 1.79e9 + after_s))


def usual_records(count: int = 50) -> list[dict[str, Any]]:
    """Return a run that learns: the loss falls from 3 by 0.02 an iteration, evaluated halfway and at the end."""
    records = [step_record(iteration, 3.0 - 0.02 * (iteration - 1)) for iteration in range(1, count + 1)]
    return [*records[: count // 2], evaluation(count // 2, 2.6, 0.5), *records[count // 2 :],
            evaluation(count, 2.1, 0.954)]


VOID = {"meta", "img"}


class Sound(HTMLParser):
    """Checks that tags close in order and that nothing points out of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if tag == "img" and name == "src":
                assert value is not None and IMAGE_URL.fullmatch(value), value
                continue
            assert name not in ("src", "href", "xlink:href", "action", "onload"), (tag, name, value)
            assert value is None or "://" not in value, (tag, name, value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, (tag, self.open)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def contents(html: str) -> str:
    """Return a page without Plotly's script, which it has once, and with the policy that keeps it off the network."""
    script = plotly_script()
    assert html.count(script) == 1
    assert POLICY.startswith("default-src 'none';") and "http" not in POLICY
    assert html.index(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">') < html.index("<style>")
    return html.replace(script, "")


def headings(html: str) -> list[str]:
    """Return the titles of the sections of a page that is sound."""
    html = contents(html)
    parser = Sound()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    assert "http" not in re.sub(r"</?html", "", html).lower().replace("http-equiv", "")
    assert not re.search(r"@import|url\(", html)
    assert not re.search(r"(?<![\w-])nan(?![\w-])", html, re.IGNORECASE)
    assert html.isascii()
    return parser.headings


def figures(html: str) -> dict[str, dict[str, Any]]:
    """Return the figures of a page, data and layout, by their titles."""
    found = re.findall(r'<h3>([^<]*)</h3><div class="chart"[^>]*></div><script type="application/json">(.*?)</script>',
                       html, re.DOTALL)
    assert len(found) == html.count('<div class="chart"')
    return {unescape(title): json.loads(text) for title, text in found}
