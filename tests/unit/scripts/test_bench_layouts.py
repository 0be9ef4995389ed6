"""The benchmark of layouts: what is searched, what made-up runs come to, what is an error."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest

from mimo.config.cli import parse
from mimo.config.trainer import RunConfig
from mimo.config.validate import validate
from mimo.planner.costs import Profile
from mimo.planner.gpus import GPUS
from scripts.bench import layouts, run_series
from scripts.bench.layout_search import COLOCATED, DISJOINT, HOMOGENEOUS, KINDS, by_split, search
from scripts.bench.run_series import OUT_OF_MEMORY, Outcome, outcome_of

BASE = """--model-provider mock --dataset-provider mock --seq-length 128 --device cpu --global-batch-size 24 --no-bf16
--train-iters 1""".split()
FLAGS = ["--device", "cpu", "--gpus", "4", "--global-batch-size", "24", "--no-variants"]


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_that_the_search_finds_work_and_have_their_flags(kind):
    found, refused = search(parse(BASE), kind, 4)
    assert len(found) + len(refused) >= 3
    for candidate in found[::4]:
        config = parse([*BASE, *shlex.split(candidate.flags)])
        assert config == candidate.config
        validate(config, 4)
    for flags, reason in refused[::4]:
        with pytest.raises(ValueError) as error:
            validate(parse([*BASE, *shlex.split(flags)]), 4)
        assert str(error.value) == reason
    names = [candidate.name for candidate in found]
    assert len(set(names)) == len(names)


def test_the_best_split_comes_first():
    found, _ = search(parse(BASE), DISJOINT, 4)
    heavy = by_split(found, "vision", {"vision": 3.0, "language": 1.0})[0].config.layout
    light = by_split(found, "vision", {"vision": 1.0, "language": 3.0})[0].config.layout
    assert (heavy.encoder_dp, heavy.encoder_tp, heavy.llm_dp) == (3, 1, 1)
    assert (light.encoder_dp, light.llm_dp, light.llm_tp, light.llm_pp) == (1, 3, 1, 1)


def record(seconds: float, loss: float) -> dict[str, Any]:
    return {"iteration-time": seconds, "lm loss": loss, "grad-norm": 1.5, "image-tokens": 300, "text-tokens": 100,
            "flops/vision": 1e12, "flops/language": 3e12,
            "timeline/vision/forward-s": 0.1, "timeline/vision/backward-s": 0.2,
            "timeline/language/forward-s": 0.3, "timeline/language/backward-s": 0.6,
            "peak-memory-bytes/vision": 2**30, "peak-memory-bytes/language": 3 * 2**30}


def test_figures_of_a_run_are_those_of_its_timed_iterations():
    config = parse([*BASE, "--encoder-dp", "1", "--llm-dp", "3"])
    found = outcome_of(config, [record(9.0, 5.0), record(1.0, 4.0), record(3.0, 3.0)], 1, 4)
    assert (found.tokens_per_s, found.step_ms, found.peak_gib) == (800 / 4 / 4, 2000, 3)
    assert found.tflops == pytest.approx(8 / 4 / 4) and found.losses == [5, 4, 3]
    assert found.busy_s == {"vision": pytest.approx(0.3), "language": pytest.approx(2.7)} and not found.error


def test_a_run_says_how_often_the_device_was_full():
    config = parse([*BASE, "--encoder-dp", "1", "--llm-dp", "3"])
    full = {"allocation-retries/vision": 1, "allocation-retries/language": 3}
    records = [record(9.0, 5.0) | {"allocation-retries/vision": 7}, record(1.0, 4.0), record(3.0, 3.0) | full]
    assert outcome_of(config, records, 1, 4).allocation_retries == 1.5


class Runs:
    """Made-up runs in place of real ones: tokens/s by kind and number of lanes.

    Attributes:
        made: configuration and name of each.
        num_batches: how many batches each start of runs repeats.
        changes: what to change of the outcome of a run whose name has a word.
    """

    def __init__(self) -> None:
        self.made: list[tuple[RunConfig, str]] = []
        self.num_batches: list[int] = []
        self.changes: dict[str, dict[str, Any]] = {}

    def __call__(self, configs: Any, names: Any, folder: Path, ranks: int, warmup: int, num_batches: int,
                 limit: Any, fresh: bool) -> list[Outcome]:
        assert ranks == 4
        self.num_batches.append(num_batches)
        self.made += zip(configs, names, strict=True)
        return [self.outcome(config, name) for config, name in zip(configs, names, strict=True)]

    def outcome(self, config: RunConfig, name: str) -> Outcome:
        speed = 100.0 * config.layout.llm_dp + (10.0 if "disjoint" in name else 0.0)
        found = Outcome("", speed, 1.0, 5.0, 2.0, [3.0, 2.0, 1.0, 1.0, 1.0], {"vision": 1.0, "language": 3.0},
                        {"vision": 1.0, "language": 1.0}, [1.5, None, 1.5, 1.5, 1.5])
        for word, changes in self.changes.items():
            if word in name:
                found = Outcome(**vars(found) | changes)
        return found


@pytest.fixture
def runs(monkeypatch) -> Runs:
    made = Runs()
    monkeypatch.setattr(layouts, "run_all", made)
    return made


def result(capsys) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found, {f"{row['kind']}: {row['layout']}": row for row in found["layouts"]}


def test_the_best_of_each_kind_take_turns(runs, capsys):
    assert layouts.main([*FLAGS, "--candidates", "2", "--rounds", "3"]) == 0
    turns = [name for _, name in runs.made if name.startswith("round")]
    assert [name.split(":")[0] for name in turns] == [f"round {number}" for number in (1, 2, 3) for _ in range(3)]
    assert [name.split(":")[1].strip() for name in turns] == [HOMOGENEOUS, COLOCATED, DISJOINT] * 3
    found, rows = result(capsys)
    best = rows["homogeneous: --layout homogeneous --llm-dp 4"]
    assert (best["tokens_per_s"], best["over_homogeneous"], best["rounds"]) == (400, 1, 3)
    disjoint = rows["disjoint: --llm-dp 3"]
    assert disjoint["over_homogeneous"] == pytest.approx(310 / 400) and disjoint["eta_split"] == 1
    assert disjoint["eta_split_by_time"] == pytest.approx(0.5)
    assert len(rows) == 6 and found["flops_share"] == {"vision": 0.25, "language": 0.75}
    assert found["pruned"]["disjoint"] > 0 and found["loss_difference"] == 0


def test_a_profile_gives_predictions_and_the_share_of_the_bound(runs, capsys, tmp_path):
    profile = tmp_path / "profile.json"
    Profile(GPUS["H200"]).save(profile)
    assert layouts.main([*FLAGS, "--rounds", "1", "--profile", str(profile)]) == 0
    out = capsys.readouterr().out
    assert "| predicted, ms | bound, ms | predicted, GiB | of the bound |" in out
    rows = json.loads(out.splitlines()[-1])["layouts"]
    assert len(rows) > 2 and all(0 < row["bound_ms"] <= row["predicted_ms"] * 1.001 for row in rows)
    # A made-up step takes 5 ms.
    assert all(row["bound_reached"] == pytest.approx(row["bound_ms"] / 5.0) for row in rows)
    made = len(runs.made)
    assert layouts.main([*FLAGS, "--device", "cuda", "--list", "--profile", str(profile)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(runs.made) == made and listed[0] == "| layout | kind | predicted, ms | bound, ms | predicted, GiB |"
    assert "--layout homogeneous --llm-dp 4" in listed[2]


@pytest.mark.parametrize(("steps", "search_steps"), [(4, 1), (1, 4), (2, 2)])
def test_all_runs_repeat_the_same_batches_and_warmup_has_seen_them(runs, steps, search_steps):
    assert layouts.main([*FLAGS, "--rounds", "1", "--warmup-steps", "3", "--steps", str(steps), "--search-steps",
                         str(search_steps)]) == 0
    assert len(runs.num_batches) >= 3 and set(runs.num_batches) == {min(3, steps)}


def test_a_run_that_fails_and_losses_that_differ_are_errors(runs, capsys):
    runs.changes["disjoint"] = {"error": "the run failed"}
    assert layouts.main([*FLAGS, "--rounds", "1"]) == 1
    runs.changes = {"disjoint": {"losses": [3.0, 2.0, 1.001, 9.0]}}
    capsys.readouterr()
    assert layouts.main([*FLAGS, "--rounds", "1"]) == 1
    said = "losses differ by 0.001 (as a share, more than 0.0001; --loss-tolerance 0.0001) on disjoint"
    assert said in capsys.readouterr().err
    assert layouts.main([*FLAGS, "--rounds", "1", "--loss-tolerance", "0.01"]) == 0
    runs.changes = {"disjoint": {"grad_norms": [3.0, None, 1.5]}}
    capsys.readouterr()
    assert layouts.main([*FLAGS, "--rounds", "1"]) == 1
    assert "grad norms differ by 1 (as a share, more than 0.002; --loss-tolerance 0.0001)" in capsys.readouterr().err


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """Folders of the runs of each launch; a run called bad ends it out of memory."""
    launches: list[list[str]] = []

    def launch(runs: Any, folder: Path, ranks: int, limit: Any, meanwhile: Any) -> Path:
        launches.append([Path(run["folder"]).name for run in runs])
        for run in runs:
            place = Path(run["folder"])
            if place.name == "bad":
                (place / "out-of-memory-rank1").write_text("no room")
                break
            (place / "metrics.jsonl").write_text("".join(json.dumps(record(1.0, 2.0)) + "\n" for _ in range(2)))
            (place / "done").touch()
        (folder / "output.txt").write_text("what it said")
        return folder / "output.txt"

    monkeypatch.setattr(run_series, "launch", launch)
    return launches


def test_runs_share_their_processes_up_to_one_that_fails(started, tmp_path, capsys):
    config = parse([*BASE, "--encoder-dp", "1", "--llm-dp", "1"])
    names = ["one", "bad", "two", "three"]
    found = layouts.run_all([config] * 4, names, tmp_path, 2, 1, 1, None)
    assert started == [names, ["two", "three"]]
    assert [outcome.error for outcome in found] == ["", OUT_OF_MEMORY, "", ""] and found[3].tokens_per_s == 200
    said = capsys.readouterr().err
    assert "bad: out-of-memory-rank1: no room" in said and "three: 1,000 ms a step, 200 tokens/s per GPU" in said
    started.clear()
    found = layouts.run_all([config] * 4, names, tmp_path, 2, 1, 1, None, fresh=True)
    assert started == [[name] for name in names] and [bool(outcome.error) for outcome in found] == [0, 1, 0, 0]


def test_figures_that_are_none_or_not_finite_differ() -> None:
    assert layouts.difference(2.0, 2.002) == pytest.approx(1e-3, rel=1e-2)
    assert layouts.difference(None, None) == 0
    assert {layouts.difference(*pair) for pair in ((None, 1.0), ("NaN", 1.0), (1.0, math.nan))} == {math.inf}
