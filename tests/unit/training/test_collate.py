"""Collation: expansion, shift, padding, and one clear error for each thing a data set can get wrong."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from mimo.data.collate import Placeholders, collate_encoder, collate_text
from mimo.data.encoder_inputs import PatchOrder
from mimo.protocols import Sample, VideoSize
from mimo.registry import model_provider
from mimo.visual import Normalisation, TokenGrid, count_tokens

IMAGE, PAD = 3, 0


def num_image_tokens(module: str, height: int, width: int) -> int:
    """Four-pixel patches."""
    if height % 4 or width % 4:
        raise ValueError(f"--vision-patch-size 4 does not divide {height}x{width}")
    return height // 4 * (width // 4)


def sample(key="set/1", tokens=(1, IMAGE, 5, 6, 2), targets=2, sizes=((8, 8),), **changes) -> Sample:
    """Return a sample whose last `targets` tokens are the answer. Each image is filled with its position."""
    mask = np.arange(len(tokens)) >= len(tokens) - targets
    images = [np.full((1, *size), position, np.float32) for position, size in enumerate(sizes)]
    return replace(Sample(key, np.array(tokens, np.int64), mask, list(sizes), images), **changes)


def text(*samples, modules=None, seq_length=10, pad_token_id=PAD, row_multiple=None):
    return collate_text(samples,
                        images=Placeholders({"vision": IMAGE} if modules is None else modules, num_image_tokens, 1),
                        seq_length=seq_length, vocab_size=20, pad_token_id=pad_token_id, row_multiple=row_multiple)


def encoder(*samples, lane_sizes=None, dtype=torch.float32, pixels=True):
    return collate_encoder(samples, module="vision", images=Placeholders({"vision": IMAGE}, num_image_tokens, 1),
                           lane_sizes=lane_sizes or [len(samples)], dtype=dtype, pixels=pixels)


def test_text_is_expanded_shifted_and_padded():
    batch = text(sample(), sample("set/2", tokens=(1, 7, 8, 2), targets=2, sizes=()))
    assert batch.keys == ("set/1", "set/2")
    assert batch.token_counts == {"vision": (4, 0)}
    assert batch.input_ids.tolist() == [[1, 3, 3, 3, 3, 5, 6, 2, 0, 0], [1, 7, 8, 2, 0, 0, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[3, 3, 3, 3, 5, 6, 2, 0, 0, 0], [7, 8, 2, 0, 0, 0, 0, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[0, 0, 0, 0, 0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [list(range(10))] * 2
    assert batch.num_tokens == 12
    assert batch.input_ids.dtype == batch.labels.dtype == batch.position_ids.dtype == torch.int64
    assert batch.loss_mask.dtype == torch.float32


def test_rows_are_as_long_as_the_longest_sample_rounded_up():
    short, long = sample("set/2", tokens=(1, 7, 8, 2), targets=2, sizes=()), sample()
    for samples, multiple, length in (((short,), 1, 4), ((short,), 3, 6), ((short, long), 3, 9), ((long,), 6, 10),
                                      ((sample(lengths=(5,)),), 4, 8)):
        cut, whole = text(*samples, row_multiple=multiple), text(*samples)
        assert cut.input_ids.shape == cut.labels.shape == cut.position_ids.shape == (len(samples), length)
        for one, other in ((cut.input_ids, whole.input_ids), (cut.labels, whole.labels),
                           (cut.loss_mask, whole.loss_mask)):
            assert torch.equal(one, other[:, :length]) and not other[:, length:].any()
        assert torch.equal(cut.placeholders["vision"], whole.placeholders["vision"])
        assert cut.num_tokens == whole.num_tokens
    assert text(sample(tokens=(), targets=0, sizes=()), row_multiple=4).input_ids.shape == (1, 4)
    # A pack ends with a sequence of padding, if there is any.
    packed = text(sample(lengths=(5,)), row_multiple=4).packed
    assert packed.cu_seqlens.tolist() == [0, 8]


def test_placeholders_index_the_sequence_first_tensor_in_sample_order():
    batch = text(sample(tokens=(1, IMAGE, 5, IMAGE, 2), targets=1, sizes=((4, 4), (4, 8))),
                 sample("set/2", tokens=(IMAGE, 2), targets=1, sizes=((4, 4),)))
    flat_sb = batch.input_ids.T.reshape(-1)
    positions = batch.placeholders["vision"]
    assert (flat_sb[positions] == IMAGE).all()
    assert (flat_sb == IMAGE).sum() == len(positions) == sum(batch.token_counts["vision"])
    assert positions.tolist() == [1 * 2, 3 * 2, 4 * 2, 0 * 2 + 1]


def test_a_sample_may_fill_the_sequence_and_may_have_no_target():
    batch = text(sample(targets=0), seq_length=8)
    assert batch.loss_mask.sum() == 0
    assert batch.labels.tolist() == [[3, 3, 3, 3, 5, 6, 2, 0]]


def test_text_without_an_encoder():
    batch = text(sample(tokens=(1, IMAGE, 5), targets=1, sizes=()), modules={})
    assert batch.input_ids[0, :3].tolist() == [1, IMAGE, 5]
    assert batch.token_counts == batch.placeholders == {}


def test_no_samples_at_all():
    assert text().input_ids.shape == (0, 10)
    batch = encoder(lane_sizes=[0])
    assert (batch.keys, batch.token_counts, batch.lane_sizes, batch.inputs) == ((), (), (0,), {})


@pytest.mark.parametrize(("broken", "message"), [
    (sample(sizes=()), r"set/1: 1 image placeholder \(token id 3\) but 0 images"),
    (sample(tokens=(1, 5, 2), sizes=((8, 8),)), r"set/1: 0 image placeholders \(token id 3\) but 1 image"),
    (sample(sizes=((8, 6),)), "set/1: image 0 of 8x6 pixels: --vision-patch-size 4 does not divide 8x6"),
    (sample(sizes=((16, 8),)), r"set/1: 12 tokens, 8 of them from images, are 2 more than --seq-length 10"),
    (sample(tokens=(1, IMAGE, 20, 2)), "set/1: token id 20 is not below --vocab-size 20"),
    (sample(tokens=(1, IMAGE, -1, 2)), "set/1: token id -1"),
    (sample(tokens=(1, 5, IMAGE, 2)), "set/1: an image placeholder .* is marked as a target"),
    (sample(target_mask=np.array([True])), r"set/1: target_mask is bool \[1\], expected bool \[5\]"),
    (sample(target_mask=np.ones(5, np.int64)), r"set/1: target_mask is int64"),
    (sample(tokens=(1.0, 2.0), sizes=()), None),
])
def test_wrong_text_is_refused_by_sample(broken, message):
    if message is None:
        broken, message = replace(broken, tokens=broken.tokens.astype(np.float32)), "set/1: tokens are float32"
    with pytest.raises(ValueError, match=message):
        text(sample("set/0"), broken)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"modules": {}}, r"set/1: has 1 image, but the layout has no encoder \(--llm-only\)"),
    ({"pad_token_id": IMAGE}, "--image-token-id 3: is the padding token"),
])
def test_wrong_modules_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        text(sample(), **arguments)


def test_images_are_stacked_in_order():
    first = sample(tokens=(IMAGE, IMAGE, 2), targets=1, sizes=((8, 8), (8, 8)))
    batch = encoder(first, sample("set/2", tokens=(1, 2), targets=1, sizes=()), sample("set/3"), lane_sizes=[1, 2])
    assert batch.keys == ("set/1", "set/2", "set/3")
    assert batch.token_counts == (8, 0, 4)
    assert batch.lane_sizes == (1, 2)
    assert batch.inputs["pixel_values"].shape == (3, 1, 8, 8)
    assert batch.inputs["pixel_values"][:, 0, 0, 0].tolist() == [0, 1, 0]
    assert batch.inputs["pixel_values"].dtype == torch.float32
    assert encoder(first, dtype=torch.bfloat16).inputs["pixel_values"].dtype == torch.bfloat16


def test_each_image_belongs_to_the_encoder_of_its_placeholder():
    modules = {"vision": IMAGE, "thermal": 4}
    mixed = sample(tokens=(4, IMAGE, 4, 2), targets=1, sizes=((8, 8), (8, 4), (8, 8)))
    batch = text(mixed, modules=modules, seq_length=12)
    assert batch.token_counts == {"vision": (2,), "thermal": (8,)}
    assert batch.input_ids.tolist() == [[4] * 4 + [IMAGE] * 2 + [4] * 4 + [2, 0]]
    assert batch.placeholders["vision"].tolist() == [4, 5]
    for module, counts, positions in (("vision", (2,), [1]), ("thermal", (8,), [0, 2])):
        side = collate_encoder([mixed], module=module, images=Placeholders(modules, num_image_tokens, 1),
                               lane_sizes=[1], dtype=torch.float32)
        assert side.token_counts == counts
        assert side.inputs["pixel_values"][:, 0, 0, 0].tolist() == positions


def test_zero_images_give_no_inputs():
    text_only = {"tokens": (1, 5, 2), "targets": 1, "sizes": ()}
    batch = encoder(sample(**text_only), sample("set/2", **text_only))
    assert batch.inputs == {}
    assert batch.token_counts == (0, 0)


def test_later_pipeline_stages_need_counts_only():
    batch = encoder(sample(images=None), pixels=False)
    assert batch.inputs == {}
    assert batch.token_counts == (4,)


GREY = Normalisation((0.481,), (0.268,))


@pytest.mark.parametrize("images", ["whole", "of any size, and a video"])
def test_eight_bit_pixels_are_a_quarter_of_the_bytes_and_normalise_to_the_same_bits(images):
    rng, colours = np.random.default_rng(0), Normalisation((0.481, 0.457, 0.408), (0.268, 0.261, 0.275))
    row, chosen = (sample(), Placeholders({"vision": IMAGE}, num_image_tokens, 3)) if images == "whole" else (
        mixed(), replace(VIDEOS, num_channels=3))
    shapes = [(*image.shape[:-3], 3, *image.shape[-2:]) for image in row.images]
    levels = [rng.permutation(np.arange(np.prod(shape)) % 256).astype(np.uint8).reshape(shape) for shape in shapes]
    made = [collate_encoder([replace(row, **fields)], module="vision", images=chosen, lane_sizes=[1],
                            dtype=torch.float32) for fields in ({"images": levels, "normalisation": colours},
                           {"images": [colours.normalise(image) for image in levels]})]
    pixels, expected = (batch.inputs["pixel_values"] for batch in made)
    assert pixels.dtype == torch.uint8 and 4 * pixels.nbytes == expected.nbytes
    found = made[0].normalised_inputs()["pixel_values"]
    assert found.dtype == torch.float32 and torch.equal(found, expected)
    assert replace(made[0], dtype=torch.bfloat16).normalised_inputs()["pixel_values"].dtype == torch.bfloat16
    assert made[1].normalised_inputs()["pixel_values"] is expected


NAN = np.full((1, 8, 8), np.nan, np.float32)


@pytest.mark.parametrize(("broken", "message"), [
    (sample(images=None), "set/1: declares 1 image but holds 0"),
    (sample(images=[]), "set/1: declares 1 image but holds 0"),
    (sample(image_sizes=[]), "set/1: 1 image placeholder .* but 0 images"),
    (sample(images=[np.zeros((1, 8, 12), np.float32)]), r"set/1: image 0 is float32 \[1, 8, 12\], .* \[1, 8, 8\]"),
    (sample(images=[np.zeros((3, 8, 8), np.float32)]), r"set/1: image 0 is float32 \[3, 8, 8\], .* \[1, 8, 8\]"),
    (sample(images=[np.zeros((1, 8, 8), np.uint8)]), r"set/1: image 0 is uint8 .* declared float32"),
    (sample(images=[np.zeros((1, 8, 8), np.uint8)], normalisation=GREY),
     r"set/1: its images have the normalisation .*, those of sample set/0 have None"),
    (sample(images=[NAN]), "set/1: image 0 has pixels that are not finite"),
    (sample(sizes=((8, 6),)), "set/1: image 0 of 8x6 pixels"),
    (sample(sizes=((8, 4),)), r"set/1: an image of 8x4 pixels .* 8x8 \(sample set/0\)"),
])
def test_wrong_images_are_refused_by_sample(broken, message):
    with pytest.raises(ValueError, match=message):
        encoder(sample("set/0"), broken)


@pytest.mark.parametrize(("normalisation", "message"), [
    (GREY, "set/1: image 0 is float32 .* declared uint8 .* with a normalisation"),
    (Normalisation((0.5,) * 3, (0.5,) * 3),
     "set/1: its normalisation has 3 means and 3 deviations; the encoder takes 1 channels"),
])
def test_a_wrong_normalisation_is_refused_by_sample(normalisation, message):
    with pytest.raises(ValueError, match=message):
        encoder(sample(normalisation=normalisation))


# Videos

VIDEO = 4
VIDEOS = Placeholders(
    {"vision": IMAGE}, lambda module, height, width, frames=0, seconds=0.0: (
        num_image_tokens(module, height, width) * max(frames // 2, 1)),
    1, PatchOrder(2, 2, 2), lambda module, height, width, frames=0, seconds=0.0: TokenGrid(
        height // 4, width // 4, max(frames // 2, 1)), {"vision": VIDEO})


def mixed(**changes) -> Sample:
    """An image, a video of three temporal patches and another image, answers of two tokens."""
    row = sample(tokens=(1, IMAGE, VIDEO, IMAGE, 5, 2), sizes=((8, 8), (8, 4), (4, 4)))
    row.image_sizes[1] = VideoSize(8, 4, 6, 0.5)
    row.images[1] = np.arange(6 * 32, dtype=np.float32).reshape(6, 1, 8, 4)
    return replace(row, **changes)


def test_a_video_has_a_placeholder_and_the_tokens_of_its_temporal_patches():
    batch = collate_text([mixed()], images=VIDEOS, seq_length=16, vocab_size=20, pad_token_id=PAD)
    assert batch.input_ids.tolist() == [[1, *[IMAGE] * 4, *[VIDEO] * 6, IMAGE, 5, 2, 0, 0]]
    assert batch.placeholders["vision"].tolist() == list(range(1, 12))
    assert batch.token_counts == {"vision": (11,)} and batch.image_lengths == {"vision": (4, 2, 2, 2, 1)}
    assert batch.position_ids[0, 0, 4:12].tolist() == [1, 3, 3, 4, 4, 5, 5, 6]
    side = collate_encoder([mixed()], module="vision", images=VIDEOS, lane_sizes=[1], dtype=torch.float32)
    assert side.token_counts == (11,)
    assert side.inputs["imgs_sizes"].tolist() == [[8, 8], *[[8, 4]] * 3, [4, 4]]
    # Patches of 2 x 2 pixels: 16 of the image, then 8 of each temporal patch.
    frames = side.inputs["pixel_values"][0, 16:40].view(3, 8, 2, 4)
    assert frames.amin((1, 3)).tolist() == [[0, 32], [64, 96], [128, 160]]


@pytest.mark.parametrize(("broken", "images", "message"), [
    (mixed(tokens=np.array((1, IMAGE, IMAGE, IMAGE, 5, 2))), VIDEOS,
     r"set/1: placeholder 1 \(token id 3\) does not stand for video 1 of 6 frames of 8x4 pixels; .* placeholder 4"),
    (mixed(tokens=np.array((1, VIDEO, VIDEO, IMAGE, 5, 2))), VIDEOS,
     r"placeholder 0 \(token id 4\) does not stand for image 0 of 8x8 pixels"),
    (mixed(images=[*mixed().images[:1], np.zeros((4, 1, 8, 4), np.float32), *mixed().images[2:]]), VIDEOS,
     r"set/1: video 1 is float32 \[4, 1, 8, 4\], declared float32 \[6, 1, 8, 4\] \(frames, channels, height, width\)"),
    (sample(image_sizes=[VideoSize(8, 4, 6)]),
     Placeholders({"vision": IMAGE}, partial(count_tokens, model_provider("llava"), None), 1),
     "set/1: video 0 of 6 frames of 8x4 pixels: the model takes images and no videos"),
])
def test_wrong_videos_are_refused_by_sample(broken, images, message):
    with pytest.raises(ValueError, match=message):
        collate_encoder([broken], module="vision", images=images, lane_sizes=[1], dtype=torch.float32)


# Packed rows


def packed(**changes) -> Sample:
    """`[1, IMAGE, 5, 6, 2]` and `[1, 7, 2]` in one row, answers of two tokens and one."""
    one, two = sample(), sample("set/2", tokens=(1, 7, 2), targets=1, sizes=())
    row = Sample("set/1 set/2", np.concatenate([one.tokens, two.tokens]),
                 np.concatenate([one.target_mask, two.target_mask]), one.image_sizes, one.images, lengths=(5, 3))
    return replace(row, **changes)


def test_a_packed_row_is_its_samples_side_by_side():
    row, one = text(packed(), seq_length=16), text(sample(), seq_length=8)
    two = text(sample("set/2", tokens=(1, 7, 2), targets=1, sizes=()), seq_length=3)
    assert row.packed.cu_seqlens.tolist() == [0, 8, 11, 16] and row.packed.max_seqlen == 8
    for start, alone in ((0, one), (8, two)):
        stop = start + alone.input_ids.shape[1]
        for field in ("input_ids", "labels", "loss_mask", "position_ids"):
            assert vars(row)[field][0, start:stop].tolist() == vars(alone)[field][0].tolist(), field
    assert row.loss_mask[0, 11:].sum() == 0 and row.position_ids[0, 11:].tolist() == list(range(5))
    assert row.token_counts == {"vision": (4,)} and row.num_tokens == 11


def test_a_full_packed_row_has_no_padding_sequence():
    assert text(packed(), seq_length=11).packed.cu_seqlens.tolist() == [0, 8, 11]


@pytest.mark.parametrize(("rows", "message"), [
    ((packed(), packed()), "packed rows need --micro-batch-size 1, it is 2"),
    ((packed(lengths=(5, 2)),), r"set/1 set/2: a pack of 8 tokens says that its samples have \[5, 2\]"),
    ((packed(lengths=(8, 0)),), r"\[8, 0\]"),
])
def test_wrong_packs_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        text(*rows, seq_length=16)


def test_bad_samples_are_named():
    assert text(sample(skipped=("a", "b")), sample("set/2", skipped=("c",))).skipped == ("a", "b", "c")
