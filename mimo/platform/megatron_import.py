"""The import of Megatron Core, without packages that it looks for and that nothing here lets it use."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings

# Megatron Core imports these wherever they are installed, which takes two seconds of a start:
# object storage, which Megatron-Energon depends on, and which Megatron Core uses once a program has switched that on;
# Weights & Biases and TensorBoard, for Megatron Core's own timers. Imports of other packages are left alone.
UNUSED = ("multistorageclient", "wandb", "torch.utils.tensorboard")


def import_megatron() -> None:
    """Import Megatron, after the platform is installed. Where it is imported already, this does nothing."""
    hidden = [name for name in UNUSED if name not in sys.modules]
    # Python's own mark of a module that is not there: its import raises ModuleNotFoundError, which Megatron Core
    # expects.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        importlib.import_module("megatron.core.msc_utils")
        importlib.import_module("megatron.core.timers")
    finally:
        for name in hidden:
            del sys.modules[name]


# What Megatron Core says when it is imported, and nobody who runs a program can act on.


def quieten_megatron() -> None:
    """Hide what Megatron Core says about its own internals, and torch about Megatron Core, at every start on every
    rank.

    Nobody who runs a trainer can act on it. `python -W default` and PYTHONWARNINGS=default bring it back.
    """
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # Without a GPU it warns that there is none: Megatron Core's import of kernels that are never built here.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    if sys.warnoptions:
        return
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"megatron\.")
    # Compiling a source file names its path instead of its module.
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=r".*megatron")
    # Said at the place of the subclass.
    warnings.filterwarnings("ignore", category=UserWarning, message=r"\w+ is experimental and still under active")
    # Megatron Core's calls, which torch 2.13 has renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.\w+` is deprecated")
    # Transformer Engine, of a package that is none of its business here.
    warnings.filterwarnings("ignore", category=RuntimeWarning, message="Detected a Jax installation")


def quieten_transformer_engine() -> None:
    """Hide Transformer Engine's warning about how Megatron Core calls it. Importing it shows its own warnings."""
    importlib.import_module("transformer_engine.pytorch")
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", category=DeprecationWarning, message="Relying on pointer-based detection")
