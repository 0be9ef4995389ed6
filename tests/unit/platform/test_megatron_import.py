"""Megatron Core is imported without packages that nothing here lets it use. Others can import them afterwards."""

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
assert "megatron.core" in sys.modules
assert not {"multistorageclient", "wandb", "torch.utils.tensorboard"} & set(sys.modules)
import megatron.core.timers
assert megatron.core.timers.wandb is None
import torch.utils.tensorboard
import multistorageclient
import_megatron()
assert sys.modules["multistorageclient"] is multistorageclient
from megatron.core.msc_utils import MultiStorageClientFeature
assert not MultiStorageClientFeature.is_enabled()
"""


def test_megatron_core_comes_without_packages_of_others():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr[-2000:]
