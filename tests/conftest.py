"""Settings for all tests. A test is in the fast suite unless it is marked `slow` (or `gpu`)."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("hypothesis") is not None:  # tests/gpu do without
    from hypothesis import settings

    # An example may take longer than 200 ms where the machine is busy, which is no reason to fail.
    settings.register_profile("unhurried", settings(), deadline=None)
    settings.load_profile("unhurried")
