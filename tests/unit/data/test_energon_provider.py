"""The energon data set through its provider: digits as shards, and what is refused before anything is read."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.energon.provider import Config, provider
from mimo.protocols import DataRequest, RoutedDataProvider, TokenSpec
from tests.support.chat_templates import LLAVA, QWEN3
from tests.support.shards import text_shards
from tests.support.small_tokenizer import CHATML_TOKENS, write_tokenizer

ROOT = Path(__file__).parents[3]
META = "__module__: megatron.energon\n__class__: MetadatasetV2\n"
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:multiprocessing", "ignore:This DataLoader will create:UserWarning"
)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The flags of a small digits set with images, and one of text beside it."""
    spec = importlib.util.spec_from_file_location("prepare_digits", ROOT / "scripts" / "prepare_digits.py")
    script = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(script)
    sys.path[:] = path
    folder = tmp_path_factory.mktemp("digits") / "out"
    script.main([str(folder), "--samples", "60", "--shards", "3"])
    return Config(data_path=str(folder / "blend.yaml"), tokenizer=str(folder / "tokenizer"), num_workers=0,
                  image_tiling="stretch", image_resample="bicubic", image_mean=(0.3,), image_std=(0.4,))


def request(lanes=2, split="train", micro_batch_size=1):
    return DataRequest(TokenSpec(64, 3, 32, 3), lambda height, width: 4, lanes, micro_batch_size, 64, 5, split)


def assert_same(one, other):
    assert (one.key, one.lengths, one.image_sizes) == (other.key, other.lengths, other.image_sizes)
    assert one.unbalanced_encoded_tokens == other.unbalanced_encoded_tokens
    assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.target_mask, other.target_mask)
    for image, expected in zip(one.images, other.images, strict=True):
        assert np.array_equal(image, expected)


def opened(config, states=None, lanes=(0, 1)):
    reader = provider.reader(config, request(), list(lanes))
    if states is not None:
        reader.load_state_dict(states)
    reader.start()
    return reader


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "flags"), [
    (0, {}), (0, {"packing_buffer_size": 12, "shuffle_buffer_size": 6}),
    (1, {"packing_buffer_size": 12, "packing_balance": True})], ids=["single", "packed", "balanced"])
def test_rows_of_a_blend_continue_bit_for_bit(digits, workers, flags):
    config = replace(digits, num_workers=workers, **flags)
    provider.validate(config, request())
    whole = opened(config)
    before = [(whole.read(0), whole.read(1)) for _ in range(21)]
    mark = whole.mark()
    after = [(whole.read(0), whole.read(1)) for _ in range(12)]
    states = whole.state_dict(mark)
    whole.close()
    alone = opened(replace(config, num_workers=0), lanes=[1])
    for _, expected in before + after:
        assert_same(alone.read(1), expected)
    again = opened(config, states)
    for expected in after:
        for lane in (0, 1):
            assert_same(again.read(lane), expected[lane])
    again.close()


def test_validation_counts_single_samples_even_where_training_packs(digits):
    config = replace(digits, packing_buffer_size=12)
    count = provider.num_samples(config, "valid")
    assert provider.num_samples(config, "train") is None
    provider.validate(config, request(split="valid"))
    reader = provider.reader(config, request(split="valid"), [0, 1])
    rows = [reader.read(place % 2) for place in range(count)]
    assert len({row.key for row in rows}) == count
    assert not any(row.lengths for row in rows)
    text = provider.decode(config, rows[0].tokens[rows[0].target_mask].tolist() + [0, 0])
    assert text.split() == [character for character in text if character.isdigit()] != []


@pytest.mark.parametrize(("flags", "message"), [
    ({"num_workers": -1}, "--num-workers -1: must be at least 0"),
    ({"shuffle_buffer_size": -3}, "--shuffle-buffer-size -3: must be at least 0"),
    ({"max_samples_per_sequence": 0}, "--max-samples-per-sequence 0: must be at least 1"),
    ({"max_bad_samples": -1}, "--max-bad-samples -1"),
    ({"packing_balance": True}, "--packing-balance: it chooses packs, so it needs --packing-buffer-size"),
    ({"tokenizer": ""}, "--tokenizer: give the folder"),
    ({"prompt_format": "x"}, "--prompt-format x: unknown"),
    ({"image_tiling": "dynamic"}, "--image-tiling dynamic: the encoder takes"),
    ({"data_path": ""}, "--data-path: name the folder"),
])
def test_flags_that_cannot_work_are_refused_by_name(digits, flags, message):
    with pytest.raises(ValueError, match=message):
        provider.validate(replace(digits, **flags), request())


def test_a_template_that_ends_no_answer_needs_a_flag(digits, tmp_path):
    wanted = replace(request(), tokens=TokenSpec(400, 3, 32, 3))
    config = replace(digits, tokenizer=str(write_tokenizer(tmp_path, special=["<image>"], chat_template=LLAVA)))
    with pytest.raises(ValueError, match="answers that never end; --append-eos"):
        provider.validate(config, wanted)
    provider.validate(replace(config, append_eos=True), wanted)


def test_a_template_that_rewrites_answers_is_told_once(digits, tmp_path, caplog):
    wanted = replace(request(), tokens=TokenSpec(400, 399, 32, 3))
    config = replace(digits, tokenizer=str(write_tokenizer(tmp_path, special=CHATML_TOKENS, chat_template=QWEN3)))
    provider.reader(config, wanted, [0])
    provider.reader(config, wanted, [1])
    assert [record.message.count("the rewritten ones are not learned") for record in caplog.records] == [1]


def test_packing_wants_one_row_a_microbatch(digits):
    config = replace(digits, packing_buffer_size=4)
    with pytest.raises(ValueError, match="--packing-buffer-size 4: .* --micro-batch-size 2 must be 1"):
        provider.validate(config, request(micro_batch_size=2))


@pytest.mark.parametrize(("text", "split", "message"), [
    (META + "splits:\n  train:\n    path: ./nothing\n", "train", "cannot open the 'train' split: .*nothing"),
    (META + "splits:\n  train:\n    path: ./set\n", "valid", "cannot open the 'val' split: there is no 'val'"),
    (META + "splits:\n  train:\n    pth: ./set\n", "train", "cannot open the 'train' split: Missing value at"),
    ("splits: [\n", "train", "cannot open the 'train' split: not a YAML file"),
    ("", "train", "cannot open the 'train' split"),
])
def test_a_metadataset_that_cannot_be_opened_is_named(digits, tmp_path, text, split, message):
    text_shards(tmp_path / "set", train=(2,))
    (tmp_path / "meta.yaml").write_text(text)
    with pytest.raises(ValueError, match="--data-path .*meta.yaml: " + message):
        provider.validate(replace(digits, data_path=str(tmp_path / "meta.yaml")), request(split=split))


def test_the_provider_routes_its_lanes():
    assert isinstance(provider, RoutedDataProvider)
