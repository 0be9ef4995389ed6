"""How an image becomes the tiles that an encoder takes: their sizes from its header, their pixels from its content.

Three ways, `--image-tiling`:

- resize: one tile of the encoder's size, whatever the image's aspect ratio.
- fixed: a grid of such tiles, its aspect ratio the nearest to the image's (InternVL 1.5, arXiv 2404.16821, section
  3.2), with the whole image as a last tile on request.
- dynamic: one tile of about the image's own size and aspect ratio, as encoders that pack patches take it. Never a
  thumbnail: there are as many tiles as images.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from PIL import ExifTags, Image
from PIL.TiffImagePlugin import TiffImageFile

from data.energon import Config
from mimo.protocols import TokenSpec

Size = tuple[int, int]

# How much worse a dynamic tile's change of aspect ratio is than an equal change of its area.
ASPECT_WEIGHT = 2
# EXIF 3.0, tag 0x0112: what makes a stored image upright.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class Tiling:
    """How images become tiles, as plain data that was checked by `tiling_of`.

    Attributes:
        kind: resize, fixed or dynamic; see the module's text.
        tile_size: height and width of a tile in pixels; (0, 0) with dynamic.
        patch_size: pixels a side of a patch; 0 unless dynamic.
        size_multiple: height and width of a dynamic tile are multiples of it, and it is a multiple of `patch_size`.
        min_patches: fewest patches of a dynamic tile.
        max_patches: most patches of a dynamic tile.
        max_image_size: most pixels of height and of width of a dynamic tile; 0: any.
        max_tiles: most tiles of a fixed grid, without the thumbnail.
        use_thumbnail: whether a fixed grid of several tiles is followed by the whole image.
        mean: mean of each channel, of pixels in 0..1.
        std: standard deviation of each channel, of pixels in 0..1.
        num_channels: 1 (grey) or 3 (RGB).
    """

    kind: Literal["resize", "fixed", "dynamic"]
    tile_size: Size
    patch_size: int
    size_multiple: int
    min_patches: int
    max_patches: int
    max_image_size: int
    max_tiles: int
    use_thumbnail: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_channels: int


def tiling_of(config: Config, tokens: TokenSpec) -> Tiling:
    """The tiling of a data set for a model that takes images.

    Raises:
        ValueError: naming flags and values, for what cannot work.
    """
    if tokens.image_token_id < 0:
        raise ValueError("--image-tiling: the model takes no images")
    flag = f"--image-tiling {config.image_tiling}"
    dynamic = config.image_tiling == "dynamic"
    if dynamic and not tokens.packs_patches:
        height, width = tokens.image_shape
        fixed = f"images of {height} pixels a side" if height == width else f"images of {height} x {width} pixels"
        takes = fixed if tokens.image_size else "whole images, not patches"
        raise ValueError(f"{flag}: the encoder takes {takes}; use --image-tiling resize or fixed")
    if not dynamic and tokens.image_size < 1:
        advice = "use --image-tiling dynamic" if tokens.packs_patches else "give the model an image size"
        raise ValueError(f"{flag}: the encoder takes images of any size, so there is no size to make; {advice}")
    if config.use_thumbnail and config.image_tiling != "fixed":
        raise ValueError(f"--use-thumbnail: only with --image-tiling fixed, not {config.image_tiling}")
    if config.image_tiling == "fixed" and config.max_tiles < 1:
        raise ValueError(f"--max-tiles {config.max_tiles}: must be at least 1")
    if tokens.num_channels not in (1, 3):
        raise ValueError(f"{flag}: images are grey (1 channel) or RGB (3), the encoder takes {tokens.num_channels}")
    tiling = Tiling(
        kind=config.image_tiling,
        tile_size=tokens.image_shape,
        patch_size=tokens.patch_size if dynamic else 0,
        size_multiple=tokens.size_multiple if dynamic else 1,
        min_patches=config.min_patches,
        max_patches=config.max_patches,
        max_image_size=tokens.max_image_size if dynamic else 0,
        max_tiles=config.max_tiles,
        use_thumbnail=config.use_thumbnail,
        mean=per_channel("--image-mean", config.image_mean, tokens.num_channels),
        std=per_channel("--image-std", config.image_std, tokens.num_channels),
        num_channels=tokens.num_channels,
    )
    if min(tiling.std) <= 0:
        raise ValueError(f"--image-std {_listed(config.image_std)}: must be positive")
    if dynamic:
        check_patches(tiling)
    return tiling


def _listed(values: Sequence[float]) -> str:
    return " ".join(map(str, values))


def per_channel(flag: str, values: Sequence[float], num_channels: int) -> tuple[float, ...]:
    """One value a channel. Raises ValueError, naming `flag`, for another number of values or one that is not finite."""
    if len(values) not in (1, num_channels):
        expected = "1 value" if num_channels == 1 else f"1 or {num_channels} values"
        raise ValueError(f"{flag} {_listed(values)}: the encoder takes {num_channels} channels: need {expected}")
    if not all(map(math.isfinite, values)):
        raise ValueError(f"{flag} {_listed(values)}: must be finite")
    return tuple(values) * (num_channels // len(values))


def cell_limits(tiling: Tiling) -> tuple[int, int, int]:
    """Fewest and most squares of `size_multiple` pixels a side in a dynamic tile, and most of them along a side."""
    patches = (tiling.size_multiple // tiling.patch_size) ** 2
    most = tiling.max_patches // patches
    longest = tiling.max_image_size // tiling.size_multiple if tiling.max_image_size else most
    return -(-tiling.min_patches // patches), most, min(longest, most)


def check_patches(tiling: Tiling) -> None:
    """Raise ValueError, naming flags and values, where no tile has an allowed number of patches."""
    if tiling.size_multiple < 1 or tiling.size_multiple % tiling.patch_size:
        raise ValueError(
            f"--image-tiling dynamic: the model's size multiple {tiling.size_multiple} must be a multiple of its patch "
            f"size {tiling.patch_size}"
        )
    given = f"--min-patches {tiling.min_patches} --max-patches {tiling.max_patches}"
    if not 1 <= tiling.min_patches <= tiling.max_patches:
        raise ValueError(f"{given}: need 1 <= min <= max")
    fewest, most, longest = cell_limits(tiling)
    if fewest > most:
        patches = (tiling.size_multiple // tiling.patch_size) ** 2
        raise ValueError(
            f"{given}: patches come in squares of {patches} ({tiling.size_multiple} pixels a side, of patches of "
            f"{tiling.patch_size}), and no multiple of {patches} lies within"
        )
    if not any(-(-fewest // count) <= min(most // count, longest) for count in range(1, longest + 1)):
        raise ValueError(
            f"{given}: the encoder takes images of at most {tiling.max_image_size} pixels a side, multiples of "
            f"{tiling.size_multiple}, and none of them has so many patches of {tiling.patch_size} pixels a side"
        )


def nearest_grid(rows: float, cols: float, fewest: int, most: int, longest: int) -> Size:
    """The whole numbers nearest to `rows` and `cols`, at most `longest`, whose product is within `fewest` to `most`.

    Nearest by `ASPECT_WEIGHT * log(change of aspect ratio) ** 2 + log(change of area) ** 2`.
    """
    best, best_error = (0, 0), math.inf
    start = min(math.floor(rows), longest)
    for counts in (range(start, 0, -1), range(start + 1, longest + 1)):
        for count in counts:
            taller = math.log(count / rows)
            if 4 * ASPECT_WEIGHT / (ASPECT_WEIGHT + 1) * taller**2 >= best_error:
                break  # whatever the columns: the error at `ideal`, which only grows from here
            low, high = -(-fewest // count), min(most // count, longest)
            if low > high:
                continue
            ideal = cols * math.exp((ASPECT_WEIGHT - 1) / (ASPECT_WEIGHT + 1) * taller)
            for other in (math.floor(ideal), math.ceil(ideal)):
                other = min(max(other, low), high)
                wider = math.log(other / cols)
                error = ASPECT_WEIGHT * (taller - wider) ** 2 + (taller + wider) ** 2
                if error < best_error:
                    best, best_error = (count, other), error
    assert best_error < math.inf, (rows, cols, fewest, most, longest)
    return best


def dynamic_size(height: int, width: int, tiling: Tiling) -> Size:
    """Height and width in pixels of the one tile of an image, its own wherever they are allowed."""
    fewest, most, longest = cell_limits(tiling)
    rows, cols = height / tiling.size_multiple, width / tiling.size_multiple
    scale = math.sqrt(min(max(rows * cols, fewest), most) / (rows * cols))
    if tiling.max_image_size:  # rather a smaller tile than another aspect ratio
        scale = min(scale, longest / max(rows, cols))
    rows, cols = nearest_grid(rows * scale, cols * scale, fewest, most, longest)
    return rows * tiling.size_multiple, cols * tiling.size_multiple


@lru_cache(maxsize=8)
def tile_grids(max_tiles: int) -> tuple[Size, ...]:
    """Rows and columns of every grid of at most `max_tiles`, smallest first."""
    grids = [(rows, cols) for rows in range(1, max_tiles + 1) for cols in range(1, max_tiles // rows + 1)]
    return tuple(sorted(grids, key=lambda grid: (grid[0] * grid[1], grid[1])))


def fixed_grid(height: int, width: int, tiling: Tiling) -> Size:
    """Rows and columns of tiles whose grid is the nearest to the image in width over height.

    Of equally near grids, such as 1 x 1 and 2 x 2, the largest of whose area the image fills more than half
    (`find_closest_aspect_ratio` of InternVL 1.5).
    """
    best, best_error = (1, 1), math.inf
    tile_height, tile_width = tiling.tile_size
    for rows, cols in tile_grids(tiling.max_tiles):
        error = abs(width / height - cols * tile_width / (rows * tile_height))
        fills = height * width > 0.5 * tile_height * tile_width * rows * cols
        if error < best_error or (error == best_error and fills):
            best, best_error = (rows, cols), error
    return best


def tile_sizes(height: int, width: int, tiling: Tiling) -> list[Size]:
    """The tiles of an image, from its size alone, so that packing needs no pixels.

    Args:
        height: of the upright image, in pixels: see `oriented_size`.
        width: likewise.
        tiling: from `tiling_of`.

    Returns:
        Height and width in pixels of each tile, in the order of `tile_image`.

    Raises:
        ValueError: the image has no pixels.
    """
    if height < 1 or width < 1:
        raise ValueError(f"an image of {height}x{width} pixels")
    if tiling.kind == "dynamic":
        return [dynamic_size(height, width, tiling)]
    rows, cols = fixed_grid(height, width, tiling) if tiling.kind == "fixed" else (1, 1)
    thumbnail = tiling.use_thumbnail and rows * cols > 1
    return [tiling.tile_size] * (rows * cols + thumbnail)


def orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 (upright) to 8, of an image whose pixels were not read yet.

    As far as it stands before the pixels: a PNG may have it behind them, where a header's reader does not come. Unknown
    or unreadable orientations count as upright, as in viewers.
    """
    if isinstance(image, TiffImageFile):
        return 1  # Pillow gives the upright size and turns the pixels itself
    try:
        # Not the method of PngImageFile, which reads all pixels first.
        value = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except (SyntaxError, ValueError, struct.error):
        return 1
    return value if value in UPRIGHT else 1


def oriented_size(image: Image.Image) -> Size:
    """Height and width in pixels of the upright image, from its header alone."""
    width, height = image.size
    return (width, height) if orientation(image) >= 5 else (height, width)


def to_channels(image: Image.Image, num_channels: int) -> Image.Image:
    """The image as 8-bit grey (`L`) or `RGB`, on white where it is transparent.

    Raises:
        ValueError: its pixels have no known range, or no known conversion.
    """
    if image.mode == "I" or image.mode.startswith("I;16"):
        wide = np.asarray(image).astype(np.int64)
        if wide.min() < 0 or wide.max() > 0xFFFF:
            raise ValueError(f"pixels from {wide.min()} to {wide.max()}: expected 8 or 16 bits a channel")
        if "transparency" in image.info:
            wide[wide == image.info["transparency"]] = 0xFFFF
        image = Image.fromarray(((wide + 128) // 257).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pixels, whose range is unknown: expected 8 or 16 bits a channel")
    elif image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    if num_channels == 3:
        return image.convert("RGB")
    return image if image.mode == "L" else image.convert("RGB").convert("L")


def resized(image: Image.Image, size: Size) -> Image.Image:
    """The image at a height and width; itself where it has them, so that its pixels stay what they are."""
    height, width = size
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BICUBIC)


def normalised(image: Image.Image, tiling: Tiling) -> np.ndarray:
    """Pixels as `(x / 255 - mean) / std`, float32 `[C, height, width]`."""
    pixels = np.asarray(image, np.float32).reshape(image.height, image.width, tiling.num_channels)
    pixels = pixels.transpose(2, 0, 1) / np.float32(255)
    mean, std = (np.array(values, np.float32)[:, None, None] for values in (tiling.mean, tiling.std))
    return np.ascontiguousarray((pixels - mean) / std)


def tile_image(image: Image.Image, tiling: Tiling) -> list[np.ndarray]:
    """The tiles of an image: turned upright, converted to the encoder's channels, resized, normalised.

    Args:
        image: as `PIL.Image.open` gives it, its pixels not read yet; of an animation the first frame counts.
        tiling: from `tiling_of`.

    Returns:
        float32 `[C, height, width]` each, of the sizes that `tile_sizes` tells from `oriented_size(image)`: rows of
        tiles from the top, then the thumbnail.

    Raises:
        ValueError: pixels that cannot be converted; see `to_channels`.
        OSError: what Pillow raises for pixels that it cannot decode.
    """
    turn = UPRIGHT.get(orientation(image))
    size = oriented_size(image)
    upright = image if turn is None else image.transpose(turn)
    upright = to_channels(upright, tiling.num_channels)
    if tiling.kind != "fixed":
        return [normalised(resized(upright, tile), tiling) for tile in tile_sizes(*size, tiling)]
    rows, cols = fixed_grid(*size, tiling)
    height, width = tiling.tile_size
    whole = normalised(resized(upright, (rows * height, cols * width)), tiling)
    # Copies: a view would keep the whole grid alive in every tile.
    tiles = [
        whole[:, row * height : (row + 1) * height, col * width : (col + 1) * width].copy()
        for row in range(rows)
        for col in range(cols)
    ]
    if tiling.use_thumbnail and len(tiles) > 1:
        tiles.append(normalised(resized(upright, tiling.tile_size), tiling))
    return tiles
