"""The queue of encoder prefetch by itself: what runs when, how much it holds, what it refuses to mix up."""

import pytest
import torch

from mimo.batch import EncoderBatch, Microbatch
from mimo.observe.spans import Spans
from mimo.observe.watchdog import Watchdog
from mimo.training.encoder_prefetch import EncoderPrefetch


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
                                    watchdog=watchdog, spans=Spans())


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
    assert encoder.ran == [0, 1, 2, 3], "nothing runs twice"


def test_what_is_not_there_runs_when_it_is_taken():
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


def test_features_of_other_samples_are_never_taken():
    _, prefetch = queue_of(2)
    prefetch.begin_step([microbatch(0)], [[microbatch(1)]])
    prefetch.fill()
    with pytest.raises(AssertionError, match="features of .*sample 0.* for .*sample 1"):
        taken(prefetch, [microbatch(1)])
    prefetch.end_step()
    with pytest.raises(AssertionError, match="features of .*sample 1.*, but .*sample 5.* come next"):
        prefetch.begin_step([microbatch(5)])
