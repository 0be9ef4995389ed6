"""The import of the wheel, without a package that it looks for and that nothing here lets it use."""

from __future__ import annotations

import importlib
import sys

# Object storage. Megatron-Energon depends on it, so it is there; the wheel imports it wherever it is, which takes most
# of a second, and uses it once a program has switched that on. Energon's own import of it is left alone.
STORAGE_CLIENT = "multistorageclient"


def import_wheel() -> None:
    """Import Megatron, after the platform is installed. Where it is imported already, this does nothing."""
    if STORAGE_CLIENT in sys.modules:
        return
    # Python's own mark of a module that is not there: its import raises ModuleNotFoundError, which the wheel expects.
    sys.modules[STORAGE_CLIENT] = None  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core.msc_utils")
    finally:
        del sys.modules[STORAGE_CLIENT]
