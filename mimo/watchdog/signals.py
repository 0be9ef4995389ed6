"""SIGTERM and SIGINT: finish the iteration. If that takes too long, report what blocks it and exit."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from types import FrameType
from typing import Any

from mimo.watchdog.process_exit import exit_now, write_report
from mimo.watchdog.watchdog import POLL_S, Watchdog

# Least seconds without progress after a signal; below the 30 s after which torchrun kills.
GRACE_S = 20.0
TERMINATED_EXIT_CODE = 143
INTERRUPTED_EXIT_CODE = 130
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Turns SIGTERM and SIGINT into a request that the training loop reads between iterations.

    Python runs signal handlers in the main thread only, and never while it is blocked in a collective. The signal's
    number is therefore also written to a socket (`signal.set_wakeup_fd`) that a daemon thread reads. If the main thread
    makes no progress after a signal, that thread reports who waited for what and exits with code 143 (130 after
    SIGINT). It waits for `GRACE_S`, or for twice the longest time that the run went without progress, which the
    watchdog's limit bounds. A second SIGINT exits with code 130 at once.

    A forked child (a data worker) gets the former handlers back: SIGTERM must end it, and must not reach its parent.

    Attributes:
        name: the first signal, for example `SIGTERM`; None as long as the run is not asked to stop.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        """Install the handlers; main thread only.

        The watchdog knows when the main thread last made progress, how long that may take, and what it waits for.
        Phases under `Watchdog.limit` may take that limit if it is longer.
        """
        self.name: str | None = None
        self._watchdog = watchdog
        self._reader, self._writer = socket.socketpair()
        # The interpreter writes from inside the C handler, which must never block.
        self._writer.setblocking(False)
        self._old_wakeup_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers: dict[signal.Signals, Any] = {}
        for number in _SIGNALS:
            self._old_handlers[number] = signal.signal(number, self._handle)
        self._open = True
        os.register_at_fork(after_in_child=self._restore_in_child)
        self._thread = threading.Thread(target=self._listen, name="stop signal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restore the former handlers; main thread only. A second call does nothing."""
        if not self._open:
            return
        self._restore(self._old_wakeup_fd)
        # End of file ends the thread. Closing the socket alone would not cause it while a data worker lives: the worker
        # has inherited the socket, and a failing run does not end its workers.
        self._writer.shutdown(socket.SHUT_WR)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def _restore(self, wakeup_fd: int) -> None:
        self._open = False
        for number, handler in self._old_handlers.items():
            # None stands for a handler that was not installed from Python and cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(wakeup_fd)

    def _restore_in_child(self) -> None:
        """Run in a forked child, whose copy of the socket still reaches the parent's thread."""
        if self._open:
            self._restore(-1)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._request(signal.Signals(number))

    def _request(self, number: signal.Signals) -> None:
        if self.name is None:
            self.name = number.name

    def _listen(self) -> None:
        """Body of the daemon thread: count signals, and once there is one, watch for progress."""
        since: float | None = None
        interrupts = 0
        while True:
            if since is not None:
                # A healthy run may need this long for its next piece of work, such as a microbatch or the state of a
                # save.
                usual_s = min(2 * self._watchdog.longest_s, self._watchdog.timeout_s)
                left_s = self._watchdog.time_left(max(GRACE_S, usual_s), since)
                if left_s <= 0:
                    self._watchdog.report(f"{self.name} could not be honoured")
                    exit_now(INTERRUPTED_EXIT_CODE if self.name == "SIGINT" else TERMINATED_EXIT_CODE)
                self._reader.settimeout(min(POLL_S, left_s))
            try:
                data = self._reader.recv(64)
            except TimeoutError:
                continue
            if not data:
                return
            # Other signals with a Python handler arrive here too.
            numbers = [signal.Signals(byte) for byte in data if byte in _SIGNALS]
            for number in numbers:
                self._request(number)
                interrupts += number == signal.SIGINT
                since = time.monotonic() if since is None else since
            if interrupts >= 2:
                write_report(f"interrupted twice: {self._watchdog.who} exits without finishing the iteration\n")
                exit_now(INTERRUPTED_EXIT_CODE)
