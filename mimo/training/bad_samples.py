"""The end of a run that has passed over too many bad samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from mimo.batch import Microbatch
from mimo.checkpoint.agree import gather, raise_any
from mimo.protocols import DataProvider, RoutedDataProvider
from mimo.training.step import TrainerParts

SHOWN = 3


@runtime_checkable
class SkippingDataProvider(Protocol):
    """A data set that passes over bad samples (`mimo.protocols.Sample.skipped`), up to a number."""

    def max_bad_samples(self, config: Any) -> int:
        """How many a run may pass over, over all its ranks and restarts."""
        ...


def check_bad_samples(parts: TrainerParts, dataset: DataProvider | RoutedDataProvider, total: int,
                      microbatches: Sequence[Microbatch]) -> None:
    """Stop every rank where a run has passed over more samples than its data set allows.

    A reader knows of its own lanes alone and starts over with the process, so only the total says it of the run.
    Collective over the world where the run ends.

    Args:
        parts: this rank's trainer.
        dataset: the data set.
        total: samples that the run has passed over, earlier starts included; the same on all ranks.
        microbatches: this rank's side of the last iteration.

    Raises:
        ValueError: on the first rank; names flag, values and the last samples that are known.
        ReportedElsewhereError: as above, on the others.
    """
    if not isinstance(dataset, SkippingDataProvider):
        return
    limit = dataset.max_bad_samples(parts.config.dataset)
    if total <= limit:
        return
    own = [message for batch in microbatches if batch.text is not None for message in batch.text.skipped]
    with parts.watchdog.waiting("names of bad samples of all ranks"):
        # Several ranks read the text of a lane.
        named = list(dict.fromkeys(message for of_rank in gather(parts.grids, own) for message in of_rank))
    last = f"; the last: {'; '.join(named[-SHOWN:])}" if named else "; the log names them"
    error = f"--max-bad-samples {limit}: {total} samples of the run could not be used{last}"
    raise_any(parts.grids, [error] * parts.grids.layout.world_size)
