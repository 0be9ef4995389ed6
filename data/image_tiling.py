"""Turn an image into the tiles that an encoder takes: their sizes from its header, their pixels from its content.

The values of `--image-tiling`:

- stretch: one tile of the encoder's size, whatever the image's aspect ratio (Hugging Face's SiglipImageProcessor).
- crop: the shorter side is resized to the encoder's size, then the centre is cut out (CLIPImageProcessor).
- pad: borders in the mean colour make the image square before it is resized (LlavaImageProcessor with `do_pad`).
- fixed: a grid of such tiles, its aspect ratio the nearest to the image's (InternVL 1.5, arXiv 2404.16821, section
  3.2), with the whole image as a last tile on request.
- anyres: the whole image as one tile (stretched), then a grid of tiles that hold it in its own aspect ratio, with black
  borders (LlavaNextImageProcessor). The family llava_next takes all tiles of an image as one item with one placeholder,
  drops the tokens of the borders and adds a learned token after each row. In other families every tile has a
  placeholder, and the tokens are those of the tiles in this order, rows of tiles from the top.
- dynamic: one tile of about the image's own size and aspect ratio, for encoders that pack patches. There is no
  thumbnail, so there are as many tiles as images. vLLM serves Nemotron models with the same sizes
  (`DynamicResolutionImageTiler`), which are those of Megatron's `DynamicResolutionImageTilingStrategy`.
- smart_resize: the same with the sizes of the Qwen-VL families (`smart_resize` of Hugging Face's
  Qwen2VLImageProcessor), which keep the aspect ratio between limits of pixels.

stretch, crop, pad, anyres and smart_resize give the pixels of Hugging Face's image processors with their default
backend, torchvision. Their PIL backend rounds once more and differs by up to 2 of 255 in a few pixels of a thousand.
fixed and dynamic resize with PIL, as InternVL and Megatron do.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from PIL import ExifTags, Image
from PIL.TiffImagePlugin import TiffImageFile

from data.energon.provider import Config
from mimo.protocols import TokenSpec
from mimo.visual import Normalisation, Tiles, best_pinpoint

Size = tuple[int, int]

# EXIF orientation (EXIF 3.0, tag 0x0112) -> operation that makes a stored image upright.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


# Kinds that make one tile of about the image's own size.
ANY_SIZE = ("dynamic", "smart_resize")
# Rows and columns of the grids of LLaVA-NeXT's published models.
PINPOINT_GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
# Largest ratio of an image's sides that `smart_resize` takes.
MAX_ASPECT_RATIO = 200


@dataclass(frozen=True)
class Tiling:
    """How images become tiles, as plain data that `tiling_of` has checked.

    Attributes:
        kind: stretch, crop, pad, fixed, anyres, dynamic or smart_resize; see the docstring of this module.
        tile_size: height and width of a tile in pixels; (0, 0) with tiles of any size.
        patch_size: pixels a side of a patch; 0 unless tiles have any size.
        size_multiple: height and width of a tile of any size are multiples of it, and it is a multiple of `patch_size`.
        min_patches: fewest patches of a tile of any size.
        max_patches: most patches of a tile of any size.
        min_side: least pixels of the shorter side of a dynamic tile, as far as `max_patches` allows; 0 for any.
        max_tiles: most tiles of a fixed grid, without the thumbnail.
        use_thumbnail: whether a fixed grid of several tiles is followed by the whole image.
        mean: mean of each channel, of pixels in 0..1.
        std: standard deviation of each channel, of pixels in 0..1.
        num_channels: 1 (grey) or 3 (RGB).
        resample: kernel that images are resized with.
        max_pixels: most pixels of an image while it is resized or padded.
        pinpoints: height and width in pixels of each grid of tiles that anyres may use.
        is_joined: whether the tiles of an image are one item for the model (`TokenSpec.tiles`).
    """

    kind: Literal["stretch", "crop", "pad", "fixed", "anyres", "dynamic", "smart_resize"]
    tile_size: Size
    patch_size: int
    size_multiple: int
    min_patches: int
    max_patches: int
    min_side: int
    max_tiles: int
    use_thumbnail: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_channels: int
    resample: Literal["bicubic", "bilinear"] = "bicubic"
    max_pixels: int = 100_000_000
    pinpoints: tuple[Size, ...] = ()
    is_joined: bool = False


def tiling_of(config: Config, tokens: TokenSpec) -> Tiling:
    """Return the tiling of a data set for a model that takes images.

    Raises:
        ValueError: the flags cannot work, or were not filled in from the model (`mimo.config.cli.parse` does so); the
            message names flags and values.
    """
    if tokens.image_token_id < 0:
        raise ValueError("--image-tiling: the model takes no images")
    kind, resample = config.image_tiling, config.image_resample
    flag = f"--image-tiling {kind}"
    if kind in ("auto", "resize") or resample == "auto" or not config.image_mean or not config.image_std:
        raise ValueError(f"{flag} --image-resample {resample} --image-mean {_listed(config.image_mean)} --image-std "
                         f"{_listed(config.image_std)}: not filled in from the model")
    dynamic = kind in ANY_SIZE
    if dynamic and not tokens.packs_patches:
        height, width = tokens.image_shape
        fixed = f"images of {height} pixels a side" if height == width else f"images of {height} x {width} pixels"
        takes = fixed if tokens.image_size else "whole images, not patches"
        raise ValueError(f"{flag}: the encoder takes {takes}; use --image-tiling crop, stretch, pad, fixed or anyres")
    if not dynamic and tokens.image_size < 1:
        advice = ("use --image-tiling dynamic or smart_resize" if tokens.packs_patches
                  else "give the model an image size")
        raise ValueError(f"{flag}: the encoder takes images of any size, so there is no size to make; {advice}")
    if kind in ("crop", "pad") and tokens.image_shape[0] != tokens.image_shape[1]:
        raise ValueError(f"{flag}: makes squares, but the encoder takes images of {tokens.image_shape[0]} x "
                         f"{tokens.image_shape[1]} pixels; use --image-tiling stretch, fixed or anyres")
    if config.use_thumbnail and kind != "fixed":
        raise ValueError(f"--use-thumbnail: only with --image-tiling fixed, not {kind}")
    max_tiles = config.max_tiles or 0
    if kind == "fixed" and max_tiles < 1:
        raise ValueError(f"--max-tiles {config.max_tiles}: must be at least 1")
    if config.min_side and kind != "dynamic":
        raise ValueError(f"--min-side {config.min_side}: only with --image-tiling dynamic, not {kind}")
    if tokens.num_channels not in (1, 3):
        raise ValueError(f"{flag}: images are grey (1 channel) or RGB (3), the encoder takes {tokens.num_channels}")
    tiling = Tiling(
        kind=kind,
        tile_size=tokens.image_shape,
        patch_size=tokens.patch_size if dynamic else 0,
        size_multiple=tokens.size_multiple if dynamic else 1,
        min_patches=config.min_patches or 0,
        max_patches=config.max_patches or 0,
        min_side=config.min_side,
        max_tiles=max_tiles,
        use_thumbnail=config.use_thumbnail,
        mean=per_channel("--image-mean", config.image_mean, tokens.num_channels),
        std=per_channel("--image-std", config.image_std, tokens.num_channels),
        num_channels=tokens.num_channels,
        resample=resample,
        max_pixels=config.max_image_pixels,
        pinpoints=pinpoints_of(kind, config.image_grid_pinpoints, tokens.image_shape, tokens.tiles),
        is_joined=tokens.tiles is not None,
    )
    if min(tiling.std) <= 0:
        raise ValueError(f"--image-std {_listed(config.image_std)}: must be positive")
    if dynamic:
        check_patches(tiling)
    return tiling


def pinpoints_of(kind: str, given: Sequence[str], tile_size: Size, model: Tiles | None = None) -> tuple[Size, ...]:
    """Return the grids of `--image-grid-pinpoints` in pixels, or those of the model.

    Raises ValueError unless tiles fill them, and if the model has others.
    """
    if model is not None:
        if kind != "anyres":
            raise ValueError(f"--image-tiling {kind}: the model joins the tiles of --image-tiling anyres, so it takes "
                             "no others")
        own = [f"{height}x{width}" for height, width in model.pinpoints]
        if given and list(given) != own:
            raise ValueError(f"--image-grid-pinpoints {_listed(given)}: the model has {_listed(own)} "
                             "(--vision-image-grid-pinpoints); leave the flag out")
        return model.pinpoints
    if kind != "anyres":
        if given:
            raise ValueError(f"--image-grid-pinpoints {_listed(given)}: only with --image-tiling anyres, not {kind}")
        return ()
    height, width = tile_size
    if not given:
        return tuple((rows * height, columns * width) for rows, columns in PINPOINT_GRIDS)
    found = [re.fullmatch(r"(\d+)x(\d+)", text) for text in given]
    for text, match in zip(given, found, strict=True):
        if match is None or not all(int(side) and not int(side) % tile
                                    for side, tile in zip(match.groups(), tile_size, strict=True)):
            raise ValueError(f"--image-grid-pinpoints {text}: expected HEIGHTxWIDTH, multiples of {height} x "
                             f"{width} pixels, such as {height}x{2 * width}")
    return tuple((int(match[1]), int(match[2])) for match in found if match is not None)


def _listed(values: Sequence[object]) -> str:
    return " ".join(map(str, values))


def per_channel(flag: str, values: Sequence[float], num_channels: int) -> tuple[float, ...]:
    """Return one value for each channel.

    Raises ValueError, with `flag`, for another number of values or infinite ones.
    """
    if len(values) not in (1, num_channels):
        expected = "1 value" if num_channels == 1 else f"1 or {num_channels} values"
        raise ValueError(f"{flag} {_listed(values)}: the encoder takes {num_channels} channels: need {expected}")
    if not all(map(math.isfinite, values)):
        raise ValueError(f"{flag} {_listed(values)}: must be finite")
    return tuple(values) * (num_channels // len(values))


def check_patches(tiling: Tiling) -> None:
    """Raise ValueError, with flags and values, if limits of dynamic tiles contradict each other."""
    if tiling.size_multiple < 1 or tiling.size_multiple % tiling.patch_size:
        raise ValueError(
            f"--image-tiling {tiling.kind}: the model's size multiple {tiling.size_multiple} must be a multiple of its "
            f"patch size {tiling.patch_size}"
        )
    given = f"--min-patches {tiling.min_patches} --max-patches {tiling.max_patches}"
    if not 1 <= tiling.min_patches <= tiling.max_patches:
        raise ValueError(f"{given}: need 1 <= min <= max")
    least = (tiling.size_multiple // tiling.patch_size) ** 2
    if tiling.max_patches < least:
        raise ValueError(
            f"{given}: patches come in squares of {least} ({tiling.size_multiple} pixels a side, of patches of "
            f"{tiling.patch_size}), so --max-patches must be at least {least}"
        )
    shorter = math.ceil(tiling.min_side / tiling.patch_size)
    if tiling.min_side < 0 or shorter**2 > tiling.max_patches:
        raise ValueError(f"--min-side {tiling.min_side} --max-patches {tiling.max_patches}: must not be negative, and "
                         f"an image with two such sides has {shorter**2} patches of {tiling.patch_size} pixels")


def dynamic_size(height: int, width: int, tiling: Tiling) -> Size:
    """Return height and width in pixels of the dynamic tile of an image.

    This repeats vLLM's `DynamicResolutionImageTiler.process_media` and, with `min_side`, Megatron's
    `DynamicResolutionImageTilingStrategy` operation by operation, because floating-point rounding decides some sizes.

    Raises:
        ValueError: the image is so narrow that it would have no patch.
    """
    patch, most = tiling.patch_size, tiling.max_patches
    rows, cols = round(height / patch + 0.5), round(width / patch + 0.5)
    factor = min(math.sqrt(most / (rows * cols)), 1.0)
    rows, cols = math.floor(factor * rows), math.floor(factor * cols)
    if rows < 1 or cols < 1:
        raise ValueError(f"an image of {height} x {width} pixels (height x width) is too narrow: reduced to "
                         f"--max-patches {most}, its shorter side has less than one patch of {patch} pixels")
    if most > tiling.min_patches > rows * cols:
        factor = math.sqrt(tiling.min_patches / (rows * cols))
        rows, cols = math.ceil(factor * rows), math.ceil(factor * cols)
    if min(rows, cols) * patch < tiling.min_side:
        factor = tiling.min_side / (min(rows, cols) * patch)
        is_tall = cols <= rows
        rows, cols = math.ceil(factor * rows), math.ceil(factor * cols)
        if rows * cols > most:
            rows, cols = (most // cols, cols) if is_tall else (rows, most // rows)
    divisor = tiling.size_multiple // patch
    rows = _divisible(rows, divisor, most // cols)
    cols = _divisible(cols, divisor, most // rows)
    return rows * patch, cols * patch


def smart_size(height: int, width: int, factor: int, least: int, most: int) -> Size:
    """Return height and width in pixels of an image as `smart_resize` of transformers does, operation by operation.

    Args:
        height: height of the image in pixels.
        width: its width.
        factor: divides the sides of the result.
        least: fewest pixels.
        most: most pixels.

    Raises:
        ValueError: the image is too narrow.
    """
    check_ratio(height, width)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > most:
        scale = math.sqrt((height * width) / most)
        rows, columns = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
    elif rows * columns < least:
        scale = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * scale / factor) * factor for side in (height, width))
    return rows, columns


def check_ratio(height: int, width: int) -> None:
    """Raise ValueError for an image whose sides `smart_resize` refuses."""
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise ValueError(f"an image of {height} x {width} pixels (height x width) is too narrow: one side may be at "
                         f"most {MAX_ASPECT_RATIO} times the other")


def _divisible(count: int, divisor: int, most: int) -> int:
    """Return the next multiple of `divisor` if it is at most `most`, else the one before, but at least one."""
    rest = count % divisor
    if not rest:
        return count
    return count + divisor - rest if count + divisor - rest <= most else max(divisor, count - rest)


@lru_cache(maxsize=8)
def tile_grids(max_tiles: int) -> tuple[Size, ...]:
    """Return rows and columns of every grid of at most `max_tiles`, smallest first."""
    grids = [(rows, cols) for rows in range(1, max_tiles + 1) for cols in range(1, max_tiles // rows + 1)]
    return tuple(sorted(grids, key=lambda grid: (grid[0] * grid[1], grid[1])))


def fixed_grid(height: int, width: int, tiling: Tiling) -> Size:
    """Return rows and columns of the grid of tiles whose aspect ratio is nearest to the image's.

    If several grids are equally near, such as 1 x 1 and 2 x 2, the largest wins of whose area the image fills more than
    half (`find_closest_aspect_ratio` of InternVL 1.5).
    """
    best, best_error = (1, 1), math.inf
    tile_height, tile_width = tiling.tile_size
    for rows, cols in tile_grids(tiling.max_tiles):
        error = abs(width / height - cols * tile_width / (rows * tile_height))
        fills = height * width > 0.5 * tile_height * tile_width * rows * cols
        if error < best_error or (error == best_error and fills):
            best, best_error = (rows, cols), error
    return best


def padded_into(pixels: np.ndarray, size: Size, resample: str) -> np.ndarray:
    """Resize an image into a rectangle in its own aspect ratio, in the middle of black borders."""
    (height, width), (rows, columns) = pixels.shape[:2], size
    if columns / width < rows / height:
        inner = min(math.ceil(height * (columns / width)), rows), columns
    else:
        inner = rows, min(math.ceil(width * (rows / height)), columns)
    canvas = np.zeros((*size, pixels.shape[2]), np.uint8)
    top, left = (rows - inner[0]) // 2, (columns - inner[1]) // 2
    canvas[top : top + inner[0], left : left + inner[1]] = torch_resized(pixels, inner, resample)
    return canvas


def tile_sizes(height: int, width: int, tiling: Tiling) -> list[Size]:
    """Return the tiles of an image from its size alone, so that packing needs no pixels.

    Args:
        height: height of the upright image in pixels; see `oriented_size`.
        width: its width.
        tiling: a result of `tiling_of`.

    Returns:
        Height and width in pixels of each tile, in the order of `tile_image`; of the image itself if its tiles are one
        item.

    Raises:
        ValueError: the image has no pixels, or a shape that cannot be used.
    """
    if height < 1 or width < 1:
        raise ValueError(f"an image of {height}x{width} pixels")
    if tiling.kind == "dynamic":
        return [dynamic_size(height, width, tiling)]
    if tiling.kind == "smart_resize":
        area = tiling.patch_size**2
        return [smart_size(height, width, tiling.size_multiple, tiling.min_patches * area, tiling.max_patches * area)]
    if tiling.kind in ("crop", "pad"):
        between = covering_size(height, width, tiling.tile_size[0]) if tiling.kind == "crop" else (
            max(height, width), max(height, width))
        if between[0] * between[1] > tiling.max_pixels:
            raise ValueError(f"an image of {height} x {width} pixels (height x width) is too narrow: --image-tiling "
                             f"{tiling.kind} makes it {between[0]} x {between[1]} on the way, more than "
                             f"--max-image-pixels {tiling.max_pixels}")
    if tiling.is_joined:
        return [(height, width)]
    if tiling.kind == "anyres":
        rows, cols = best_pinpoint(height, width, tiling.pinpoints)
        return [tiling.tile_size] * (1 + rows // tiling.tile_size[0] * (cols // tiling.tile_size[1]))
    rows, cols = fixed_grid(height, width, tiling) if tiling.kind == "fixed" else (1, 1)
    thumbnail = tiling.use_thumbnail and rows * cols > 1
    return [tiling.tile_size] * (rows * cols + thumbnail)


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 (upright) to 8, of an image whose pixels have not been read.

    Only an orientation before the pixels counts. A PNG may have it after them, where a reader of headers does not look.
    Unknown or unreadable orientations count as upright, as in viewers.
    """
    if isinstance(image, TiffImageFile):
        return 1  # Pillow returns the upright size and turns the pixels itself
    try:
        # The method of PngImageFile would read all pixels first.
        value = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except (SyntaxError, ValueError, struct.error):
        return 1
    return value if value in UPRIGHT else 1


def oriented_size(image: Image.Image) -> Size:
    """Return height and width in pixels of the upright image, from its header alone."""
    width, height = image.size
    return (width, height) if orientation(image) >= 5 else (height, width)


def to_channels(image: Image.Image, num_channels: int) -> Image.Image:
    """Convert an image to 8-bit grey (`L`) or `RGB`, on white where it is transparent.

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


def covering_size(height: int, width: int, side: int) -> Size:
    """Return height and width of an image after its shorter side is resized to `side`. The longer is rounded down."""
    return (side, int(side * width / height)) if height <= width else (int(side * height / width), side)


def square_tile(image: Image.Image, tiling: Tiling) -> np.ndarray:
    """Return the tile of an image that is stretched, cropped or padded, uint8 `[height, width, channels]`.

    This repeats the Hugging Face processors named above operation by operation, with torchvision as their backend.
    """
    pixels = np.asarray(image).reshape(image.height, image.width, tiling.num_channels)
    height, width = tiling.tile_size
    if tiling.kind == "pad" and image.height != image.width:
        side = max(image.height, image.width)
        square = np.empty((side, side, tiling.num_channels), np.uint8)
        square[:] = [int(mean * 255) for mean in tiling.mean]
        top, left = (side - image.height) // 2, (side - image.width) // 2
        square[top : top + image.height, left : left + image.width] = pixels
        pixels = square
    if tiling.kind == "crop":
        whole = torch_resized(pixels, covering_size(image.height, image.width, height), tiling.resample)
        top, left = (whole.shape[0] - height) // 2, (whole.shape[1] - width) // 2
        return whole[top : top + height, left : left + width]
    return torch_resized(pixels, (height, width), tiling.resample)


def torch_resized(pixels: np.ndarray, size: Size, resample: str) -> np.ndarray:
    """Resize uint8 `[height, width, channels]` with antialiasing, as `torchvision.transforms.v2` does."""
    if pixels.shape[:2] == size:
        return pixels
    import torch  # programs that only need sizes do not need it

    image = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None]
    image = torch.nn.functional.interpolate(image, size, mode=resample, align_corners=False, antialias=True)
    return image[0].permute(1, 2, 0).numpy()


def resized(image: Image.Image, size: Size, resample: str) -> Image.Image:
    """Resize an image. If it has that size already, it is returned unchanged."""
    height, width = size
    return image if image.size == (width, height) else image.resize(
        (width, height), Image.Resampling[resample.upper()])


def normalised(image: Image.Image | np.ndarray, tiling: Tiling) -> np.ndarray:
    """Normalise 8-bit pixels to `(x / 255 - mean) / std`, float32 `[C, height, width]`."""
    pixels = np.asarray(image)
    return Normalisation(tiling.mean, tiling.std).apply(pixels.reshape(*pixels.shape[:2], tiling.num_channels))


def cut(whole: np.ndarray, size: Size) -> list[np.ndarray]:
    """Cut a grid, `[rows * height, columns * width, C]`, into its tiles, row by row."""
    height, width = size
    return [whole[top : top + height, left : left + width]
            for top in range(0, whole.shape[0], height) for left in range(0, whole.shape[1], width)]


def upright_image(image: Image.Image, num_channels: int) -> Image.Image:
    """Turn an image whose pixels have not been read upright, and convert it to an encoder's channels.

    Raises:
        ValueError: the pixels cannot be converted; see `to_channels`.
    """
    turn = UPRIGHT.get(orientation(image))
    return to_channels(image if turn is None else image.transpose(turn), num_channels)


def tile_pictures(image: Image.Image, tiling: Tiling) -> list[np.ndarray]:
    """Make the tiles of an image: turn it upright, convert it to the encoder's channels, resize it.

    Prompts of reinforcement learning have these as their pictures, because the rollout engine normalises them itself.

    Args:
        image: `PIL.Image.open` whose pixels have not been read; of an animation only the first frame counts.
        tiling: a result of `tiling_of`.

    Returns:
        uint8 `[height, width, C]` each, with the sizes that `tile_sizes` returns for `oriented_size(image)`: rows of
        tiles from the top, then the thumbnail; with anyres the whole image, then rows of tiles.

    Raises:
        ValueError: the pixels cannot be converted; see `to_channels`.
        OSError: Pillow cannot decode the pixels.
    """
    size = oriented_size(image)
    upright = upright_image(image, tiling.num_channels)
    sizes = tile_sizes(*size, tiling)

    def to_array(resized_image: Image.Image) -> np.ndarray:
        return np.asarray(resized_image).reshape(resized_image.height, resized_image.width, tiling.num_channels)

    if tiling.kind == "dynamic":
        return [to_array(resized(upright, sizes[0], tiling.resample))]
    if tiling.kind == "smart_resize":
        return [torch_resized(to_array(upright), sizes[0], tiling.resample)]
    if tiling.kind == "anyres":
        grid = padded_into(to_array(upright), best_pinpoint(*size, tiling.pinpoints), tiling.resample)
        return [torch_resized(to_array(upright), tiling.tile_size, tiling.resample), *cut(grid, tiling.tile_size)]
    if tiling.kind != "fixed":
        return [square_tile(upright, tiling)]
    rows, cols = fixed_grid(*size, tiling)
    height, width = tiling.tile_size
    whole = to_array(resized(upright, (rows * height, cols * width), tiling.resample))
    tiles = cut(whole, tiling.tile_size)
    if tiling.use_thumbnail and len(tiles) > 1:
        tiles.append(to_array(resized(upright, tiling.tile_size, tiling.resample)))
    return tiles


def tile_image(image: Image.Image, tiling: Tiling) -> list[np.ndarray]:
    """Make the tiles of an image and normalise them, float32 `[C, height, width]` each; see `tile_pictures`."""
    return [normalised(tile, tiling) for tile in tile_pictures(image, tiling)]
