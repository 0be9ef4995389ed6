"""Tiles of images: their sizes, which need no pixels, and their pixels, which have those sizes."""

import io
import math
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data.energon.provider import Config, with_image_flags
from data.image_tiling import Tiling, oriented_size, tile_image, tile_sizes, tiling_of
from mimo.protocols import ImageProcessing, TokenSpec

STRETCH = Tiling("stretch", (32, 32), 0, 1, 4, 1024, 0, 6, False, (0.5,) * 3, (0.25,) * 3, 3)
FIXED = replace(STRETCH, kind="fixed")
ANYRES = replace(STRETCH, kind="anyres", pinpoints=((32, 64), (64, 32), (64, 64), (96, 32), (32, 96)))
WIDE = replace(FIXED, tile_size=(32, 64), use_thumbnail=True)
# Cells of 32 pixels a side, 2 x 2 patches each: 1 to 16 of them.
DYNAMIC = replace(STRETCH, kind="dynamic", tile_size=(0, 0), patch_size=16, size_multiple=32, min_patches=4,
                  max_patches=64)
RAW = {"mean": (0.0,), "std": (1.0,), "num_channels": 1}
PATCHES = TokenSpec(vocab_size=9, image_token_id=8, image_size=0, num_channels=3, patch_size=16, size_multiple=32)
SQUARES = replace(PATCHES, image_size=32, patch_size=0, size_multiple=1)
side = st.integers(1, 1_000_000) | st.integers(1, 300)


def gradient(height, width):
    """Return a grey image whose pixels all tell where they are, as far as 8 bits go."""
    return Image.fromarray((np.arange(height * width) % 251).astype(np.uint8).reshape(height, width))


def reopened(image, kind, **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return Image.open(io.BytesIO(stream.getvalue()))


def bytes_of(tile):
    """Pixels 0 to 255 of a tile that was made with mean 0 and deviation 1."""
    return np.round(tile * 255).astype(int)


# By `DynamicResolutionImageTiler` of vLLM 0.32: limits, size of the image, size of its tile.
SERVED = [
    ((4, 64), (64, 96), (64, 96)),
    ((4, 64), (32, 512), (32, 512)),
    ((4, 64), (70, 90), (96, 96)),
    ((4, 64), (1, 1), (32, 32)),
    ((4, 64), (5, 20), (32, 64)),
    ((4, 64), (4000, 1000), (256, 64)),
    ((4, 64), (480, 640), (96, 160)),
    ((4, 64), (200, 2000), (32, 384)),
    ((4, 64), (1, 1000), (32, 992)),
    ((4, 1024), (480, 640), (448, 576)),
    ((4, 1024), (1440, 2560), (384, 672)),
    ((4, 1024), (333, 500), (352, 512)),
    ((4, 1024), (200, 2000), (160, 1600)),
    ((1024, 13312), (256, 256), (512, 512)),
    ((1024, 13312), (79, 81), (480, 576)),
    ((1024, 13312), (480, 640), (480, 640)),
    ((1024, 13312), (3000, 4000), (1600, 2112)),  # wider than RADIO's position grid
    ((1024, 13312), (20, 160), (256, 1152)),
]


@pytest.mark.parametrize(("limits", "size", "expected"), SERVED)
def test_dynamic_tiles_have_the_sizes_that_vllm_serves(limits, size, expected):
    assert tile_sizes(*size, replace(DYNAMIC, min_patches=limits[0], max_patches=limits[1])) == [expected]


@pytest.mark.parametrize("size", [(1, 100_000), (100_000, 1)])
def test_an_image_without_a_patch_after_reduction_is_refused(size):
    with pytest.raises(ValueError, match=f"an image of {size[0]} x {size[1]} .* too narrow: .* --max-patches 64"):
        tile_sizes(*size, DYNAMIC)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([(14, 14), (14, 28), (16, 64)]))
def test_dynamic_tiles_are_whole_multiples(height, width, sizes):
    patch, multiple = sizes
    tiling = replace(DYNAMIC, patch_size=patch, size_multiple=multiple, min_patches=16, max_patches=2500)
    try:
        ((new_height, new_width),) = tile_sizes(height, width, tiling)
    except ValueError:
        assert max(height, width) > 2000 * min(height, width)
        return
    assert new_height % multiple == new_width % multiple == 0 < new_height * new_width
    # The engine's rounding exceeds the limit only where one side is a single multiple.
    assert new_height * new_width <= 2500 * patch**2 or min(new_height, new_width) == multiple


@pytest.mark.parametrize(("size", "min_side", "expected"), [
    ((64, 96), 0, (64, 96)),
    ((64, 96), 64, (64, 96)),
    ((64, 96), 128, (128, 192)),
    ((32, 320), 96, (96, 960)),
    ((100, 60), 200, (352, 224)),
    ((30, 900), 256, (256, 1024)),  # the longer side as long as --max-patches allows
    ((900, 30), 256, (1024, 256)),
])
def test_a_least_side_enlarges_narrow_images(size, min_side, expected):
    tiling = replace(DYNAMIC, max_patches=1024, min_side=min_side)
    assert tile_sizes(*size, tiling) == [expected]


@pytest.mark.parametrize(("height", "width", "max_tiles", "rows", "cols"), [
    (32, 32, 6, 1, 1),
    (40, 40, 6, 1, 1),  # 1 x 1 and 2 x 2 are equally near: 40 x 40 does not fill half of 64 x 64
    (46, 46, 6, 2, 2),  # and 46 x 46 does
    (500, 500, 12, 3, 3),
    (500, 500, 1, 1, 1),
    (64, 32, 6, 2, 1),
    (150, 100, 6, 3, 2),
    (1, 1000, 6, 1, 6),
    (1000, 1, 6, 6, 1),
    (300, 400, 12, 3, 4),
])
def test_fixed_tiles_are_the_grid_nearest_in_aspect_ratio(height, width, max_tiles, rows, cols):
    tiling = replace(FIXED, max_tiles=max_tiles)
    assert tile_sizes(height, width, tiling) == [(32, 32)] * (rows * cols)
    with_thumbnail = tile_sizes(height, width, replace(tiling, use_thumbnail=True))
    assert with_thumbnail == [(32, 32)] * (rows * cols + (rows * cols > 1))
    # Where the tiles lie, not only how many they are: rows of the enlarged image from the top.
    image = Image.new("L", (width, height))
    image.paste(255, (width // 2, 0, width, height))
    tiles = np.stack(tile_image(image, replace(tiling, **RAW)))[:, 0]
    whole = tiles.reshape(rows, cols, 32, 32).transpose(0, 2, 1, 3).reshape(32 * rows, 32 * cols)
    expected = np.asarray(image.resize((32 * cols, 32 * rows), Image.Resampling.BICUBIC))
    assert np.array_equal(bytes_of(whole), expected)


@settings(max_examples=100, deadline=None)
@given(side, side, st.integers(1, 40), st.booleans())
def test_fixed_tiles_are_never_more_than_allowed(height, width, max_tiles, thumbnail):
    sizes = tile_sizes(height, width, replace(FIXED, max_tiles=max_tiles, use_thumbnail=thumbnail))
    assert set(sizes) == {(32, 32)}
    assert 1 <= len(sizes) <= max_tiles + (thumbnail and max_tiles > 1)


@pytest.mark.parametrize(("height", "width", "rows", "cols"), [
    (32, 64, 1, 1),  # one tile of that shape
    (320, 640, 2, 2),  # of equally near grids the one that it fills
    (40, 80, 1, 1),  # four of them it would fill less than half
    (64, 64, 2, 1),
    (32, 256, 1, 4),
    (300, 100, 6, 1),
])
def test_tiles_need_not_be_square_and_the_thumbnail_is_the_whole_image(height, width, rows, cols):
    tiling = replace(WIDE, **RAW)
    image = gradient(height, width)
    whole = np.asarray(image.resize((cols * 64, rows * 32), Image.Resampling.BICUBIC))
    made = tile_image(image, tiling)
    assert all(tile.base is None for tile in made), "a view would keep the whole image"
    tiles = [bytes_of(tile[0]) for tile in made]
    assert tile_sizes(height, width, tiling) == [tile.shape for tile in tiles] == [(32, 64)] * len(tiles)
    assert len(tiles) == rows * cols + (rows * cols > 1)
    for place, tile in enumerate(tiles[: rows * cols]):
        row, col = divmod(place, cols)
        assert np.array_equal(tile, whole[row * 32 : row * 32 + 32, col * 64 : col * 64 + 64])
    assert np.array_equal(tiles[-1], np.asarray(image.resize((64, 32), Image.Resampling.BICUBIC)))


@pytest.mark.parametrize("height", [1, 32, 900])
@pytest.mark.parametrize("width", [7, 32, 5000])
def test_resized_images_are_one_tile(height, width):
    assert tile_sizes(height, width, replace(STRETCH, use_thumbnail=True)) == [(32, 32)]
    assert tile_sizes(height, width, replace(WIDE, kind="resize")) == [(32, 64)]


@pytest.mark.parametrize("tiling", [STRETCH, FIXED, DYNAMIC])
def test_an_image_without_pixels_is_refused(tiling):
    with pytest.raises(ValueError, match="0x5 pixels"):
        tile_sizes(0, 5, tiling)


@pytest.mark.parametrize("tiling", [STRETCH, replace(FIXED, use_thumbnail=True), WIDE, DYNAMIC])
@pytest.mark.parametrize("size", [(1, 1), (32, 32), (100, 41), (3, 700)])
@pytest.mark.parametrize("num_channels", [1, 3])
def test_tiles_have_the_sizes_that_were_foretold(tiling, size, num_channels):
    image = reopened(Image.effect_noise(size, 40), "PNG")
    tiling = replace(tiling, num_channels=num_channels, mean=(0.5,) * num_channels, std=(0.25,) * num_channels)
    tiles = tile_image(image, tiling)
    assert [tile.shape for tile in tiles] == [(num_channels, *each) for each in tile_sizes(*size[::-1], tiling)]
    assert all(tile.dtype == np.float32 and tile.flags.c_contiguous for tile in tiles)


@pytest.mark.parametrize("tiling", [STRETCH, FIXED, replace(DYNAMIC, min_patches=4)])
def test_pixels_of_the_right_size_are_normalised_and_nothing_else(tiling):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 0.125)
    (tile,) = tile_image(Image.fromarray(pixels), replace(tiling, mean=mean, std=std))
    expected = (pixels.transpose(2, 0, 1) / 255 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    np.testing.assert_allclose(tile, expected, rtol=0, atol=1e-5)


# EXIF orientation: what a viewer must show, from the stored pixels.
UPRIGHT = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.T,
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored, 2).T,
    8: lambda stored: np.rot90(stored),
    9: lambda stored: stored,  # no such orientation
}


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("value", UPRIGHT)
def test_images_are_turned_upright(kind, value):
    stored = gradient(32, 64)
    exif = Image.Exif()
    exif[0x0112] = value
    image = reopened(stored, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    expected = UPRIGHT[value](np.asarray(stored))
    assert oriented_size(image) == expected.shape
    tiling = replace(DYNAMIC, **RAW)
    assert tile_sizes(*oriented_size(image), tiling) == [expected.shape]
    (tile,) = tile_image(image, tiling)
    assert np.array_equal(bytes_of(tile[0]), expected)


def test_a_size_is_read_from_the_header_alone():
    exif = Image.Exif()
    exif[0x0112] = 6
    stream = io.BytesIO()
    Image.effect_noise((300, 200), 60).convert("RGB").save(stream, "JPEG", exif=exif)
    header = stream.getvalue()[:800]
    image = Image.open(io.BytesIO(header))
    assert oriented_size(image) == (300, 200)
    with pytest.raises(OSError, match="truncated"):
        tile_image(image, DYNAMIC)


def png_with(image, kind, data, *, behind_pixels):
    """Return the PNG of an image with one more chunk, before or behind its pixels."""
    stream = io.BytesIO()
    image.save(stream, "PNG")
    chunk = struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    content = stream.getvalue()
    at = content.index(b"IEND" if behind_pixels else b"IDAT") - 4
    return Image.open(io.BytesIO(content[:at] + chunk + content[at:]))


@pytest.mark.parametrize("behind_pixels", [False, True])
def test_an_orientation_behind_the_pixels_is_no_orientation(behind_pixels):
    exif = Image.Exif()
    exif[0x0112] = 6
    data = exif.tobytes().removeprefix(b"Exif\0\0")
    image = png_with(gradient(32, 64), b"eXIf", data, behind_pixels=behind_pixels)
    size = (32, 64) if behind_pixels else (64, 32)
    assert oriented_size(image) == size
    assert [tile.shape[1:] for tile in tile_image(image, replace(DYNAMIC, **RAW))] == [size]


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("data", [b"", b"nonsense", b"MM\0*", b"MM\0*\0\0\0\x08\0\x01\x01", b"II*\0\xff\xff\xff\xff"])
def test_metadata_that_cannot_be_read_is_no_orientation(data):
    image = png_with(gradient(32, 64), b"eXIf", data, behind_pixels=False)
    assert oriented_size(image) == (32, 64)
    assert [tile.shape for tile in tile_image(image, DYNAMIC)] == [(3, 32, 64)]


def palette():
    image = Image.new("P", (32, 32), 1)
    image.putpalette([0, 0, 0, 255, 0, 0])
    return image


def palette_with_transparency():
    return reopened(palette(), "PNG", transparency=1)


def wide(value, kind="PNG"):
    return reopened(Image.fromarray(np.full((32, 32), value, np.uint16)), kind)


@pytest.mark.parametrize(("make", "rgb"), [
    (lambda: Image.new("RGB", (32, 32), (10, 20, 30)), (10, 20, 30)),
    (lambda: Image.new("L", (32, 32), 77), (77, 77, 77)),
    (lambda: Image.new("1", (32, 32), 1), (255, 255, 255)),
    (palette, (255, 0, 0)),
    (palette_with_transparency, (255, 255, 255)),
    (lambda: Image.new("RGBA", (32, 32), (10, 20, 30, 0)), (255, 255, 255)),
    (lambda: Image.new("RGBA", (32, 32), (0, 100, 255, 51)), (204, 224, 255)),
    (lambda: Image.new("LA", (32, 32), (0, 51)), (204, 204, 204)),
    (lambda: Image.new("CMYK", (32, 32), (0, 255, 255, 0)), (255, 0, 0)),
    (lambda: reopened(Image.new("CMYK", (32, 32), (0, 0, 0, 255)), "JPEG"), (0, 0, 0)),
    (lambda: Image.new("YCbCr", (32, 32), (90, 128, 128)), (90, 90, 90)),
    (lambda: reopened(Image.new("RGB", (32, 32), (9, 8, 7)), "PNG", transparency=(9, 8, 7)), (255, 255, 255)),
    (lambda: wide(0), (0, 0, 0)),
    (lambda: wide(257 * 100 + 128), (100, 100, 100)),
    (lambda: wide(257 * 100 + 129), (101, 101, 101)),
    (lambda: wide(65535), (255, 255, 255)),
    (lambda: wide(257 * 9, "PPM"), (9, 9, 9)),
    (lambda: reopened(wide(500), "PNG", transparency=500), (255, 255, 255)),
])
def test_every_kind_of_pixel_is_converted(make, rgb):
    tiling = replace(STRETCH, mean=(0.0,) * 3, std=(1.0,) * 3)
    (tile,) = tile_image(make(), tiling)
    assert np.array_equal(bytes_of(tile), np.broadcast_to(np.reshape(rgb, (3, 1, 1)), (3, 32, 32)))
    (grey,) = tile_image(make(), replace(STRETCH, **RAW))
    # ITU-R 601-2, as Pillow has it.
    assert np.abs(bytes_of(grey) - np.dot(rgb, (0.299, 0.587, 0.114))).max() <= 0.6


@pytest.mark.parametrize(("image", "message"), [(Image.new("F", (32, 32), 0.5), "floating-point pixels"),
                                                (Image.new("I", (32, 32), 70_000), "70000: expected 8 or 16 bits"),
                                                (Image.new("I", (32, 32), -1), "from -1 to")])
def test_pixels_without_a_known_range_are_refused(image, message):
    with pytest.raises(ValueError, match=message):
        tile_image(image, STRETCH)


def flags(**given):
    """Return the flags of a run whose model's processor stretches images."""
    mean = (0.48145466, 0.4578275, 0.40821073)
    return with_image_flags(Config(**given), lambda: [ImageProcessing("stretch", mean, (0.25,) * 3)])


def test_tiling_of_takes_what_each_kind_needs():
    config = flags(image_tiling="dynamic", min_patches=5, max_patches=50, image_mean=(0.5,), image_std=(1, 2, 3))
    tiling = tiling_of(config, PATCHES)
    assert tiling == Tiling("dynamic", (0, 0), 16, 32, 5, 50, 0, 0, False, (0.5, 0.5, 0.5), (1, 2, 3), 3)
    tiling = tiling_of(flags(image_tiling="fixed", max_tiles=4, use_thumbnail=True), SQUARES)
    assert (tiling.kind, tiling.tile_size, tiling.max_tiles, tiling.use_thumbnail) == ("fixed", (32, 32), 4, True)
    assert tiling_of(flags(), replace(SQUARES, image_width=48)).tile_size == (32, 48)
    grey = tiling_of(flags(image_mean=(0.5,), image_std=(0.5,)), replace(SQUARES, num_channels=1))
    assert (grey.kind, grey.mean, grey.num_channels) == ("stretch", (0.5,), 1)
    assert tiling_of(flags(image_tiling="resize"), SQUARES).kind == "stretch"
    # What only other kinds use does not matter.
    assert tiling_of(flags(max_tiles=0, min_patches=9, max_patches=1), SQUARES).kind == "stretch"


@pytest.mark.parametrize(("config", "tokens", "message"), [
    ({}, {"image_token_id": -1}, "--image-tiling: the model takes no images"),
    ({"image_tiling": "dynamic"}, {"image_size": 32}, "takes images of 32 pixels a side; use --image-tiling crop"),
    ({"image_tiling": "dynamic"}, {"image_size": 32, "image_width": 48},
     "takes images of 32 x 48 pixels; use --image-tiling crop"),
    ({"image_tiling": "dynamic"}, {"patch_size": 0}, "takes whole images, not patches"),
    ({}, {}, "--image-tiling stretch: .* any size, .*; use --image-tiling dynamic"),
    ({"image_tiling": "fixed"}, {}, "--image-tiling fixed: .* any size, .*; use --image-tiling dynamic"),
    ({}, {"patch_size": 0}, "--image-tiling stretch: .* any size, .*; give the model an image size"),
    ({"image_tiling": "dynamic", "use_thumbnail": True}, {}, "--use-thumbnail: only with .* fixed, not dynamic"),
    ({"use_thumbnail": True}, {"image_size": 32}, "--use-thumbnail: only with --image-tiling fixed, not stretch"),
    ({"image_tiling": "fixed", "max_tiles": 0}, {"image_size": 32}, "--max-tiles 0: must be at least 1"),
    ({}, {"image_size": 32, "num_channels": 2}, "grey .1 channel. or RGB .3., the encoder takes 2"),
    ({"image_mean": (0.5, 0.5)}, {"image_size": 32}, "--image-mean 0.5 0.5: .* 3 channels: need 1 or 3 values"),
    ({}, {"image_size": 32, "num_channels": 1}, "--image-mean 0.48145466 .* 1 channels: need 1 value$"),
    ({"image_tiling": "crop"}, {"image_size": 32, "image_width": 48}, "crop: makes squares, .* 32 x 48 pixels"),
    ({"min_side": 64}, {"image_size": 32}, "--min-side 64: only with --image-tiling dynamic, not stretch"),
    ({"image_tiling": "dynamic", "min_side": 520}, {}, "--min-side 520 --max-patches 1024: .* has 1089 patches"),
    ({"image_mean": (math.nan,)}, {"image_size": 32}, "--image-mean nan: must be finite"),
    ({"image_std": (math.inf,)}, {"image_size": 32}, "--image-std inf: must be finite"),
    ({"image_std": (1, 0, 1)}, {"image_size": 32}, "--image-std 1 0 1: must be positive"),
    ({"image_std": (-1,)}, {"image_size": 32}, "--image-std -1: must be positive"),
    ({"image_tiling": "dynamic", "min_patches": 0}, {}, "--min-patches 0 --max-patches 1024: need 1 <= min <= max"),
    ({"image_tiling": "dynamic", "min_patches": 9, "max_patches": 8}, {}, "--min-patches 9 --max-patches 8: need"),
    ({"image_tiling": "dynamic", "min_patches": 1, "max_patches": 3}, {}, "--max-patches 3: .* squares of 4 .32 pix"),
    ({"image_tiling": "dynamic"}, {"size_multiple": 40}, "size multiple 40 must be a multiple of its patch size 16"),
])
def test_impossible_values_are_refused_with_their_flag(config, tokens, message):
    with pytest.raises(ValueError, match=message):
        tiling_of(flags(**config), replace(PATCHES, **tokens))


@pytest.mark.parametrize("pinpoints", [ANYRES.pinpoints, ((32, 32), (128, 96), (32, 128))])
def test_anyres_makes_the_tiles_of_llava_next(pinpoints):
    from transformers import LlavaNextImageProcessor

    square = {"height": 32, "width": 32}
    theirs = LlavaNextImageProcessor(size={"shortest_edge": 32}, crop_size=square, image_mean=[0.5] * 3,
                                     image_std=[0.25] * 3, image_grid_pinpoints=[list(grid) for grid in pinpoints])
    tiling, rng, counts = replace(ANYRES, pinpoints=pinpoints), np.random.default_rng(5), set()
    for height, width in [*rng.integers(1, 400, (100, 2)), (1, 300), (300, 1), (32, 32), (64, 64)]:
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        expected = theirs(image, return_tensors="np")["pixel_values"][0]
        tiles = tile_image(image, tiling)
        assert [tile.shape[1:] for tile in tiles] == tile_sizes(height, width, tiling)
        assert len(tiles) == len(expected), (height, width)
        assert np.abs(np.stack(tiles) - expected).max() < 1e-5, (height, width)
        counts.add(len(tiles))
    assert len(counts) > 2


def test_grids_of_anyres_are_whole_tiles():
    tiling = tiling_of(flags(image_tiling="anyres"), SQUARES)
    assert tiling.pinpoints == ANYRES.pinpoints
    assert tiling_of(flags(image_tiling="anyres", image_grid_pinpoints=("32x96",)), SQUARES).pinpoints == ((32, 96),)
    for changes, message in [
        ({"image_tiling": "anyres", "image_grid_pinpoints": ("32x50",)}, "32x50: expected HEIGHTxWIDTH, multiples"),
        ({"image_tiling": "anyres", "image_grid_pinpoints": ("0x32",)}, "0x32: expected HEIGHTxWIDTH, multiples"),
        ({"image_tiling": "crop", "image_grid_pinpoints": ("32x64",)}, "only with --image-tiling anyres, not crop"),
    ]:
        with pytest.raises(ValueError, match=message):
            tiling_of(flags(**changes), SQUARES)
