"""The encoder inputs of several lanes as one batch, field by field (bugs 19 to 22 of heterogeneous training)."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from mimo.data.batch import EncoderBatch, Microbatch, PackedSequences, TextBatch, map_tensors
from mimo.data.encoder_inputs import (
    PatchOrder,
    join_images,
    merge_inputs,
    packed_patches,
    patchify,
    split_images,
    unpatchify,
    whole_images,
)
from mimo.protocols import VideoSize
from mimo.training.encoder_windows import images_of


def lane(*sizes: tuple[int, int], fill: float = 0.0) -> dict:
    """Packed patches of 4 pixels a side, of images that hold `fill`."""
    images = [np.full((3, *size), fill, np.float32) for size in sizes]
    return packed_patches(images, sizes, PatchOrder(4), torch.float32)


def test_patches_are_those_of_a_convolution() -> None:
    image = np.random.default_rng(0).normal(size=(3, 8, 12)).astype(np.float32)
    weight = torch.randn(5, 3, 4, 4)
    expected = torch.nn.functional.conv2d(torch.from_numpy(image)[None], weight, stride=4)[0].flatten(1).t()
    torch.testing.assert_close(torch.from_numpy(patchify(image, PatchOrder(4))) @ weight.flatten(1).t(), expected)


@pytest.mark.parametrize("order", [PatchOrder(4), PatchOrder(4, 2, 2), PatchOrder(2, 3, 1)])
def test_patches_become_the_image_again(order: PatchOrder) -> None:
    image = np.random.default_rng(0).normal(size=(3, 24, 48)).astype(np.float32)
    patches = patchify(image, order)
    assert patches.shape == (24 * 48 // order.patch_size**2, 3 * order.temporal_patch_size * order.patch_size**2)
    assert np.array_equal(unpatchify(patches, (24, 48), order), image)


def test_blocks_of_patches_are_those_of_qwen() -> None:
    processors = pytest.importorskip("transformers.models.qwen2_vl")
    image = np.random.default_rng(0).integers(0, 256, (3, 56, 84)).astype(np.float32)
    processor = processors.Qwen2VLImageProcessor(do_resize=False, do_rescale=False, do_normalize=False)
    expected = processor(torch.from_numpy(image), return_tensors="pt")["pixel_values"]
    assert torch.equal(torch.from_numpy(patchify(image, PatchOrder(14, 2, 2))), expected)


def test_patches_of_a_video_are_those_of_qwen() -> None:
    processors = pytest.importorskip("transformers.models.qwen2_vl")
    video = np.random.default_rng(0).integers(0, 256, (6, 3, 56, 84)).astype(np.float32)
    processor = processors.Qwen2VLVideoProcessor(do_resize=False, do_rescale=False, do_normalize=False,
                                                 do_sample_frames=False)
    expected = processor(torch.from_numpy(video), return_tensors="pt")
    assert expected["video_grid_thw"].tolist() == [[3, 4, 6]]
    inputs = packed_patches([video], [VideoSize(56, 84, 6)], PatchOrder(14, 2, 2), torch.float32)
    assert torch.equal(inputs["pixel_values"][0], expected["pixel_values_videos"])
    assert inputs["imgs_sizes"].tolist() == [[56, 84]] * 3
    assert inputs["packed_seq_params"].cu_seqlens.tolist() == [0, 24, 48, 72]


def test_images_that_were_taken_apart_are_joined_again_in_any_order() -> None:
    rng = np.random.default_rng(1)
    sizes = [(8, 8), (4, 12), (16, 4)]
    images = [rng.normal(size=(3, *size)).astype(np.float32) for size in sizes]
    parts = split_images(packed_patches(images, sizes, PatchOrder(4), torch.float32))
    assert [size for size, _ in parts] == sizes
    order = [2, 0]
    joined = join_images([parts[index][1] for index in order], [sizes[index] for index in order])
    expected = packed_patches([images[index] for index in order], [sizes[index] for index in order], PatchOrder(4),
                              torch.float32)
    assert torch.equal(joined["pixel_values"], expected["pixel_values"])
    assert joined["imgs_sizes"].tolist() == expected["imgs_sizes"].tolist()
    assert torch.equal(joined["packed_seq_params"].cu_seqlens, expected["packed_seq_params"].cu_seqlens)
    assert joined["packed_seq_params"].max_seqlen == expected["packed_seq_params"].max_seqlen
    squares = whole_images([np.full((3, 8, 8), value, np.float32) for value in (1.0, 2.0)], torch.float32)
    (first, one), (_, two) = split_images(squares)
    assert first == (8, 8) and join_images([two, one], [first] * 2)["pixel_values"][:, 0, 0, 0].tolist() == [2.0, 1.0]
    assert split_images({}) == []


def test_windows_take_images_of_the_samples_of_the_text_alone() -> None:
    def microbatch(keys: tuple[str, ...], counts: tuple[int, ...], num_images: int = 2) -> Microbatch:
        text = TextBatch(("a", "b"), {"vision": (4, 4)}, *[torch.zeros(2, 8, dtype=torch.int64)] * 4, {}, 16,
                         image_lengths={"vision": (4, 4)})
        images = [np.zeros((3, 8, 8), np.float32)] * num_images
        return Microbatch(text, {"vision": EncoderBatch(keys, counts, (2,), whole_images(images, torch.float32))})

    found = images_of([microbatch(("a", "b"), (4, 4))], "vision", lane=3, rank=6)
    assert [(image.lane, image.microbatch, image.tokens, image.size) for image in found] == [(3, 0, 4, (8, 8))] * 2
    for batch, message in ((microbatch(("a", "c"), (4, 4)), "reads sample 'b', but vision rank 6 encodes sample 'c'"),
                           (microbatch(("a", "b"), (4, 5)), "sample 'b' (lane 3, microbatch 0): its text has 4 image"),
                           (microbatch(("a", "b"), (4, 4), 3), "their text has 2 images of vision, their pixels are "
                                                               "those of 3")):
        with pytest.raises(ValueError, match=re.escape(message)):
            images_of([batch], "vision", lane=3, rank=6)


def test_lanes_of_equal_shape_are_joined_not_stacked() -> None:
    one, two = lane((8, 8), fill=1.0), lane((8, 8), fill=2.0)
    merged = merge_inputs([one, two])
    assert merged["pixel_values"].shape == (1, 8, 48)
    assert merged["pixel_values"][0, :, 0].tolist() == [1.0] * 4 + [2.0] * 4
    assert merged["imgs_sizes"].tolist() == [[8, 8], [8, 8]]
    assert merged["packed_seq_params"].cu_seqlens.tolist() == [0, 4, 8]


def test_lanes_of_different_lengths_and_an_empty_one_are_those_of_one_lane() -> None:
    images = [(8, 8), (4, 12), (16, 4)]
    merged = merge_inputs([lane(*images[:2]), {}, lane(*images[2:])])
    whole = lane(*images)
    assert torch.equal(merged["pixel_values"], whole["pixel_values"])
    assert merged["imgs_sizes"].tolist() == whole["imgs_sizes"].tolist()
    assert torch.equal(merged["packed_seq_params"].cu_seqlens, whole["packed_seq_params"].cu_seqlens)
    assert merged["packed_seq_params"].cu_seqlens.dtype is torch.int32
    assert merged["packed_seq_params"].max_seqlen == whole["packed_seq_params"].max_seqlen == 4


def test_merging_leaves_the_lanes_as_they_were() -> None:
    one, two = lane((8, 8)), lane((8, 12))
    before = one["packed_seq_params"].cu_seqlens.tolist(), two["packed_seq_params"].cu_seqlens.tolist()
    merge_inputs([one, two])
    assert (one["packed_seq_params"].cu_seqlens.tolist(), two["packed_seq_params"].cu_seqlens.tolist()) == before


def test_whole_images_are_joined_image_after_image() -> None:
    one, two = (whole_images([np.full((1, 2, 2), value, np.float32)] * 2, torch.float32) for value in (1, 2))
    assert merge_inputs([one, {}, two])["pixel_values"][:, 0, 0, 0].tolist() == [1, 1, 2, 2]
    assert merge_inputs([{}, {}]) == {}


@pytest.mark.parametrize(("broken", "message"), [
    ({"audio_values": torch.zeros(1)}, "audio_values"),
    ({"packed_seq_params": {"cu_seqlens": torch.zeros(2)}}, "packed_seq_params"),
    ({"imgs_sizes": [(8, 8)]}, "imgs_sizes"),
])
def test_an_input_without_a_rule_is_refused(broken: dict, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        merge_inputs([lane((8, 8)) | broken, lane((8, 8)) | broken])


def test_lanes_of_different_kinds_are_refused() -> None:
    with pytest.raises(TypeError, match="cannot be merged"):
        merge_inputs([lane((8, 8)), whole_images([np.zeros((3, 8, 8), np.float32)], torch.float32)])


def test_later_stages_get_everything_but_pixels() -> None:
    sizes = [(8, 8), (4, 12)]
    later = packed_patches(None, sizes, PatchOrder(4), torch.float32)
    assert later.keys() == {"imgs_sizes", "packed_seq_params"}
    assert torch.equal(later["packed_seq_params"].cu_seqlens, lane(*sizes)["packed_seq_params"].cu_seqlens)


def test_a_batch_moves_whole_and_its_sizes_stay_on_the_host() -> None:
    batch = Microbatch(None, {"vision": EncoderBatch(("a",), (4,), (1,), lane((8, 8)))})
    moved = map_tensors(batch, lambda tensor: tensor.to("meta")).encoders["vision"].inputs
    assert moved["pixel_values"].is_meta and moved["packed_seq_params"].cu_seqlens.is_meta
    assert isinstance(moved["packed_seq_params"], PackedSequences)
    assert isinstance(moved["imgs_sizes"], np.ndarray)
