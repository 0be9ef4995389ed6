"""Warnings of libraries about each other are hidden. Those of a program itself are shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT

pytestmark = pytest.mark.slow

# Shows its own deprecations, as Transformer Engine does.
ENGINE = """
import warnings
warnings.filterwarnings("module", category=DeprecationWarning, module="transformer")
def attention():
    warnings.warn("Relying on pointer-based detection of packed layouts is deprecated", DeprecationWarning)
    warnings.warn("something else is deprecated", DeprecationWarning)
"""
SCRIPT = """
from mimo.platform.megatron_import import quieten_transformer_engine, quieten_megatron
quieten_megatron()
import transformer_engine.pytorch
quieten_transformer_engine()
transformer_engine.pytorch.attention()
"""


def said(folder: Path, *options: str) -> str:
    package = folder / "transformer_engine"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "pytorch.py").write_text(ENGINE)
    script = f"import sys; sys.path.insert(0, {str(folder)!r})\n{SCRIPT}"
    return subprocess.run([sys.executable, *options, "-c", script], cwd=ROOT, capture_output=True, text=True,
                          check=True).stderr


def test_megatron_cores_warnings_about_transformer_engine_are_not_shown(tmp_path: Path) -> None:
    shown = said(tmp_path)
    assert "something else" in shown and "pointer-based" not in shown
    assert "pointer-based" in said(tmp_path, "-W", "default")
