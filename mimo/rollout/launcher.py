"""Functions that make the process of an engine independent of the launcher that started the trainer.

The process runs these functions first. They lie in a file of their own so that it does not import Megatron for them.
"""

from __future__ import annotations

import os
import signal

# Variables that torchrun sets for its workers. In an engine's process they would make its own process group join the
# trainer's.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
                      "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_PREFIX = "TORCHELASTIC_"


def leave_group() -> None:
    """Leave the trainer's process group, in the process of a child engine.

    The launcher sends its signals to the group. A trainer that is told to stop finishes its iteration first, and needs
    its engine for that. The engine ends when the trainer does.
    """
    leave_launcher()
    os.setsid()


def leave_launcher() -> None:
    """Forget the launcher in the engine's process, which is not a worker and ends with the rank that started it."""
    for name in list(os.environ):
        if name in LAUNCHER_VARIABLES or name.startswith(LAUNCHER_PREFIX):
            del os.environ[name]
    # Ctrl-C reaches every process of the terminal; the trainer finishes its iteration first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
