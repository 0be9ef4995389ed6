"""Sources of a rank's samples: its own streams, lanes that it reads itself, or the reader on another rank.

The samples of an iteration are `{(module, lane): [samples of each microbatch]}`. Each list has the share of the lane
that the module needs on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from mimo.checkpoint.paths import SHARED_STREAM
from mimo.comm import HostChannel, gather, raise_known_errors
from mimo.data.batch import Microbatch
from mimo.grid.lanes import LaneOrder, Need, in_order, lanes_read_by, needs_from, needs_of, reader_of
from mimo.grid.spec import Layout
from mimo.protocols import (
    LANGUAGE,
    DataProvider,
    DataRequest,
    Lane,
    LaneReader,
    RoutedDataProvider,
    Sample,
    SampleStream,
    TokenSpec,
)
from mimo.text import counted
from mimo.training.step import TrainerParts
from mimo.watchdog.process_exit import ReportedElsewhereError

StepSamples = dict[tuple[str, int], list[list[Sample]]]
Order = Callable[[list[list[Sample]]], list[list[Sample]]]
"""Returns the microbatches of a lane in another order."""


class Source:
    """Samples of one rank. Only one thread uses a source at a time.

    This class is a source without workers and without a position that could be saved.
    """

    def start(self) -> None:
        """Start workers. Called once, before the first `read`, from the main thread."""

    def read(self) -> StepSamples:
        """Return the samples of the next iteration."""
        raise NotImplementedError

    def mark(self) -> Any:
        """Note the present position. Called after every iteration, so it has to be cheap."""

    def state_dict(self, mark: Any) -> dict[str, Any]:
        """Return the state of each open stream at one of the last marks, by the stream's name."""
        return {}

    def load_state_dict(self, streams: Mapping[str, Any]) -> None:
        """Continue from the streams of a checkpoint."""

    def describe(self) -> str:
        """Describe what `read` waits for, for messages."""
        raise NotImplementedError

    @property
    def waits_for(self) -> tuple[int, ...]:
        """Ranks whose loaders `read` waits for now."""
        return ()

    def close(self) -> None:
        """Stop the workers. Nothing is read afterwards."""


class GivenSource(Source):
    """Rows that are there already, the same for every lane and in every iteration. There is no position to save.

    `what` names the rows in messages.
    """

    def __init__(self, microbatches: Sequence[Sequence[Sample]], needs: Sequence[Need], what: str) -> None:
        self._microbatches, self._needs, self._what = microbatches, needs, what

    def read(self) -> StepSamples:
        return {(need.module, need.share.lane): [list(rows[need.share.start:need.share.stop])
                                                 for rows in self._microbatches] for need in self._needs}

    def describe(self) -> str:
        return self._what


def ordered(order: LaneOrder, request: DataRequest, microbatches: list[list[Sample]]) -> list[list[Sample]]:
    """Put the microbatches of a whole lane into the order in which they run."""
    def cost(samples: list[Sample]) -> Any:
        pixels = sum(math.prod(request.tokens.pixel_shape(size)) for sample in samples for size in sample.image_sizes)
        return (max(_row_tokens(request, sample) for sample in samples), pixels) if order.by_length else pixels

    return [microbatches[number] for number in in_order(order, list(map(cost, microbatches)))]


def _row_tokens(request: DataRequest, sample: Sample) -> int:
    """Count the tokens of a row, in which each image is one placeholder."""
    try:
        return len(sample.tokens) + sum(request.num_image_tokens(*size) - 1 for size in sample.image_sizes)
    except ValueError:
        return 0  # an image of a size that the encoder cannot take: collation will name the sample


class StreamSource(Source):
    """Streams of an indexed data set: this rank opens every lane that it needs and skips what other ranks encode.

    `order` changes the order of a lane's microbatches, of which it sees only this rank's part.
    """

    def __init__(self, provider: DataProvider, config: Any, tokens: TokenSpec, needs: Sequence[Need], *, lanes: int,
                 seed: int, split: str, micro_batch_size: int, num_microbatches: int, order: Order = list,
                 sequence_multiple: int = 1) -> None:
        self._order = order
        self._micro_batch_size, self._num_microbatches = micro_batch_size, num_microbatches
        self._streams: dict[str, tuple[Need, SampleStream]] = {}
        for need in needs:
            # A stream that is opened for the language side never decodes images.
            lane = Lane(need.module if need.pixels else LANGUAGE, need.share.lane, lanes, seed, split,
                        sequence_multiple)
            self._streams[f"{need.module}/{need.share.lane}"] = need, provider.stream(config, tokens, lane)

    def read(self) -> StepSamples:
        found: StepSamples = {}
        for need, stream in self._streams.values():
            share, microbatches = need.share, []
            for _ in range(self._num_microbatches):
                # Other ranks encode the rows of the lane's microbatch before and after this rank's share.
                stream.skip(share.start)
                samples = list(islice(stream, share.stop - share.start))
                if len(samples) != share.stop - share.start:
                    raise ValueError(f"lane {share.lane}: the data set ended inside a microbatch; it must start over")
                stream.skip(self._micro_batch_size - share.stop)
                microbatches.append(samples)
            found[need.module, share.lane] = self._order(microbatches)
        return found

    def mark(self) -> Any:
        # The states are so small that taking them all is cheap.
        return {name: stream.state_dict() for name, (_, stream) in self._streams.items()}

    def state_dict(self, mark: Any) -> dict[str, Any]:
        return dict(mark)

    def load_state_dict(self, streams: Mapping[str, Any]) -> None:
        for name, (_, stream) in self._streams.items():
            # All streams of an indexed data set are at the same sample, so any state will do after a change of layout.
            stream.load_state_dict(streams[name] if name in streams else next(iter(streams.values())))

    def describe(self) -> str:
        return f"streams {', '.join(self._streams)} of this rank"


def _share(rows: Mapping[int, list[list[Sample]]], need: Need) -> list[list[Sample]]:
    """Select the part of the lanes in `rows` that `need` asks for."""
    share = need.share
    chosen = [samples[share.start : share.stop] for samples in rows[share.lane]]
    return chosen if need.pixels else [[replace(sample, images=None) for sample in samples] for samples in chosen]


class ReaderSource(Source):
    """Lanes that this rank reads itself, as a whole.

    `order` changes the order of a lane's microbatches.
    """

    def __init__(self, reader: LaneReader, lanes: Sequence[int], needs: Sequence[Need], *, micro_batch_size: int,
                 num_microbatches: int, order: Order = list) -> None:
        self._order = order
        self._reader, self._lanes, self._needs = reader, lanes, needs
        self._micro_batch_size, self._num_microbatches = micro_batch_size, num_microbatches

    def start(self) -> None:
        self._reader.start()

    def read_lanes(self) -> dict[int, list[list[Sample]]]:
        """Read all rows of the next iteration, by lane and microbatch. Lanes advance together, row by row."""
        rows: dict[int, list[list[Sample]]] = {lane: [] for lane in self._lanes}
        for _ in range(self._num_microbatches):
            for lane in self._lanes:
                rows[lane].append([])
            for _ in range(self._micro_batch_size):
                for lane in self._lanes:
                    rows[lane][-1].append(self._reader.read(lane))
        return {lane: self._order(microbatches) for lane, microbatches in rows.items()}

    def read(self) -> StepSamples:
        rows = self.read_lanes()
        return {(need.module, need.share.lane): _share(rows, need) for need in self._needs}

    def mark(self) -> Any:
        return self._reader.mark()

    def state_dict(self, mark: Any) -> dict[str, Any]:
        return {f"{SHARED_STREAM}/{lane}": state for lane, state in self._reader.state_dict(mark).items()}

    def load_state_dict(self, streams: Mapping[str, Any]) -> None:
        """Continue from the lanes of a checkpoint.

        Raises:
            ValueError: the state comes from an indexed data set.
        """
        other = [name for name in streams if not name.startswith(f"{SHARED_STREAM}/")]
        if other:
            raise ValueError(f"the checkpoint's data state ({', '.join(other)}) is of an indexed data set, but this "
                             "data set is read by lanes; --no-load-data starts the data anew")
        self._reader.load_state_dict({int(name.split("/")[1]): state for name, state in streams.items()})

    def describe(self) -> str:
        return self._reader.describe()

    def close(self) -> None:
        self._reader.close()


class RoutedSource(Source):
    """Lanes that are read once each: by one rank, which sends every other rank the part that it needs.

    Messages travel in the background, one iteration ahead of training. If a reader fails, it sends its error in place
    of the samples, so that no rank waits for a reader that has stopped. `local` has the lanes that this rank reads;
    None if it reads none.
    """

    def __init__(self, local: ReaderSource | None, layout: Layout, rank: int, micro_batch_size: int,
                 channel: HostChannel) -> None:
        self._local, self._layout, self._channel = local, layout, channel
        needs = needs_of(layout, rank, micro_batch_size)
        self._own = needs_from(layout, rank, rank, micro_batch_size)
        self._from: dict[int, list[Need]] = {}
        for need in needs:
            reader = reader_of(layout, need.share.lane)
            if reader != rank:
                self._from.setdefault(reader, []).append(need)
        others = [other for other in range(layout.world_size) if other != rank] if lanes_read_by(layout, rank) else []
        self._to = {other: wanted for other in others
                    if (wanted := needs_from(layout, rank, other, micro_batch_size))}
        self._waiting_for: int | None = None

    def start(self) -> None:
        if self._local is not None:
            self._local.start()

    def read(self) -> StepSamples:
        """Return the samples of the next iteration.

        Raises:
            ReportedElsewhereError: the reader of a lane has failed; the message has its error.
        """
        samples = {} if self._local is None else self._serve(self._local)
        for reader, needs in self._from.items():
            self._waiting_for = reader
            shares, error = self._channel.receive(reader)
            self._waiting_for = None
            if error is not None:
                raise ReportedElsewhereError(
                    f"{self._layout.describe(reader)}, which reads {_lanes(needs)}, has stopped: {error}")
            samples |= {(need.module, need.share.lane): share for need, share in zip(needs, shares, strict=True)}
        return samples

    def _serve(self, local: ReaderSource) -> StepSamples:
        """Read this rank's lanes and send the other ranks their parts."""
        self._channel.flush()  # at most one iteration's messages are under way
        try:
            rows = local.read_lanes()
        except Exception as error:  # whatever it is, the others must learn that their samples will not come
            for other in self._to:
                self._channel.send(other, ([], f"{type(error).__name__}: {error}"))
            self._channel.flush()
            raise
        for other, needs in self._to.items():
            self._channel.send(other, ([_share(rows, need) for need in needs], None))
        return {(need.module, need.share.lane): _share(rows, need) for need in self._own}

    def mark(self) -> Any:
        return None if self._local is None else self._local.mark()

    def state_dict(self, mark: Any) -> dict[str, Any]:
        return {} if self._local is None else self._local.state_dict(mark)

    def load_state_dict(self, streams: Mapping[str, Any]) -> None:
        if self._local is not None:
            self._local.load_state_dict(streams)

    def describe(self) -> str:
        reader = self._waiting_for
        if reader is not None:
            return f"samples of {_lanes(self._from[reader])} from rank {reader}, their reader"
        return "nothing" if self._local is None else self._local.describe()

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The rank that has to send samples, or to receive those of the iteration before."""
        return self._channel.waits_for

    def close(self) -> None:
        """Wait until the others have what was sent, and stop the workers."""
        self._channel.flush()
        if self._local is not None:
            self._local.close()


def _lanes(needs: Sequence[Need]) -> str:
    numbers = sorted({need.share.lane for need in needs})
    return f"lane{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


# Number of skipped samples that the error about too many of them names.
SHOWN = 3


@runtime_checkable
class SkippingDataProvider(Protocol):
    """A data set that skips bad samples (`mimo.protocols.Sample.skipped`), up to a limit."""

    def max_bad_samples(self, config: Any) -> int:
        """Return how many samples a run may skip, over all its ranks and restarts."""
        ...


def check_bad_samples(parts: TrainerParts, dataset: DataProvider | RoutedDataProvider, total: int,
                      microbatches: Sequence[Microbatch]) -> None:
    """Stop every rank if the run has skipped more samples than its data set allows.

    A reader counts only its own lanes, and only since the process started, so the run's total decides. Collective over
    the world if the run ends. `total` includes earlier starts of the run, and is the same on all ranks.

    Raises:
        ValueError: on the first rank. The message names the flag, its value and the last skipped samples.
        ReportedElsewhereError: on the other ranks.
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
    error = f"--max-bad-samples {limit}: {counted(total, 'sample')} of the run could not be used{last}"
    raise_known_errors(parts.grids, [error] * parts.grids.layout.world_size)
