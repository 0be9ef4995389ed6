"""A stop signal beside a forked process that has its sockets."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace

from mimo.watchdog.signals import StopSignal


def test_closing_does_not_wait_for_forked_processes() -> None:
    stop = StopSignal(SimpleNamespace(who="rank 0"))
    worker = os.fork()
    if not worker:
        signal.pause()
        os._exit(0)
    try:
        # Beside the main thread, so that the test ends where closing does not; handlers are put back by the main one.
        stop._restore(stop._old_wakeup_fd)
        stop._open, stop._restore = True, lambda fd: None
        closing = threading.Thread(target=stop.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
