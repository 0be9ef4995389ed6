"""Report and count the bad samples of a data worker, and end it if there are too many."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from megatron.energon import Sample as EnergonSample
from megatron.energon.errors import FatalSampleError


class ErrorLog:
    """Bad samples of a worker: the error handler of its `WorkerConfig`.

    A worker reads ahead of training, so it does not know how many bad samples the run has skipped. The reader counts
    them when the next row is delivered. The worker itself ends only if any further row would exceed the limit.

    Args:
        max_bad_samples: bad samples that may be skipped between two rows; one more ends the worker.
    """

    def __init__(self, max_bad_samples: int) -> None:
        self.max_bad_samples = max_bad_samples
        self._since_row = 0
        self._pending: list[str] = []

    def handler(self, exception: Exception, sample: Any, sources: Any) -> None:
        """Record a bad sample. Energon calls this in the worker and continues with the next sample.

        Raises:
            FatalSampleError: there are too many since the last row. The message names the sample and the flag.
            AssertionError: `exception` is one, because then the program is at fault, or it belongs to a whole buffer.
        """
        if isinstance(exception, AssertionError) or isinstance(sample, list):
            raise exception
        message = f"{sample_name(sample, sources)}: {reason_of(exception)}"
        self._since_row += 1
        self._pending.append(message)
        if self._since_row > self.max_bad_samples:
            raise FatalSampleError(
                f"--max-bad-samples {self.max_bad_samples}: a data worker met {self._since_row} bad samples before it "
                f"could make a row, the last is {message}"
            ) from exception

    def take(self) -> tuple[str, ...]:
        """Return the messages since the last call, `<shard> <key>: <reason>`."""
        messages, self._pending = tuple(self._pending), []
        return messages

    def row_made(self) -> None:
        """Start counting again, because the worker has made a row."""
        self._since_row = 0


def reason_of(exception: Exception) -> str:
    """Format an exception as one line, with its type if the text alone may say little."""
    text = " ".join(str(exception).split()) or "no message"
    return text if isinstance(exception, ValueError) else f"{type(exception).__name__}: {text}"


def sample_name(sample: Any, sources: Any) -> str:
    """Return the shard, with the folder of its data set, and the key of a sample at any stage of Energon's pipeline."""
    if isinstance(sample, EnergonSample):
        key, origin = sample.__key__, sources or sample.__sources__
    else:
        # Before a sample is loaded it is a dict, or one dict for each joined data set.
        parts = sample if isinstance(sample, dict) else sample.data[0]
        key, origin = parts["__key__"], sources or parts["__sources__"]
    if not origin:
        return str(key)
    # A JSONL file is both data set and shard, and Energon passes its path as a string.
    folder, shard = PurePath(str(origin[0].dataset_path)).name, origin[0].shard_name
    return f"{folder if folder == shard else f'{folder}/{shard}'} {key}"
