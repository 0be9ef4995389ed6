"""Megatron Core is imported without its client of object storage, which others can import afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.launch import ROOT

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
from mimo.platform import get_platform
from mimo.platform.megatron_import import import_megatron
get_platform("cpu")
import_megatron()
assert "megatron.core" in sys.modules and "multistorageclient" not in sys.modules
import multistorageclient
import_megatron()
assert sys.modules["multistorageclient"] is multistorageclient
from megatron.core.msc_utils import MultiStorageClientFeature
assert not MultiStorageClientFeature.is_enabled()
"""


def test_megatron_core_comes_without_object_storage():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr[-2000:]
