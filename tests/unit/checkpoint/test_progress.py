"""Progress of a run, as stored in its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mimo.checkpoint.state import Progress, RunState, common_state, weights_only_state
from mimo.config.cli import parse


def test_bad_samples_go_on_from_a_checkpoint_and_from_0_where_it_does_not_tell() -> None:
    common = {"iteration": 5, "consumed_samples": 80, "skipped_iterations": 1, "bad_samples": 7}
    assert Progress.of(common) == Progress(5, 80, 1, 7)
    del common["bad_samples"]
    assert Progress.of(common) == Progress(5, 80, 1, 0)


def test_imported_weights_are_of_no_run() -> None:
    assert Progress.of(weights_only_state(["language"], "", {})) == Progress()


def test_a_file_of_sizes_may_change_or_go_while_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "rope_theta": 5e5}), encoding="utf-8")
    config = parse(["--model-provider", "causal_lm", "--hf-config", str(path)])
    grids: Any = SimpleNamespace(layout=SimpleNamespace(grids={}, num_lanes=1))
    scheduler: Any = SimpleNamespace(state_dict=dict, num_steps=0)
    none: Any = None
    state = RunState(config, grids, none, none, none, scheduler)
    path.unlink()
    assert common_state(state, Progress(), None)["model"]["rotary_base"] == 5e5
