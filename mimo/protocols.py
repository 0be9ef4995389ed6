"""The seams: what a model, a data set and a batch look like to the trainer.

Everything here is plain data or a `Protocol`. Importing this module needs numpy and nothing heavier, so planning,
`--help` and `--dry-run` stay fast and run on machines without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mimo.grid.spec import GridSpec, Layout
    from mimo.weights.rules import WeightMap

LANGUAGE = "language"


@dataclass(frozen=True)
class Lane:
    """The data stream of one language data-parallel replica, as plain data.

    Lane `index` of `count` holds the samples whose global index is `index` modulo `count`, so the global batch is
    the same for every layout.

    Attributes:
        module: who reads: `language` wants tokens, an encoder name wants that encoder's raw inputs.
        index: lane number, 0 to count - 1.
        count: number of lanes, the language data-parallel size.
        seed: seed of the sample order.
        split: `train` or `valid`.
    """

    module: str
    index: int
    count: int
    seed: int
    split: str = "train"


@dataclass
class Sample:
    """One training sample, or a pack of several, as one side of the bridge sees it: one row of a microbatch.

    Attributes:
        key: name of the sample, unique in its data set; of a pack, those of its samples joined by a space.
        tokens: int64 `[T]`; each image is ONE placeholder, expanded later: the id of the encoder module that takes it.
        target_mask: bool `[T]`; True where the token itself is a training target (an answer token).
        image_sizes: `(height, width)` in pixels of each image, in the order of the placeholders.
        images: float32 `[C, height, width]` each; None on language lanes, which never read pixels.
        lengths: of a pack, how many of `tokens` each of its samples has, in order; empty for a single sample. Samples
            of a pack do not attend to each other.
        skipped: bad samples that were passed over on the way to this one, as messages that name shard and key.
        unbalanced_image_tokens: of a balanced pack, the image tokens that the pack in its place would have had without
            balancing; None elsewhere.
    """

    key: str
    tokens: np.ndarray
    target_mask: np.ndarray
    image_sizes: list[tuple[int, int]] = field(default_factory=list)
    images: list[np.ndarray] | None = None
    lengths: tuple[int, ...] = ()
    skipped: tuple[str, ...] = ()
    unbalanced_image_tokens: int | None = None


@dataclass(frozen=True)
class TokenSpec:
    """The model's properties that a data set must know.

    Attributes:
        vocab_size: ids are below it.
        image_token_id: placeholder id of an image; -1: a text model, which takes no images.
        image_size: pixels a side that the encoder takes, the height where images are not square; 0 where it takes any.
        num_channels: channels of an image.
        patch_size: pixels a side of a patch, where the encoder packs patches of images of any size; 0: it does not.
        size_multiple: height and width of an image are multiples of it (patch size times pixel shuffle factor).
        image_width: pixels of an image's width; 0: as `image_size`.
    """

    vocab_size: int
    image_token_id: int
    image_size: int
    num_channels: int
    patch_size: int = 0
    size_multiple: int = 1
    image_width: int = 0

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width in pixels that the encoder takes; (0, 0) where it takes any."""
        return self.image_size, self.image_width or self.image_size

    @property
    def packs_patches(self) -> bool:
        """Whether the encoder takes images of any size, as packed patches."""
        return self.image_size == 0 and self.patch_size > 0


@dataclass(frozen=True)
class ImageProcessing:
    """How the pixels of an image file become what an encoder takes, as a Hugging Face image processor describes it.

    Attributes:
        tiling: a value of --image-tiling other than auto.
        mean: mean of each channel, of pixels in 0..1.
        std: standard deviation of each channel, of pixels in 0..1.
        resample: kernel that images are resized with, always with antialiasing.
        min_patches: with dynamic tiling, fewest patches of an image; 0: not specified.
        max_patches: with dynamic tiling, most patches of an image; 0: not specified; -1: no limit.
        min_side: with dynamic tiling, pixels that the shorter side has at least where that is possible; 0: any.
        max_tiles: with fixed tiling, most tiles of an image; 0: not specified.
        use_thumbnail: with fixed tiling, whether several tiles are followed by the whole image.
        source: where this was found, for messages.
    """

    tiling: Literal["stretch", "crop", "pad", "fixed", "dynamic"]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: Literal["bicubic", "bilinear"] = "bicubic"
    min_patches: int = 0
    max_patches: int = 0
    min_side: int = 0
    max_tiles: int = 0
    use_thumbnail: bool = False
    source: str = field(default="", compare=False)


class SampleStream(Protocol):
    """An endless stream of samples that can be saved and restored at a sample boundary."""

    def __next__(self) -> Sample: ...

    def __iter__(self) -> Iterator[Sample]: ...

    def skip(self, count: int) -> None:
        """Pass over `count` samples without building their images: another encoder rank serves them."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream, of plain objects."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position that `state_dict` returned."""
        ...


class DataProvider(Protocol):
    """A data set that plugs in by name (`--dataset-provider NAME` or `pkg.module:attr`)."""

    Config: ClassVar[type]

    def stream(self, config: Any, tokens: TokenSpec, lane: Lane) -> SampleStream:
        """Open one lane. Raises ValueError, naming the flag, for a configuration that cannot work."""
        ...

    def num_samples(self, config: Any, split: str) -> int | None:
        """Samples in one pass over `split`; None where it has no end."""
        ...

    def decode(self, config: Any, tokens: list[int]) -> str:
        """Token ids as text, for greedy samples shown to a person."""
        ...


@runtime_checkable
class CheckedDataProvider(DataProvider, Protocol):
    """A data provider that checks its configuration before the model is built, as it should where it reads files."""

    def validate(self, config: Any, tokens: TokenSpec) -> None:
        """Raise ValueError, naming flags and values, for what cannot work. Called before process groups exist."""
        ...


@dataclass(frozen=True)
class DataRequest:
    """Request of a run to a data set that is read once for all ranks, as plain data.

    Attributes:
        tokens: the model's vocabulary and images.
        num_image_tokens: language tokens that the encoder makes of an image of (height, width) pixels; ValueError for a
            size it cannot take.
        num_lanes: lanes of the run.
        micro_batch_size: rows of one lane in a microbatch.
        seq_length: tokens of a row, after image expansion.
        seed: seed of the sample order; every lane of a run has the same.
        split: `train` or `valid`.
    """

    tokens: TokenSpec
    num_image_tokens: Callable[[int, int], int]
    num_lanes: int
    micro_batch_size: int
    seq_length: int
    seed: int
    split: str = "train"


class LaneReader(Protocol):
    """Reads some lanes of a data set, without end. One thread uses it at a time."""

    def start(self) -> None:
        """Start worker processes, from the main thread (they are forks). After `load_state_dict`, before `read`."""
        ...

    def read(self, lane: int) -> Sample:
        """The next row of a lane, images included. Raises ValueError naming shard and key of a sample."""
        ...

    def mark(self) -> Any:
        """Where all its lanes stand, cheap enough for every step."""
        ...

    def state_dict(self, mark: Any) -> dict[int, dict[str, Any]]:
        """State of each of its lanes, of plain objects, at one of the last 6 marks; asked for with every mark."""
        ...

    def load_state_dict(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Continue from the states of a checkpoint's lanes: its own, or all of them where the number of lanes changed.

        Raises:
            ValueError: lanes or workers changed in a way that would lose or repeat samples, naming the flags.
        """
        ...

    def describe(self) -> str:
        """Describe what it is doing now, for a message about a stall: workers, and the shard each one reads."""
        ...

    def close(self) -> None:
        """Stop its workers."""
        ...


@runtime_checkable
class RoutedDataProvider(Protocol):
    """A data set that costs something to read: one rank reads a lane and hands its samples to the others."""

    Config: ClassVar[type]

    def validate(self, config: Any, request: DataRequest) -> None:
        """Raise ValueError, naming flags, for what cannot work. Reads no sample; called before process groups exist."""
        ...

    def reader(self, config: Any, request: DataRequest, lanes: Sequence[int]) -> LaneReader:
        """Open some lanes, which need not be consecutive."""
        ...

    def num_samples(self, config: Any, split: str) -> int | None:
        """Samples in one pass over `split`; None where it has no end."""
        ...

    def decode(self, config: Any, tokens: list[int]) -> str:
        """Token ids as text, for greedy samples shown to a person."""
        ...


@runtime_checkable
class RecordedData(Protocol):
    """A data set that says which of its flags decide the samples of a run and their order.

    A checkpoint stores the fields, and a run that continues its data has to have the same. Of a data set without this
    method every field counts.
    """

    def stream_fields(self, config: Any) -> dict[str, Any]:
        """These fields as plain data. What a field names (a tokenizer, a blend) stands for its path, as a digest of its
        content. Called after `validate`, on the first rank."""
        ...


@runtime_checkable
class ImageDataProvider(Protocol):
    """A data set whose images become pixels in a way that its flags describe."""

    def with_image_processing(self, config: Any, find: Callable[[], Sequence[ImageProcessing]]) -> Any:
        """The flags with every value that is taken from the model filled in.

        Args:
            config: the data set's flags.
            find: reads what the model's processor files specify, or else returns its family's processor; empty if the
                family has none. Called only if the flags leave a value open.

        Raises:
            ValueError: what was found leaves a value open or has two values for it; or as `find`.
        """
        ...

    def image_processing(self, config: Any, tokens: TokenSpec) -> ImageProcessing:
        """How images become pixels under flags whose values are all filled in."""
        ...


@dataclass(frozen=True)
class BuildContext:
    """Context from which a provider builds one module on this rank.

    Attributes:
        grid: the module's grid specification (sizes only).
        groups: the module's process groups; never None on a rank that builds.
        params_dtype: dtype of parameters and activations.
        transformer_impl: `transformer_engine` or `local`.
        sequence_parallel: whether the module runs with sequence parallelism.
        recompute: activation recomputation, `none`, `selective` or `full`.
        pre_process: this rank holds the module's first pipeline stage.
        post_process: this rank holds the module's last pipeline stage.
        seq_length: padded tokens per sample.
        deterministic: only kernels that give the same bits every time.
        moe_permute_fusion: sort tokens by expert with Transformer Engine's kernels; False with local layers.
        moe_router_fusion: choose experts with Transformer Engine's kernels; False with local layers.
        recompute_num_layers: layers of the stage that `full` recomputes; None: all.
    """

    grid: GridSpec
    groups: ProcessGroupCollection
    params_dtype: torch.dtype
    transformer_impl: str
    sequence_parallel: bool
    recompute: str
    pre_process: bool
    post_process: bool
    seq_length: int
    deterministic: bool = False
    moe_permute_fusion: bool = False
    moe_router_fusion: bool = False
    recompute_num_layers: int | None = None


@dataclass(frozen=True)
class ParameterShape:
    """One parameter (or a stack of equal ones) for planning.

    Attributes:
        name: dotted name for messages.
        shape: global shape.
        count: how many of it the module has (layers, times experts).
        split: the axis of parallelism that divides it: `tp`, `expert` (ep and expert tp) or `none`.
        stage: `first`, `last` or `layer` (divided over the pipeline stages).
    """

    name: str
    shape: tuple[int, ...]
    count: int = 1
    split: str = "none"
    stage: str = "layer"


class ModelProvider(Protocol):
    """A model family that plugs in by name (`--model-provider NAME` or `pkg.module:attr`).

    Importing a provider must not import torch: import it inside `language_spec` and `encoder_spec`. A provider may have
    `hf_architectures`, names of Hugging Face classes whose folders `mimo import` takes for it.
    """

    Config: ClassVar[type]

    def encoders(self, config: Any) -> tuple[str, ...]:
        """Names of the encoder modules; empty for a text model."""
        ...

    def validate(self, config: Any, layout: Layout, seq_length: int) -> None:
        """Raise ValueError, naming flags and values, for sizes that the layout cannot hold."""
        ...

    def token_spec(self, config: Any) -> TokenSpec:
        """Return what a data set must know of this model."""
        ...

    def special_token_ids(self, config: Any) -> dict[str, int]:
        """Placeholder token id of each encoder module."""
        ...

    def num_image_tokens(self, config: Any, module: str, height: int, width: int) -> int:
        """Language tokens that encoder `module` makes of an image of this size (pixels); ValueError for a wrong one."""
        ...

    def hidden_size(self, config: Any) -> int:
        """Width of the language model: what crosses the bridge per token."""
        ...

    def num_experts(self, config: Any) -> int:
        """Routed experts of a MoE layer of the language model; 0 where it is dense."""
        ...

    def parameter_shapes(self, config: Any, module: str) -> list[ParameterShape]:
        """Every parameter of a module, for `--dry-run` and grid sizing."""
        ...

    def language_spec(self, config: Any, context: BuildContext | None) -> ModuleSpec:
        """Megatron spec of the language model; its params hold `config`. `context` is None on ranks without it,
        where only `params['config'].hidden_size` is read."""
        ...

    def encoder_spec(self, config: Any, module: str, context: BuildContext) -> ModuleSpec:
        """Megatron spec of a `ModalitySubmodules` class whose forward gives `[tokens, hidden_size]`."""
        ...

    def weight_map(self, config: Any, module: str) -> WeightMap:
        """Which Hugging Face tensors the module's parameters are: a rule for every parameter and saved buffer.

        Import, export and refit read it. Imports torch.
        """
        ...

    def hf_config(self, config: Any) -> dict[str, Any]:
        """The model as a Hugging Face config.json: `architectures`, `model_type` and everything that is not at its
        class's default. A provider without a Hugging Face counterpart raises ValueError, saying so."""
        ...


@runtime_checkable
class ComparableProvider(Protocol):
    """A model provider that says which of its fields decide what a model computes.

    Weights are then taken only where they were made with the same values: a checkpoint stores the fields, and the
    config.json of a Hugging Face folder is read as fields.
    """

    def resolved(self, config: Any) -> Any:
        """The configuration with the values of its `--hf-config`, which is empty then."""
        ...

    def computed_fields(self, config: Any, module: str) -> dict[str, Any]:
        """The fields of a resolved configuration that decide what a module computes, at the values that take effect.
        Fields of training, such as dropout, are not among them."""
        ...

    def with_hf(self, config: Any, values: Mapping[str, Any], module: str) -> Any:
        """A resolved configuration with everything that a Hugging Face config.json says about a module.

        Args:
            config: the configuration, resolved.
            values: config.json of the whole model, or of a model that is this module alone.
            module: the module.

        Raises:
            ValueError: a value that the model cannot reproduce; the message names the key.
        """
        ...

    def hf_key(self, field: str) -> str:
        """The key of a Hugging Face configuration that says what a field says, for messages."""
        ...


@dataclass(frozen=True)
class MegatronSource:
    """A Megatron checkpoint (`torch_dist`) that holds all modules as one model.

    Attributes:
        path: folder of checkpoints, or one checkpoint's own folder.
        flag: the flag that names it, for messages.
        prefixes: of each module, the beginning of names in the module's state dict -> what stands for it in the
            checkpoint; the longest that fits is taken. `{"language": {"": "language_model."}}`.
        ignored: tensors that the model has no use for: regular expressions, searched in the checkpoint's keys, each
            with the reason. Tensors of an optimizer are never read and need none.
    """

    path: str
    flag: str
    prefixes: Mapping[str, Mapping[str, str]]
    ignored: tuple[tuple[str, str], ...] = ()


@runtime_checkable
class SizesProvider(Protocol):
    """A model provider that can check a configuration without a layout, as `mimo import` and `mimo export` do."""

    def validate_sizes(self, config: Any) -> None:
        """Raise ValueError, naming flags and values, for sizes that no layout can hold."""
        ...


@runtime_checkable
class MegatronSourceProvider(Protocol):
    """A model provider whose weights may come from a Megatron checkpoint of the model as one."""

    def megatron_source(self, config: Any) -> MegatronSource | None:
        """The checkpoint that a run starts from; None where its flag is not given."""
        ...


@runtime_checkable
class StagedProvider(Protocol):
    """A model provider whose `Config` has a field `training_stage`, empty for none."""

    def frozen_parts(self, config: Any) -> frozenset[str]:
        """Return the parts that the configuration's stage freezes: encoder names, `projector`, `language`."""
        ...


@runtime_checkable
class ImageProcessingProvider(Protocol):
    """A model provider that knows the image processors of its family's Hugging Face folders."""

    def image_processing(self, config: Any, folder: str = "") -> ImageProcessing | None:
        """How the model's images become pixels.

        Args:
            config: the family's flags.
            folder: a Hugging Face folder or its config.json; empty: the processor of the family.

        Returns:
            None where the folder has no file that specifies it.

        Raises:
            ValueError: a file has a value that cannot be followed; the message names file, key and value.
        """
        ...

    def write_image_processing(self, config: Any, folder: Path, processing: ImageProcessing) -> str:
        """Make the files of an exported folder specify how the model was trained.

        Args:
            config: the family's flags.
            folder: of the exported config.json; it may hold files of the model that training started from.
            processing: how images became pixels in training.

        Returns:
            A line for the user where no Hugging Face processor can do the same; files that would do otherwise are
            then removed. Empty: the files are right.
        """
        ...


@runtime_checkable
class ImageProcessorProvider(Protocol):
    """A model provider that can write the image processor of its models, with which a rollout engine takes images."""

    def check_processor(self, config: Any) -> None:
        """Raise ValueError, naming flags and values, where none is known for a model."""
        ...

    def write_processor(self, config: Any, folder: Path, mean: Sequence[float], std: Sequence[float]) -> None:
        """Write processor and tokenizer as Hugging Face saves them.

        Images have the size that the encoder takes, and come out as (value / 255 - mean) / std.

        Args:
            config: the family's flags.
            folder: of the model's config.json.
            mean: of each channel.
            std: of each channel.
        """
        ...
