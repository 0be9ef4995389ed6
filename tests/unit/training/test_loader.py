"""The loader: which rank reads what, saving and restoring, and the background thread."""

import threading
import time
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import pytest
import torch

from data import digits, mock
from data.indexed import IndexedStream
from mimo.data.loader import StepLoader, open_loader
from mimo.grid.lanes import LaneOrder, cheap_ends, in_order, lane_order
from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import Sample, TokenSpec
from tests.support.routed_data import RoutedMock

TOKENS = TokenSpec(vocab_size=64, image_token_id=3, image_size=8, num_channels=1)


class Model:
    """The part of a model provider that the loader uses, with 4-pixel patches."""

    def token_spec(self, config):
        return TOKENS

    def special_token_ids(self, config):
        return {"vision": TOKENS.image_token_id}

    def num_image_tokens(self, config, module, height, width):
        return height // 4 * (width // 4)


@dataclass
class Recording:
    """Samples of one token, one image in every second; notes the lanes opened and the images built."""

    fail_at: int | None = None
    end_at: int | None = None

    def __post_init__(self):
        self.lanes, self.built = [], []

    def stream(self, config, tokens, lane):
        self.lanes.append(lane)

        def build(index):
            if index == self.fail_at:
                raise OSError(f"disk gone at {index}")
            if index == self.end_at:
                raise StopIteration
            count = index % 2
            tokens, targets = np.array([3] * count + [5]), np.array([False] * count + [True])
            sample = Sample(f"set/{index}", tokens, targets, [(8, 8)] * count)
            if lane.module != "language":
                self.built.append(index)
                sample.images = [np.full((1, 8, 8), index, np.float32)] * count
            return sample

        return IndexedStream(lane, build)


def layout(encoder_dp=1, language_dp=1, kind="disjoint", encoder_pp=1, language_pp=1, encoder_tp=1) -> Layout:
    vision = GridSpec("vision", 0, tp=encoder_tp, dp=encoder_dp, pp=encoder_pp)
    language = GridSpec("language", vision.size if kind == "disjoint" else 0, dp=language_dp, pp=language_pp)
    world = vision.size + language.size if kind == "disjoint" else language.size
    return Layout(kind, world, (vision,), language)


def loader(grids, rank, provider=mock.provider, config=None, *, micro=2, num=2, **changes) -> StepLoader:
    arguments = {"model_provider": Model(), "model_config": None, "data_provider": provider,
                 "data_config": config or mock.Config(), "micro_batch_size": micro, "num_microbatches": num,
                 "seq_length": 64, "seed": 11, "microbatch_order": "read", "prefetch": False}
    return open_loader(grids, rank, **(arguments | changes))


def same(one, two) -> bool:
    """Return whether two steps hold the same microbatches."""
    for left, right in zip(one, two, strict=True):
        if (left.text is None) != (right.text is None) or left.encoders.keys() != right.encoders.keys():
            return False
        if left.text is not None:
            if left.text.keys != right.text.keys or not torch.equal(left.text.input_ids, right.text.input_ids):
                return False
        for side, other in zip(left.encoders.values(), right.encoders.values(), strict=True):
            if side.keys != other.keys or side.inputs.keys() != other.inputs.keys():
                return False
            if not all(torch.equal(side.inputs[name], other.inputs[name]) for name in side.inputs):
                return False
    return True


@pytest.mark.parametrize("provider", [mock, digits])
@pytest.mark.parametrize("split", ["train", "valid"])
def test_the_global_batch_does_not_depend_on_the_number_of_lanes(provider, split):
    orders = []
    for lanes in (1, 2, 4):
        grids = layout(1, lanes)
        ranks = [
            loader(grids, rank, provider.provider, provider.Config(), micro=2, num=8 // lanes, split=split)
            for rank in grids.language.ranks
        ]
        batches = []
        for _ in range(2):
            by_lane = [[key for batch in rank.next_step() for key in batch.text.keys] for rank in ranks]
            batches.append(list(chain.from_iterable(zip(*by_lane, strict=True))))
        orders.append(batches)
    assert orders[0] == orders[1] == orders[2]
    assert len(set(orders[0][0] + orders[0][1])) == 32


@pytest.mark.parametrize(
    ("encoder_dp", "language_dp", "micro"),
    [(1, 1, 2), (1, 2, 2), (2, 4, 1), (1, 4, 3), (2, 1, 2), (2, 1, 3), (4, 2, 3), (4, 1, 5), (2, 1, 1), (4, 1, 3)],
)
@pytest.mark.parametrize("kind", ["disjoint", "colocated"])
def test_encoder_ranks_cover_each_lane_once_in_order(encoder_dp, language_dp, micro, kind):
    if kind == "colocated" and encoder_dp < language_dp:
        grids = layout(encoder_dp, language_dp, kind, encoder_tp=language_dp // encoder_dp)
    elif kind == "colocated":
        language = GridSpec("language", 0, tp=encoder_dp // language_dp, dp=language_dp)
        grids = Layout(kind, encoder_dp, (GridSpec("vision", 0, dp=encoder_dp),), language)
    else:
        grids = layout(encoder_dp, language_dp)
    vision = grids.encoders[0]
    chosen = {"micro": micro, "microbatch_order": "images"}
    encoders = [loader(grids, vision.rank_at(dp=dp), **chosen) for dp in range(encoder_dp)]
    languages = [loader(grids, grids.language.rank_at(dp=dp), **chosen) for dp in range(language_dp)]
    for _ in range(2):
        encoded, texts = [rank.next_step() for rank in encoders], [rank.next_step() for rank in languages]
        for number in range(2):
            sides = [step[number].encoders["vision"] for step in encoded]
            lanes = [step[number].text for step in texts]
            assert [key for side in sides for key in side.keys] == [key for lane in lanes for key in lane.keys]
            counts = [count for side in sides for count in side.token_counts]
            assert counts == [count for lane in lanes for count in lane.token_counts["vision"]]
            for side in sides:
                assert sum(side.lane_sizes) == len(side.keys)
                assert len(side.lane_sizes) == max(1, language_dp // encoder_dp)
                images = len(side.inputs["pixel_values"]) if side.inputs else 0
                assert images * 4 == sum(side.token_counts)
            assert all(len(lane.keys) == micro for lane in lanes)


@pytest.mark.parametrize(("encoder_dp", "language_dp", "ordered"), [(1, 1, True), (1, 2, True), (2, 2, True),
                                                                    (2, 1, False)])
@pytest.mark.parametrize("provider", [mock.provider, RoutedMock()], ids=["indexed", "routed"])
def test_the_first_and_the_last_microbatch_of_a_lane_have_the_fewest_images(provider, encoder_dp, language_dp, ordered):
    grids = layout(encoder_dp, language_dp)

    def steps(rank, order, split="train"):
        each = loader(grids, rank, provider, mock.Config(mock_images_max=6, mock_text_only_fraction=0), num=6,
                      lane_loader="per-lane", microbatch_order=order, split=split)
        return each.next_step()

    vision = grids.encoders[0]
    encoded = [steps(vision.rank_at(dp=dp), "images") for dp in range(encoder_dp)]
    for lane in range(language_dp):
        rank = grids.language.rank_at(dp=lane)
        read, found = steps(rank, "read"), steps(rank, "images")
        counts = [sum(batch.text.token_counts["vision"]) for batch in read]
        assert len(set(counts)) > 2
        # Several replicas share a lane of an indexed data set: each knows its own images only, and the order stays.
        order = cheap_ends(counts) if ordered or isinstance(provider, RoutedMock) else list(range(6))
        keys = [batch.text.keys for batch in found]
        assert keys == [read[number].text.keys for number in order]
        sides = [[batch.encoders["vision"].keys for batch in step] for step in encoded]
        if encoder_dp > language_dp:
            assert [tuple(chain(*each)) for each in zip(*sides, strict=True)] == keys
        elif encoder_dp == language_dp:
            assert sides[lane] == keys
        else:
            assert [side[2 * lane:2 * lane + 2] for side in sides[0]] == keys
        held_out = [[batch.text.keys for batch in steps(rank, order, "valid")] for order in ("images", "read")]
        assert held_out[0] == held_out[1], "an evaluation counts on the places of its samples"


@pytest.mark.parametrize(("costs", "order"), [
    ([7], [0]), ([2, 1], [0, 1]), ([1, 2], [1, 0]), ([5, 5, 5], [0, 1, 2]), ([3, 1, 0, 2], [1, 0, 3, 2]),
    ([4, 1, 6, 1, 9], [1, 0, 2, 4, 3]), ([0, 8, 8, 0], [0, 1, 2, 3])])
def test_the_cheapest_microbatch_is_last_and_the_next_one_first(costs, order):
    assert cheap_ends(costs) == order


ONE, TWO = (GridSpec("vision", 0),), (GridSpec("vision", 0, dp=2),)
STAGES, LANES, TENSORS = (GridSpec("language", 0, **{size: 2}) for size in ("pp", "dp", "tp"))
FOUR = (GridSpec("vision", 0, dp=4),)


@pytest.mark.parametrize(("grids", "differ", "by_images", "by_length"), [
    (layout(), True, LaneOrder.CHEAP_ENDS, LaneOrder.CHEAP_ENDS),
    (Layout("homogeneous", 2, ONE, STAGES), True, LaneOrder.CHEAP_ENDS, LaneOrder.SHORT_ENDS),
    (Layout("homogeneous", 2, ONE, STAGES), False, LaneOrder.CHEAP_ENDS, LaneOrder.CHEAP_ENDS),
    (Layout("disjoint", 2, (), STAGES), True, LaneOrder.READ, LaneOrder.SHORT_ENDS),
    (Layout("homogeneous", 2, TWO, LANES), True, LaneOrder.READ, LaneOrder.READ),
    # Lanes that share experts, and experts that are split inside a lane alone.
    (Layout("homogeneous", 2, TWO, replace(LANES, ep=2)), True, LaneOrder.READ, LaneOrder.SHORT_ENDS),
    (Layout("homogeneous", 2, TWO, replace(LANES, ep=2)), False, LaneOrder.READ, LaneOrder.READ),
    (Layout("homogeneous", 2, TWO, replace(LANES, expt_tp=2)), True, LaneOrder.READ, LaneOrder.SHORT_ENDS),
    (Layout("homogeneous", 4, TWO, replace(LANES, tp=2, ep=2)), True, LaneOrder.READ, LaneOrder.READ),
    (Layout("disjoint", 2, (), replace(LANES, ep=2)), True, LaneOrder.READ, LaneOrder.SHORT_ENDS),
    # Encoder windows, also of a replica whose ranks lie in both stages.
    (Layout("colocated", 2, TWO, STAGES, encoder_window=2), True, LaneOrder.READ, LaneOrder.LONG_ENDS),
    (Layout("colocated", 2, TWO, STAGES, encoder_window=2), False, LaneOrder.READ, LaneOrder.READ),
    (Layout("colocated", 2, (GridSpec("vision", 0, tp=2),), STAGES, encoder_window=2), True, LaneOrder.READ,
     LaneOrder.SHORT_ENDS),
    (Layout("colocated", 2, TWO, TENSORS, encoder_window=2), True, LaneOrder.READ, LaneOrder.READ),
    (Layout("colocated", 2, TWO, LANES, encoder_window=2), True, LaneOrder.READ, LaneOrder.SHORT_ENDS),
    # Lanes that share a replica, that have one each, and that have two each.
    (Layout("colocated", 2, (GridSpec("vision", 0, tp=2),), LANES), True, LaneOrder.READ, LaneOrder.SHORT_ENDS),
    (Layout("colocated", 2, TWO, LANES), True, LaneOrder.READ, LaneOrder.READ),
    (Layout("colocated", 4, FOUR, replace(LANES, tp=2)), True, LaneOrder.READ, LaneOrder.READ),
    # Two replicas share a lane of an indexed data set, of which each knows a half.
    (layout(2, 1), True, LaneOrder.READ, LaneOrder.READ),
])
def test_the_order_of_microbatches_depends_on_who_waits_for_whom(grids, differ, by_images, by_length):
    found = [lane_order(wanted, grids, mock.provider, rows_differ=differ) for wanted in ("images", "lengths", "read")]
    assert found == [by_images, by_length, LaneOrder.READ]
    if grids.encoders == TWO and grids.kind == "disjoint":
        # Whoever reads a whole lane for all others knows it.
        assert lane_order("images", grids, RoutedMock(), rows_differ=differ) is LaneOrder.CHEAP_ENDS


@pytest.mark.parametrize(("order", "expected"), [
    (LaneOrder.READ, [0, 1, 2, 3, 4]), (LaneOrder.CHEAP_ENDS, [3, 1, 2, 4, 0]),
    (LaneOrder.SHORT_ENDS, [2, 1, 0, 3, 4]), (LaneOrder.LONG_ENDS, [1, 2, 4, 3, 0])])
def test_microbatches_climb_or_fall_from_both_ends(order, expected):
    # The rows of 1 and 3 are equally long, so their pixels decide.
    lengths, pixels = [9, 4, 3, 4, 2], [0, 8, 8, 7, 9]
    assert in_order(order, list(zip(lengths, pixels, strict=True)) if order.by_length else pixels) == expected


@pytest.mark.parametrize("provider", [mock.provider, RoutedMock()], ids=["indexed", "routed"])
@pytest.mark.parametrize(("kind", "lanes"), [("homogeneous", 1), ("homogeneous", 2), ("colocated", 1),
                                             ("colocated", 2)])
def test_every_stage_has_the_microbatches_in_order_of_length(provider, kind, lanes):
    language = GridSpec("language", 0, dp=lanes, pp=2)
    is_colocated = kind == "colocated"
    vision = GridSpec("vision", 0, dp=language.size if is_colocated else lanes)
    grids = Layout(kind, language.size, (vision,), language, encoder_window=2 if is_colocated else None)

    def steps(rank, order, split="train"):
        config = mock.Config(mock_images_max=6, mock_min_length=2, mock_max_length=20)
        return loader(grids, rank, provider, config, num=7, lane_loader="per-lane", microbatch_order=order,
                      row_multiple=8, split=split).next_step()

    for lane in range(lanes):
        read = steps(language.rank_at(dp=lane), "read")
        longest = [max(map(sum, batch.text.lengths)) for batch in read]
        pixels = [sum(batch.text.token_counts["vision"]) for batch in read]
        assert len(set(longest)) > 3
        order = in_order(LaneOrder.LONG_ENDS if is_colocated else LaneOrder.SHORT_ENDS,
                         list(zip(longest, pixels, strict=True)))
        for stage in range(2):
            rank = language.rank_at(dp=lane, pp=stage)
            found = steps(rank, "lengths")
            assert [batch.text.keys for batch in found] == [read[number].text.keys for number in order]
            for batch in found:
                assert not batch.encoders or batch.encoders["vision"].keys == batch.text.keys
            held_out = [[batch.text.keys for batch in steps(rank, each, "valid")] for each in ("lengths", "read")]
            assert held_out[0] == held_out[1], "an evaluation counts on the places of its samples"


def test_an_image_that_the_encoder_cannot_take_is_named_by_its_sample(monkeypatch):
    def refuse(self, config, module, height, width):
        raise ValueError("no such size")

    monkeypatch.setattr(Model, "num_image_tokens", refuse)
    grids = Layout("homogeneous", 2, ONE, STAGES)
    with pytest.raises(ValueError, match=r"sample mock/train/\d+: .*no such size"):
        loader(grids, 0, microbatch_order="lengths", row_multiple=8,
               config=mock.Config(mock_text_only_fraction=0)).next_step()


def test_ranks_hold_only_their_sides():
    grids = layout(1, 2)
    (encoder,), (language,) = (loader(grids, rank, num=1).next_step() for rank in (0, 1))
    assert encoder.text is None
    assert list(encoder.encoders) == ["vision"]
    assert language.text is not None
    assert language.encoders == {}
    (both,) = loader(layout(2, 2, "colocated"), 0, num=1).next_step()
    assert both.text is not None
    assert both.encoders["vision"].keys == both.text.keys


def test_a_rank_opens_only_its_lanes_and_builds_only_its_images():
    source = Recording()
    loader(layout(4, 2), 1, source, micro=3, num=2).next_step()
    assert [(lane.module, lane.index, lane.count) for lane in source.lanes] == [("vision", 0, 2)]
    assert source.built == [2, 4, 8, 10]
    source = Recording()
    loader(layout(4, 2), 4, source, micro=3, num=2).next_step()
    assert [(lane.module, lane.index, lane.count) for lane in source.lanes] == [("language", 0, 2)]
    assert source.built == []
    source = Recording()
    loader(layout(1, 2), 0, source).next_step()
    assert [(lane.module, lane.index) for lane in source.lanes] == [("vision", 0), ("vision", 1)]


def test_pixels_are_read_on_the_first_encoder_stage_only():
    source, grids = Recording(), layout(encoder_pp=2, language_pp=2)
    (first,), (last,) = (loader(grids, rank, source, num=1).next_step() for rank in (0, 1))
    assert source.built == [0, 1]
    first, last = first.encoders["vision"], last.encoders["vision"]
    assert first.inputs["pixel_values"].shape == (1, 1, 8, 8)
    assert last.inputs == {}
    assert (last.keys, last.token_counts, last.lane_sizes) == (first.keys, first.token_counts, first.lane_sizes)
    assert all(loader(grids, rank, source, num=1).next_step()[0].text is not None for rank in (2, 3))


def test_pixel_dtype():
    step = loader(layout(), 0, dtype=torch.bfloat16, micro=4).next_step()
    assert step[0].encoders["vision"].inputs["pixel_values"].dtype == torch.bfloat16


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("rank", range(3))
def test_a_restored_loader_continues_identically(rank, prefetch):
    grids = layout(2, 1)
    original = loader(grids, rank, micro=3, prefetch=prefetch)
    for _ in range(2):
        original.next_step()
    state = original.state_dict()
    assert state["consumed_samples"] == original.consumed_samples == 2 * 3 * 2
    expected = [original.next_step() for _ in range(2)]
    fresh = loader(grids, rank, micro=3, prefetch=prefetch)
    fresh.next_step()
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    assert all(same(fresh.next_step(), step) for step in expected)
    assert fresh.consumed_samples == original.consumed_samples == 4 * 3 * 2
    original.close()
    fresh.close()


def test_the_state_restores_a_run_with_other_lanes():
    two_lanes = layout(1, 2)
    saved = loader(two_lanes, 1, micro=2, num=2)
    saved.next_step()
    one_lane = loader(layout(1, 1), 1, micro=2, num=4)
    expected = [key for _ in range(2) for batch in one_lane.next_step() for key in batch.text.keys][8:]
    four_lanes = layout(2, 4)
    found = []
    for rank in four_lanes.language.ranks:
        fresh = loader(four_lanes, rank, micro=2, num=1)
        fresh.load_state_dict(saved.state_dict())
        found.append([key for batch in fresh.next_step() for key in batch.text.keys])
    assert list(chain.from_iterable(zip(*found, strict=True))) == expected
    with pytest.raises(ValueError, match="--llm-dp 3"):
        loader(layout(1, 3), 1).load_state_dict(saved.state_dict())


def test_prefetching_changes_nothing_but_when_samples_are_read():
    source = Recording()
    plain, ahead = loader(layout(), 0), loader(layout(), 0, prefetch=True)
    assert all(same(plain.next_step(), ahead.next_step()) for _ in range(3))
    assert plain.state_dict() == ahead.state_dict()
    ahead.close()
    counting = loader(layout(), 0, source, micro=1, num=1, prefetch=True)
    counting.next_step()
    assert counting.last_wait_s > 0
    counting.next_step()  # the second step was read ahead; a third is at most under way
    assert source.built[:2] == [0, 1]
    assert len(source.built) <= 3
    counting.close()


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("provider", [mock.provider, RoutedMock()], ids=["streams", "reader"])
def test_peeking_consumes_nothing(provider, prefetch):
    def open_it():
        return loader(layout(), 0, provider, prefetch=prefetch, lane_loader="per-lane")

    plain, looking = open_it(), open_it()
    expected, states = [], []
    for _ in range(6):
        expected.append(plain.next_step())
        states.append(plain.state_dict())
    for step, num_steps in enumerate((2, 0, 3)):
        assert same(looking.next_step(), expected[step])
        found = looking.peek(num_steps)
        assert len(found) == num_steps
        assert all(same(one, other) for one, other in zip(found, expected[step + 1:], strict=False))
        assert looking.state_dict() == states[step]
    coming = looking.peek(2)
    assert all(looking.next_step() is step for step in coming), "what was seen is what comes"
    assert looking.state_dict() == states[4]
    looking.peek(2)
    looking.load_state_dict(states[0])
    assert same(looking.peek(1)[0], expected[1]) and same(looking.next_step(), expected[1])
    plain.close()
    looking.close()


@pytest.mark.parametrize("peeks", [False, True])
@pytest.mark.parametrize("prefetch", [False, True])
def test_an_error_of_the_data_set_keeps_its_type_and_stops_the_loader(prefetch, peeks):
    failing = loader(layout(), 0, Recording(fail_at=5), prefetch=prefetch)
    first = failing.next_step()
    failing.peek(0)
    state = failing.state_dict()
    with pytest.raises(OSError, match="disk gone at 5"):
        failing.peek(1) if peeks else failing.next_step()
    with pytest.raises(RuntimeError, match="failed in an earlier step"):
        failing.next_step()
    assert failing.state_dict() == state
    failing.load_state_dict({"consumed_samples": 0, "streams": {"vision/0": {"consumed": 0, "lanes": 1}}})
    assert same(failing.next_step(), first)
    failing.close()


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_wrong_sample_is_named(prefetch):
    short = loader(layout(), 1, prefetch=prefetch, seq_length=4)
    with pytest.raises(ValueError, match=r"sample mock/train/000000: .* more than --seq-length 4"):
        short.next_step()
    short.close()


def test_a_data_set_that_ends_is_refused():
    with pytest.raises(ValueError, match="lane 0: the data set ended inside a microbatch"):
        loader(layout(), 0, Recording(end_at=3)).next_step()


def test_a_configuration_that_the_data_set_refuses_fails_at_set_up():
    with pytest.raises(ValueError, match="--digits-min 0"):
        loader(layout(), 0, digits.provider, digits.Config(digits_min=0))


def test_close_ends_the_thread_and_may_be_repeated():
    before = set(threading.enumerate())
    closing = loader(layout(), 0, prefetch=True)
    closing.next_step()
    started = set(threading.enumerate()) - before
    assert started
    assert all(thread.daemon for thread in started)
    closing.close()
    closing.close()
    for thread in started:
        thread.join(timeout=60)
        assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        closing.next_step()


class Held(Recording):
    """Its stream gives samples only once it is let go."""

    def __post_init__(self):
        super().__post_init__()
        self.let_go = threading.Event()

    def stream(self, config, tokens, lane):
        stream = super().stream(config, tokens, lane)
        build = stream._build

        def build_when_let_go(index):
            self.let_go.wait(60)
            return build(index)

        return IndexedStream(lane, build_when_let_go)


@pytest.mark.parametrize("prefetch", [False, True])
def test_whoever_asks_why_nothing_comes_sees_a_busy_loader(prefetch):
    provider = Held()
    reading = loader(layout(), 1, provider, prefetch=prefetch)
    assert not reading.status().busy
    steps = []
    waiting = threading.Thread(target=lambda: steps.append(reading.next_step()))
    waiting.start()
    while waiting.is_alive() and not reading.status().busy:
        waiting.join(0.01)
    status = reading.status()
    assert (status.busy, status.state, status.peers) == (True, "streams language/0 of this rank", ())
    provider.let_go.set()
    waiting.join()
    assert len(steps) == 1
    reading.close()
    assert not reading.status().busy


def in_the_middle_of_a_read():
    """Return a provider that holds back its data, and a loader that has handed out two steps and reads the third."""
    provider = Held()
    provider.let_go.set()
    reading = loader(layout(), 1, provider, prefetch=True)
    reading.next_step()
    while reading.status().busy:
        time.sleep(0.01)
    provider.let_go.clear()
    reading.next_step()  # and begins to read the one after it
    return provider, reading


def test_a_save_does_not_wait_for_data_that_is_being_read():
    provider, reading = in_the_middle_of_a_read()
    expected = {"consumed_samples": 8, "streams": {"language/0": {"consumed": 8, "lanes": 1}}}
    states = []
    saving = threading.Thread(target=lambda: states.append(reading.state_dict()), daemon=True)
    saving.start()
    saving.join(30)
    assert states == [expected] and reading.status().busy
    provider.let_go.set()
    assert reading.state_dict() == expected
    reading.close()


def test_a_loader_that_waits_for_its_last_data_to_close_is_busy():
    provider, reading = in_the_middle_of_a_read()
    closing = threading.Thread(target=reading.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive() and reading.status().busy
    provider.let_go.set()
    closing.join()
    assert not reading.status().busy
