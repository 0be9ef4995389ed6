"""The site of the pages builds strictly, has every flag, and its pages stay short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mimo.config.toml_file import flag_name, typed_fields
from mimo.config.trainer import CheckpointConfig, TrainConfig
from tests.support.launch import ROOT

MAX_LINES = 250


def build(out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "scripts/build_docs.py", str(out)], cwd=ROOT, text=True, capture_output=True,
                          check=False)


def test_the_site_builds_and_has_every_flag_with_its_help(tmp_path: Path) -> None:
    done = build(tmp_path / "site")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path}/site/index.html ") and done.stdout.count("\n") == 1
    shown = (tmp_path / "site" / "reference" / "train.html").read_text()
    for section in (TrainConfig, CheckpointConfig):
        assert not [name for name in typed_fields(section) if f"<code>{flag_name(name)}</code>" not in shown]
    assert "Print grids, lanes, parameters per rank and bridge bytes, then exit; needs no GPU." in shown
    assert "train_hetero.py" in (tmp_path / "site" / "search" / "search_index.json").read_text()


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_pages_are_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= MAX_LINES
