"""How far a run is, as its checkpoints tell it."""

from __future__ import annotations

from mimo.checkpoint.state import Progress, weights_only_state


def test_bad_samples_go_on_from_a_checkpoint_and_from_0_where_it_does_not_tell() -> None:
    common = {"iteration": 5, "consumed_samples": 80, "skipped_iterations": 1, "bad_samples": 7}
    assert Progress.of(common) == Progress(5, 80, 1, 7)
    del common["bad_samples"]
    assert Progress.of(common) == Progress(5, 80, 1, 0)


def test_imported_weights_are_of_no_run() -> None:
    assert Progress.of(weights_only_state(["language"], "", {})) == Progress()
