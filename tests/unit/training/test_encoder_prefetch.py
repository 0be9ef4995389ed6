"""The queue of encoder prefetch by itself: what runs when, how much it holds, what it refuses to mix up."""

import weakref
from contextlib import contextmanager

import pytest
import torch

from mimo.data.batch import EncoderBatch, Microbatch
from mimo.observability.spans import Spans, Trace
from mimo.training.encoder_prefetch import EncoderPrefetch
from mimo.watchdog.watchdog import Watchdog


class TimingEvent:
    """Stands in for an event of a GPU that needs two seconds for everything."""

    done = True

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def query(self):
        return self.done

    def elapsed_time(self, end):
        return 2000.0


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", TimingEvent)


class Encoder:
    """Twice the pixels; notes which."""

    is_first_stage = is_last_stage = True

    def __init__(self):
        self.ran = []

    def run_encoder(self, inputs):
        assert "pixel_values" in inputs
        self.ran.append(int(inputs["pixel_values"].item()))
        return inputs["pixel_values"] * 2


def microbatch(number, *, image=True):
    inputs = {"pixel_values": torch.tensor([float(number)])} if image else {}
    return Microbatch(None, {"vision": EncoderBatch((f"sample {number}",), (int(image),), (1,), inputs)})


def queue_of(depth):
    encoder, watchdog = Encoder(), Watchdog(0, "rank 0")
    return encoder, EncoderPrefetch("vision", encoder, depth=depth, device=torch.device("cpu"), own_stream=False,
                                    trace=Trace(watchdog, Spans()))


def taken(prefetch, batches):
    found = [prefetch.take(batch.encoders["vision"]) for batch in batches]
    return [None if features is None else features.item() for features in found]


def test_each_launch_is_one_microbatch_until_the_queue_is_full():
    encoder, prefetch = queue_of(2)
    step, coming = [microbatch(n) for n in range(2)], [microbatch(n) for n in range(2, 6)]
    prefetch.begin_step(step, [coming[:2], coming[2:]])
    for expected in ([0], [0, 1], [0, 1]):
        prefetch.launch()
        assert encoder.ran == expected
    assert taken(prefetch, step[:1]) == [0.0]
    prefetch.launch()
    assert encoder.ran == [0, 1, 2], "the next iteration's first"
    assert taken(prefetch, step[1:]) == [2.0]
    prefetch.fill()
    assert encoder.ran == [0, 1, 2, 3] and prefetch.num_held == 2
    prefetch.end_step()
    prefetch.begin_step(coming[:2], [coming[2:]])
    assert taken(prefetch, coming[:2]) == [4.0, 6.0]
    prefetch.launch()
    assert encoder.ran == [0, 1, 2, 3, 4], "nothing runs twice"


def test_a_pass_that_was_not_prefetched_runs_when_its_result_is_taken():
    encoder, prefetch = queue_of(1)
    step = [microbatch(n) for n in range(3)]
    prefetch.begin_step(step)
    assert taken(prefetch, step) == [0.0, 2.0, 4.0] and encoder.ran == [0, 1, 2]
    prefetch.fill()
    assert encoder.ran == [0, 1, 2], "there is nothing more"


def test_microbatches_without_images_take_no_room_and_no_launch():
    encoder, prefetch = queue_of(2)
    step = [microbatch(n, image=n in (2, 4)) for n in range(6)]
    prefetch.begin_step(step)
    prefetch.launch()
    assert encoder.ran == [2]
    prefetch.launch()
    assert encoder.ran == [2, 4] and prefetch.num_held == 2
    assert taken(prefetch, step) == [None, None, 4.0, None, 8.0, None]


def test_outside_a_training_step_nothing_runs_and_the_queue_stays():
    encoder, prefetch = queue_of(3)
    step, coming = [microbatch(0)], [microbatch(1)]
    assert not prefetch.active
    prefetch.launch()
    prefetch.begin_step(step, [coming])
    assert prefetch.active and taken(prefetch, step) == [0.0]
    prefetch.fill()
    prefetch.end_step()
    for _ in range(2):
        prefetch.launch()
        prefetch.fill()
    assert not prefetch.active and prefetch.num_held == 1 and encoder.ran == [0, 1]


def test_pixels_are_left_out_of_what_goes_to_the_device_and_kept_for_the_encoder():
    _, prefetch = queue_of(1)
    step = [microbatch(0), microbatch(1, image=False)]
    scheduled = prefetch.begin_step(step)
    assert [batch.encoders["vision"].inputs for batch in scheduled] == [{}, {}]
    assert [batch.encoders["vision"].keys for batch in scheduled] == [("sample 0",), ("sample 1",)]
    assert step[0].encoders["vision"].inputs
    assert taken(prefetch, scheduled) == [0.0, None]


def test_its_time_is_that_of_what_ran_ahead_and_nothing_waits_for_the_rest(monkeypatch):
    _, prefetch = queue_of(2)
    step = [microbatch(n) for n in range(3)]
    prefetch.begin_step(step)
    assert taken(prefetch, step[:1]) == [0.0]
    prefetch.fill()
    monkeypatch.setattr(TimingEvent, "done", False)
    assert prefetch.drain_s() == 0.0
    monkeypatch.setattr(TimingEvent, "done", True)
    assert [prefetch.drain_s() for _ in range(2)] == [4.0, 0.0]


class Streams:
    """Stands in for the streams of a GPU: notes what each is given to do, in the host's order."""

    def __init__(self, monkeypatch):
        self.log, self.now, self.made = [], "compute", 0
        compute, encoder = Stream(self, "compute"), Stream(self, "encoder")
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: encoder)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    @contextmanager
    def on(self, stream):
        before, self.now = self.now, stream.name
        yield
        self.now = before


class Stream:
    def __init__(self, streams, name):
        self.streams, self.name = streams, name

    def wait_stream(self, other):
        self.streams.log.append(f"{self.name}: wait for {other.name}")

    def wait_event(self, event):
        self.streams.log.append(f"{self.name}: wait for {event}")

    def record_event(self):
        self.streams.made += 1
        self.streams.log.append(f"{self.name}: event {self.streams.made}")
        return f"event {self.streams.made}"


def test_a_stream_of_its_own_waits_for_the_copy_of_what_it_reuses(monkeypatch):
    streams = Streams(monkeypatch)

    class OnStream(Encoder):
        def run_encoder(self, inputs):
            features = super().run_encoder(inputs)
            streams.log.append(f"{streams.now}: encoder {self.ran[-1]}")
            alive.append(weakref.ref(features))
            return features

    alive = []
    prefetch = EncoderPrefetch("vision", OnStream(), depth=1, device=torch.device("cpu"), own_stream=True,
                               trace=Trace(Watchdog(0, "rank 0"), Spans()))
    step = [microbatch(n) for n in range(3)]
    prefetch.begin_step(step)
    for batch in step:
        prefetch.launch()
        assert sum(reference() is not None for reference in alive) == 1, "features of the queue's length, no more"
        assert taken(prefetch, [batch]) == [2.0 * int(batch.encoders["vision"].inputs["pixel_values"])]
    prefetch.end_step()
    assert streams.log == ["encoder: wait for compute", "encoder: encoder 0", "encoder: event 1",
                           "compute: wait for event 1", "compute: event 2", "encoder: wait for event 2",
                           "encoder: encoder 1", "encoder: event 3", "compute: wait for event 3", "compute: event 4",
                           "encoder: wait for event 4", "encoder: encoder 2", "encoder: event 5",
                           "compute: wait for event 5", "compute: event 6"]


def test_features_of_other_samples_are_never_taken():
    _, prefetch = queue_of(2)
    prefetch.begin_step([microbatch(0)], [[microbatch(1)]])
    prefetch.fill()
    with pytest.raises(AssertionError, match="features of .*sample 0.* for .*sample 1"):
        taken(prefetch, [microbatch(1)])
    prefetch.end_step()
    with pytest.raises(AssertionError, match="features of .*sample 1.*, but .*sample 5.* come next"):
        prefetch.begin_step([microbatch(5)])
