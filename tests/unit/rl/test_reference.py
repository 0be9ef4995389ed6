"""Which checkpoint is the reference policy of a run that is started again, while the folders of checkpoints change."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mimo.checkpoint import paths
from mimo.checkpoint.load import find_source
from mimo.checkpoint.reader import COMMON
from mimo.config.cli import parse_as, to_toml
from mimo.config.rl_run import DESCRIPTION, RlRunConfig
from mimo.registry import model_provider
from mimo.rl import reference


class State:
    """What finding the reference needs of `mimo.checkpoint.state.RunState`."""

    grids = built = None
    platform = type("Platform", (), {"device": None})

    def __init__(self, config: RlRunConfig) -> None:
        self.config, self.references = config, dict[str, Any]()
        flags = config.checkpoint
        self.source = None if flags.load is None else find_source(flags, Path(flags.load), repair=True)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that starts the run of --save own."""
    class Policy:
        def __init__(self, *_: Any) -> None:
            pass

        def exchange(self) -> None:
            pass

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reference, "ReferencePolicy", Policy)
    monkeypatch.setattr(reference, "load_weights", lambda *_: None)
    monkeypatch.setattr(reference, "broadcast_result", lambda _, make: make())

    def raise_error(_: Any, error: str | None) -> None:
        if error:
            raise ValueError(error)

    monkeypatch.setattr(reference, "raise_on_any_rank", raise_error)

    def start(flags: str, iteration: int, *, keeps_records: bool = True) -> list[str]:
        """Start the run of --save own, save its checkpoint of an iteration and return the lines on its reference."""
        config = parse_as(RlRunConfig, ["--model-provider", "causal_lm", *flags.split(), "--save", "own"], DESCRIPTION)
        state: Any = State(config)
        none: Any = None
        _, lines = reference.reference_policy(state, model_provider("causal_lm"), config.rl, none,
                                              resumed=iteration > 1)
        save("own", iteration, to_toml(config), state.references if keeps_records else None)
        return lines

    return start


def save(folder: str, iteration: int, config: str = "", references: Any = None) -> None:
    """Write a checkpoint without tensors."""
    written = paths.begin(Path(folder), iteration)
    common = {"iteration": iteration, "config": config} | ({} if references is None else {"references": references})
    torch.save(common, written / COMMON)
    (written / paths.METADATA).write_text("{}")
    paths.publish(Path(folder), iteration, None)


KL = "--kl-coeff 0.1"
FROM_OTHERS = f"{KL} --load others --finetune"


def test_weights_that_a_run_began_with_stay_its_reference(runs) -> None:
    save("others", 1)
    assert runs(FROM_OTHERS, 1) == ["reference policy: the weights that the run starts from"]
    save("others", 2)
    for iteration in (2, 3):
        assert runs(FROM_OTHERS, iteration) == ["reference policy: weights from others/iter_0000001"]
    shutil.rmtree("others/iter_0000001")
    with pytest.raises(ValueError, match="^--load others: the reference policy of this run has the weights of "
                                         "iter_0000001, which is not there any more; put it back, or give --ref-load"):
        runs(FROM_OTHERS, 4)


def test_a_run_may_get_a_reference_later(runs) -> None:
    save("others", 1)
    save("others", 2)
    without = "--load others --finetune --ckpt-step 1"
    assert runs(without, 1) == runs(without, 2) == []
    assert runs(FROM_OTHERS, 3) == ["reference policy: weights from others/iter_0000001"]


def test_a_folder_of_references_is_read_at_the_same_checkpoint_until_another_is_given(runs) -> None:
    save("others", 1)
    save("named", 5)
    flags = f"{FROM_OTHERS} --ref-load"
    assert runs(f"{flags} named", 1) == ["reference policy: weights from named/iter_0000005"]
    save("named", 6)
    assert runs(f"{flags} ./named/", 2) == ["reference policy: weights from named/iter_0000005"]
    assert runs(f"{flags} named/iter_0000006", 3) == ["reference policy: weights from named/iter_0000006"]
    save("named", 7)
    assert runs(f"{flags} named", 4) == ["reference policy: weights from named/iter_0000007"]
    save("others", 2)
    assert runs(FROM_OTHERS, 5) == ["reference policy: weights from others/iter_0000001"]
    shutil.rmtree("named/iter_0000007")
    paths.write_tracker(Path("named"), "6")
    with pytest.raises(ValueError, match="^--ref-load named: .* iter_0000007, which is not there any more"):
        runs(f"{flags} named", 6)


def test_checkpoints_of_older_versions_do_not_say_which_one_was_the_reference(runs) -> None:
    save("others", 1)
    runs(FROM_OTHERS, 1, keeps_records=False)
    save("others", 2)
    assert runs(FROM_OTHERS, 2) == ["reference policy: weights from others/iter_0000002"]
    save("others", 3)
    assert runs(FROM_OTHERS, 3) == ["reference policy: weights from others/iter_0000002"]


def test_who_has_to_name_the_reference_learns_where_it_was(runs) -> None:
    save("others", 1)
    runs(FROM_OTHERS, 1)
    with pytest.raises(ValueError, match=r"Name them: --ref-load FOLDER .* with\. It started with the weights of "
                                         "others/iter_0000001$"):
        runs(f"{KL} --load own", 2)
