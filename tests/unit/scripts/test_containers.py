"""The container files: linted, in stages, without root, and with the files that they copy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "scripts" / "containers"
DOCKERFILES = sorted(FOLDER.glob("*.Dockerfile"))


def test_hadolint_finds_nothing() -> None:
    command = [Path(sys.executable).parent / "hadolint", "--no-color", *DOCKERFILES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_images_have_stages_a_pinned_base_no_root_and_what_they_copy(path: Path) -> None:
    text = path.read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.M)
    assert len(bases) == 2 and all(re.search(r":.*\d\.\d|:\d\d\.\d\d", base) for base in bases)
    assert re.findall(r"^USER (\S+)", text, re.M)[-1] not in ("root", "0")
    (name,) = re.findall(r"^RUN bash scripts/setup\.sh ([a-z-]+)", text, re.M)
    assert (ROOT / "scripts" / "requirements" / f"{name}.txt").exists()
    kept = {line[1:] for line in Path(f"{path}.dockerignore").read_text().splitlines() if line.startswith("!")}
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M):
        for source in sources.split():
            assert (ROOT / source).exists() and source.split("/")[0] in kept, source


def test_the_apptainer_recipe_starts_from_the_image_of_the_docker_file() -> None:
    (image,) = re.findall(r"^From: (\S+)", (FOLDER / "mimo.def").read_text(), re.M)
    assert image in (FOLDER / "gpu.Dockerfile").read_text()
