"""Interfaces between the trainer, model families and data sets.

Everything here is plain data or a `Protocol`. Importing this module needs only numpy, so that planning, `--help` and
`--dry-run` are fast and run on machines without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from mimo.visual import EightBitDataProvider as EightBitDataProvider
from mimo.visual import ImageDataProvider as ImageDataProvider
from mimo.visual import ImageProcessing as ImageProcessing
from mimo.visual import ImageProcessingProvider as ImageProcessingProvider
from mimo.visual import ImageProcessorProvider as ImageProcessorProvider
from mimo.visual import ImageSize, Normalisation, Tiles, pixel_shape
from mimo.visual import TokenGridProvider as TokenGridProvider
from mimo.visual import VideoDataProvider as VideoDataProvider
from mimo.visual import VideoProcessing as VideoProcessing
from mimo.visual import VideoProcessingProvider as VideoProcessingProvider
from mimo.visual import VideoProvider as VideoProvider
from mimo.visual import VideoSize as VideoSize

if TYPE_CHECKING:
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mimo.grid.spec import GridSpec, Layout
    from mimo.weights.rules import WeightMap

LANGUAGE = "language"


@dataclass(frozen=True)
class Lane:
    """Data stream of a language data-parallel replica, as plain data.

    Lane `index` of `count` has the samples whose global index is `index` modulo `count`, so that the global batch is
    the same for every layout.

    Attributes:
        module: module that reads the lane: `language` needs tokens, an encoder needs its raw inputs.
        index, count: lane number from 0, and number of lanes (the language data-parallel size).
        seed, split: seed of the sample order; `train` or `valid`.
        sequence_multiple: a pack has to leave room for padding each of its samples to a multiple of so many tokens.
    """

    module: str
    index: int
    count: int
    seed: int
    split: str = "train"
    sequence_multiple: int = 1


@dataclass
class Sample:
    """A training sample, or a pack of several, as one side of the bridge sees it: one row of a microbatch.

    Attributes:
        key: name of the sample, unique in its data set; for a pack, the names of its samples joined by spaces.
        tokens: int64 `[T]`. Each image is ONE placeholder, which is expanded later: the id of its encoder module. So is
            each video, with the encoder's id for videos.
        target_mask: bool `[T]`; True if the token itself is a training target (an answer token).
        image_sizes: `(height, width)` in pixels of each image and a `VideoSize` for each video, in the order of the
            placeholders.
        images: `[C, height, width]` of each image, `[frames, C, height, width]` of each video, `[tiles, C, height,
            width]` of an image that the model takes as tiles; None on language lanes, which never read pixels. They are
            float32 as the encoder takes them, or uint8 with a `normalisation`.
        lengths: for a pack, the number of `tokens` of each of its samples, in order; empty for a single sample. Samples
            of a pack do not attend to each other.
        skipped: messages about bad samples that were skipped before this one, with shard and key.
        unbalanced_encoded_tokens: for a balanced pack, the tokens in the encoder's layers of the unbalanced pack in its
            place; else None.
        normalisation: how the encoder's rank normalises uint8 images, which travel as a quarter of the bytes; None for
            float32 images.
    """

    key: str
    tokens: np.ndarray
    target_mask: np.ndarray
    image_sizes: Sequence[ImageSize] = field(default_factory=list)
    images: list[np.ndarray] | None = None
    lengths: tuple[int, ...] = ()
    skipped: tuple[str, ...] = ()
    unbalanced_encoded_tokens: int | None = None
    normalisation: Normalisation | None = None


@dataclass(frozen=True)
class TokenSpec:
    """Properties of the model that a data set must know.

    Attributes:
        vocab_size: upper bound of token ids.
        image_token_id: placeholder id of an image; -1 for a text model, which takes no images.
        image_size: height of images in pixels, and their width unless `image_width` is given; 0: images of any size.
        num_channels: channels of an image.
        patch_size: pixels a side of a patch if the encoder packs patches of images of any size; otherwise 0.
        size_multiple: divides height and width of an image (patch size times pixel shuffle factor).
        image_width: width of images in pixels; 0: the same as `image_size`.
        merge_size: patches a side of a block. Packed patches come block by block, so that the patches of a block, which
            become one token, follow each other; 1: row by row.
        temporal_patch_size: frames of a patch. An image is repeated as often.
        video_token_id: placeholder id of a video; -1: the model takes no videos.
        placeholder_frames: frames of a video that one placeholder stands for; 0: all of them.
        tiles: how the model cuts an image into tiles of the size above. Then images have any size, and the pixels of
            one are those of its tiles. None: it does not.
    """

    vocab_size: int
    image_token_id: int
    image_size: int
    num_channels: int
    patch_size: int = 0
    size_multiple: int = 1
    image_width: int = 0
    merge_size: int = 1
    temporal_patch_size: int = 1
    video_token_id: int = -1
    placeholder_frames: int = 0
    tiles: Tiles | None = None

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width in pixels that the encoder takes; (0, 0) if it takes any size."""
        return self.image_size, self.image_width or self.image_size

    @property
    def packs_patches(self) -> bool:
        """Whether the encoder takes images of any size, as packed patches."""
        return self.image_size == 0 and self.patch_size > 0

    def pixel_shape(self, size: ImageSize) -> tuple[int, ...]:
        """Return the shape of the pixels of an image or a video, as `Sample.images` has them."""
        return pixel_shape(size, self.num_channels, self.tiles)


class SampleStream(Protocol):
    """An endless stream of samples that can be saved and restored at a sample boundary."""

    def __next__(self) -> Sample: ...

    def __iter__(self) -> Iterator[Sample]: ...

    def skip(self, count: int) -> None:
        """Skip `count` samples without building their images, because another encoder rank serves them."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream, as plain objects."""
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
        """Return the number of samples in one pass over `split`; None if it has no end."""
        ...

    def decode(self, config: Any, tokens: list[int]) -> str:
        """Return token ids as text, for showing greedy samples to a person."""
        ...


@runtime_checkable
class CheckedDataProvider(DataProvider, Protocol):
    """A data provider that checks its configuration before the model is built. One that reads files should do so."""

    def validate(self, config: Any, tokens: TokenSpec) -> None:
        """Raise ValueError, naming flags and values, if the configuration cannot work. No process group exists yet."""
        ...


@dataclass(frozen=True)
class DataRequest:
    """Request of a run to a data set that is read once for all ranks, as plain data.

    Attributes:
        tokens: the model's vocabulary and images.
        num_image_tokens: counts the language tokens that the encoder makes of an image of (height, width) pixels, or of
            a video whose `VideoSize` has these four values. Raises ValueError for a size that it cannot take.
        num_lanes: lanes of the run.
        micro_batch_size: rows of one lane in a microbatch.
        seq_length: most tokens of a row, after image expansion.
        seed: seed of the sample order; every lane of a run has the same.
        split: `train` or `valid`.
        sequence_multiple: a pack has to leave room for padding each of its samples to a multiple of so many tokens.
    """

    tokens: TokenSpec
    num_image_tokens: Callable[..., int]
    num_lanes: int
    micro_batch_size: int
    seq_length: int
    seed: int
    split: str = "train"
    sequence_multiple: int = 1


class LaneReader(Protocol):
    """Reads some lanes of a data set, without end. One thread uses it at a time."""

    def start(self) -> None:
        """Fork worker processes, from the main thread. Called after `load_state_dict` and before `read`."""
        ...

    def read(self, lane: int) -> Sample:
        """Return the next row of a lane with its images. Raises ValueError, naming shard and key, for a bad sample."""
        ...

    def mark(self) -> Any:
        """Note the present positions of all lanes. Called in every step, so it has to be cheap."""
        ...

    def state_dict(self, mark: Any) -> dict[int, dict[str, Any]]:
        """Return the state of each lane, as plain objects, at one of the last 6 marks. Called for every mark."""
        ...

    def load_state_dict(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Continue from the states of a checkpoint's lanes: its own, or all of them if the number of lanes has changed.

        Raises:
            ValueError: names the flags: lanes or workers have changed so that samples would be lost or repeated.
        """
        ...

    def describe(self) -> str:
        """Describe for a message about a stall what each worker is doing, and which shard it reads."""
        ...

    def close(self) -> None:
        """Stop the workers."""
        ...


@runtime_checkable
class RoutedDataProvider(Protocol):
    """A data set that is costly to read: one rank reads a lane and sends its samples to the others."""

    Config: ClassVar[type]

    def validate(self, config: Any, request: DataRequest) -> None:
        """Raise ValueError, naming flags, if the configuration cannot work. Reads no sample.

        No process group exists yet.
        """
        ...

    def reader(self, config: Any, request: DataRequest, lanes: Sequence[int]) -> LaneReader:
        """Open some lanes, which need not be consecutive."""
        ...

    def num_samples(self, config: Any, split: str) -> int | None:
        """Return the number of samples in one pass over `split`; None if it has no end."""
        ...

    def decode(self, config: Any, tokens: list[int]) -> str:
        """Return token ids as text, for showing greedy samples to a person."""
        ...


@runtime_checkable
class RecordedData(Protocol):
    """A data set that says which of its flags decide the samples of a run and their order.

    A checkpoint stores these fields, and a run that continues its data must have the same ones. Without this method,
    every field of the data set counts.
    """

    def stream_fields(self, config: Any) -> dict[str, Any]:
        """Return these fields as plain data. Called after `validate`, on the first rank.

        For a field that names a file, such as a tokenizer or a blend, the value is a digest of its content.
        """
        ...


@dataclass(frozen=True)
class Question:
    """A conversation up to where the model answers.

    Attributes:
        sample: its tokens and images, without a target.
        end_token_ids: tokens that end an answer.
        originals: the whole images of which the model takes tiles, uint8 `[height, width, channels]`; None for other
            models, whose images are whole.
    """

    sample: Sample
    end_token_ids: tuple[int, ...]
    originals: Sequence[np.ndarray] | None = None


@runtime_checkable
class QuestionDataProvider(Protocol):
    """A data set whose flags describe how a conversation is written, so that its model can be asked."""

    def question(self, config: Any, request: DataRequest, text: str, images: Sequence[tuple[str, bytes]], *,
                 thinks: bool) -> Question:
        """Return a question as the samples of training are written.

        Args:
            config: the data set's flags.
            request: the model; its other fields are not read.
            text: the question. `<image>` stands for an image; without it, the images come first.
            images: name and bytes of each image file.
            thinks: whether the answer begins with thoughts (--think).

        Raises:
            ValueError: flags, text or an image that cannot be used; the message names them.
        """
        ...

    def decode(self, config: Any, tokens: list[int]) -> str:
        """Return token ids as text."""
        ...


@dataclass(frozen=True)
class Fp8:
    """FP8 products of a module.

    Attributes:
        format: `e4m3`, or `hybrid` with e5m2 for gradients.
        recipe: `tensorwise` or `blockwise`.
        flag: the flag that asks for them.
        output_proj: whether the output layer has them, too.
    """

    format: str
    recipe: str
    flag: str
    output_proj: bool = False

    @property
    def multiple(self) -> int:
        """Number of which the rows and columns of both operands have to be multiples."""
        return {"tensorwise": 16, "blockwise": 128}[self.recipe]

    def __str__(self) -> str:
        return f"{self.flag} {self.format} ({self.recipe})"


@dataclass(frozen=True)
class BuildContext:
    """Context from which a provider builds one module on this rank.

    Attributes:
        grid: the module's grid specification (sizes only).
        groups: the module's process groups; never None on a rank that builds.
        params_dtype: dtype of parameters and activations.
        transformer_impl: `transformer_engine` or `local`.
        sequence_parallel: whether the module runs with sequence parallelism.
        pre_process, post_process: whether this rank has the module's first and its last pipeline stage.
        seq_length: most tokens of a sample.
        deterministic: whether to use only kernels that give the same bits every time.
        moe_permute_fusion, moe_router_fusion: whether Transformer Engine sorts tokens by expert, and chooses experts.
        moe_token_dispatcher_type: how tokens get to the ranks of their experts, `alltoall` or `allgather`.
        moe_shared_expert_overlap: whether shared experts run while tokens travel.
        recompute, recompute_num_layers: `none`, `selective` or `full`, and of how many layers of a stage; None: all.
        recompute_modules: parts of each layer that `selective` recomputes, by Megatron Core's names.
        cp_comm_type: how Transformer Engine's attention exchanges keys and values between context-parallel ranks.
        fp8: matrix products of the layers in FP8; None: in `params_dtype`.
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
    moe_token_dispatcher_type: str = "alltoall"
    moe_shared_expert_overlap: bool = False
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] = ("core_attn",)
    cp_comm_type: str = "p2p"
    fp8: Fp8 | None = None


@dataclass(frozen=True)
class ParameterShape:
    """A parameter, or several equal ones, for planning.

    Attributes:
        name: dotted name for messages.
        shape: global shape.
        count: number of equal parameters in the module (layers, times experts).
        split: axis of parallelism that divides it: `tp`, `expert` (ep and expert tp) or `none`.
        stage: `first`, `last`, `ends` (both of them; one copy if they are one stage) or `layer` (divided over the
            pipeline stages).
    """

    name: str
    shape: tuple[int, ...]
    count: int = 1
    split: str = "none"
    stage: str = "layer"


class ModelProvider(Protocol):
    """A model family that plugs in by name (`--model-provider NAME` or `pkg.module:attr`).

    Importing a provider must not import torch; `language_spec` and `encoder_spec` import it. A provider may have
    `hf_architectures`, the names of Hugging Face classes by which `mimo import` recognises its folders.
    """

    Config: ClassVar[type]

    def encoders(self, config: Any) -> tuple[str, ...]:
        """Return the names of the encoder modules; empty for a text model."""
        ...

    def validate(self, config: Any, layout: Layout, seq_length: int) -> None:
        """Raise ValueError, naming flags and values, for sizes that the layout cannot hold."""
        ...

    def token_spec(self, config: Any) -> TokenSpec:
        """Return the properties of the model that a data set must know."""
        ...

    def special_token_ids(self, config: Any) -> dict[str, int]:
        """Return the placeholder token id of each encoder module."""
        ...

    def num_image_tokens(self, config: Any, module: str, height: int, width: int) -> int:
        """Count the language tokens that an encoder makes of an image. Raises ValueError for a wrong size in pixels."""
        ...

    def hidden_size(self, config: Any) -> int:
        """Return the width of the language model, and so of a token on the bridge."""
        ...

    def num_experts(self, config: Any) -> int:
        """Return the number of routed experts of a MoE layer of the language model; 0 if it is dense."""
        ...

    def parameter_shapes(self, config: Any, module: str) -> list[ParameterShape]:
        """Return every parameter of a module, for `--dry-run` and grid sizing."""
        ...

    def language_spec(self, config: Any, context: BuildContext | None) -> ModuleSpec:
        """Return the Megatron spec of the language model. Its params have `config`.

        `context` is None on ranks without the language model, where only `params['config'].hidden_size` is read.
        """
        ...

    def encoder_spec(self, config: Any, module: str, context: BuildContext) -> ModuleSpec:
        """Return the Megatron spec of a `ModalitySubmodules` class whose forward returns `[tokens, hidden_size]`."""
        ...

    def weight_map(self, config: Any, module: str) -> WeightMap:
        """Return a rule for every parameter and saved buffer of a module, with its Hugging Face tensors. Imports torch.

        Import, export and refit use it.
        """
        ...

    def hf_config(self, config: Any) -> dict[str, Any]:
        """Return the model's config.json: `architectures`, `model_type` and all values that are not defaults.

        Raises ValueError if the model has no Hugging Face counterpart.
        """
        ...


@runtime_checkable
class DeepStackProvider(Protocol):
    """A model provider whose encoders send features of several depths (`mimo.model.deepstack`)."""

    def num_levels(self, config: Any, module: str) -> int:
        """Count the levels that an encoder sends besides its output. Decoder layer i adds level i to its output.

        A language model has at least as many layers as levels.
        """
        ...


@runtime_checkable
class ComparableProvider(Protocol):
    """A model provider that says which of its fields decide what a model computes.

    Weights are then accepted only if they were made with the same values. A checkpoint stores the fields, and the
    config.json of a Hugging Face folder is converted to fields.
    """

    def resolved(self, config: Any) -> Any:
        """Return the configuration with the values of its `--hf-config`, which is empty then."""
        ...

    def computed_fields(self, config: Any, module: str) -> dict[str, Any]:
        """Return the fields of a resolved configuration that decide what a module computes, at effective values.

        Fields that only affect training, such as dropout, are not among them.
        """
        ...

    def with_hf(self, config: Any, values: Mapping[str, Any], module: str) -> Any:
        """Return a resolved configuration with everything that a Hugging Face config.json says about a module.

        Args:
            config: the resolved configuration.
            values: config.json of the whole model, or of a model that consists of this module.
            module: the module.

        Raises:
            ValueError: a value that the model cannot reproduce; the message names the key.
        """
        ...

    def hf_key(self, field: str, values: Mapping[str, Any]) -> str:
        """Return the key of the config.json `values` that corresponds to a field, for messages."""
        ...


@dataclass(frozen=True)
class MegatronSource:
    """A Megatron checkpoint (`torch_dist`) that holds all modules as one model.

    Attributes:
        path: folder of checkpoints, or one checkpoint's own folder.
        flag: the flag that names it, for messages.
        prefixes: for each module, prefix of names in the module's state dict -> its replacement in the checkpoint, such
            as `{"language": {"": "language_model."}}`. The longest prefix that fits is replaced.
        ignored: regular expressions, searched in the checkpoint's keys, of tensors that the model does not use, each
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
    """A model provider whose weights may come from a Megatron checkpoint that holds all modules as one model."""

    def megatron_source(self, config: Any) -> MegatronSource | None:
        """Return the checkpoint that a run starts from; None if its flag is not given."""
        ...


@runtime_checkable
class StagedProvider(Protocol):
    """A model provider whose `Config` has a field `training_stage`, empty for none."""

    def frozen_parts(self, config: Any) -> frozenset[str]:
        """Return the parts that the configuration's stage freezes: encoder names, `projector`, `language`."""
        ...
