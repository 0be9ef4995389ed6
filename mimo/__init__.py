"""A trainer for multimodal models whose encoder and language model live on separate process grids."""

from __future__ import annotations

import sys
from importlib.util import find_spec

# The commonest first mistake is another Python than that of the environment, whose own error names a package that
# nobody has heard of.
if find_spec("tyro") is None:
    raise ModuleNotFoundError(f"{sys.executable} does not have the packages of mimo-hetero: run 'source "
                              ".venv/bin/activate' in this shell, after ./scripts/setup.sh cpu has made .venv")
