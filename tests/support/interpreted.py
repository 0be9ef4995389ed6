"""Modules with Triton kernels that run in Triton's interpreter, on a CPU."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest


def interpreted(name: str, patch: pytest.MonkeyPatch) -> ModuleType:
    """Import module `name` with interpreted kernels, beside the one that other tests import, until `patch` ends."""
    patch.setenv("TRITON_INTERPRET", "1")
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None
    spec = importlib.util.spec_from_file_location(f"interpreted.{name}", found.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module
