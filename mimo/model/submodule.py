"""The vision submodule of `MimoModel`: encoder and projector, on any pipeline stage, for any number of images.

`TiledVision` and `TiledProjector` are those of models that take an image as tiles and join their tokens, as LLaVA-NeXT.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default

from mimo.data.batch import EncoderBatch
from mimo.model.vit import ViT
from mimo.visual import Tiles


class FeatureQueue(Protocol):
    """Features that a frozen encoder has computed ahead of their microbatch.

    Attributes:
        active: whether the microbatches that run now take their features from here.
    """

    active: bool

    def take(self, side: EncoderBatch) -> torch.Tensor | None:
        """Return the prefetched result of `VisionSubmodule.run_encoder` for the next microbatch, `side`."""
        ...


class _ZeroGradient(torch.autograd.Function):
    """Pass `output` through, and give `hidden` a zero gradient.

    The pipeline schedule sends a gradient back for every tensor that a stage received, so a stage whose layers do not
    run, or run without a graph, still needs one.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        ctx.hidden_shape, ctx.hidden_options = hidden.shape, {"dtype": hidden.dtype, "device": hidden.device}
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], torch.zeros(ctx.hidden_shape, **ctx.hidden_options)


class VisionSubmodule(VisionModalitySubmodules):
    """One `ViT` and, on the last pipeline stage, its projector.

    Megatron Core's `forward(hidden_states=...)` takes the tensor as finished features and skips the encoder. Here, the
    encoder's layers run on every stage. An encoder without a trainable parameter on this stage runs in evaluation mode
    and without a graph, whether or not the projector trains.
    """

    @property
    def config(self) -> TransformerConfig:
        """Configuration of the encoder, which Megatron's DDP asks for."""
        return self.encoder.config

    @property
    def encoder(self) -> ViT:
        assert len(self.encoders) == 1, f"one encoder, not {list(self.encoders)}"
        (encoder,) = self.encoders.values()
        return encoder

    def forward(self, encoder_inputs: dict[str, Any] | None = None, hidden_states: torch.Tensor | None = None,
                features: torch.Tensor | None = None) -> torch.Tensor:
        """Run this pipeline stage.

        Args:
            encoder_inputs: `pixel_values` float `[images, channels, height, width]`, read on the first stage only. For
                images of any size see `mimo.data.batch.EncoderBatch`; later stages read all of it but the pixels.
                Empty, None or no images give an output for no images.
            hidden_states: output of the stage before; None on the first stage.
            features: result of `run_encoder` for these images, so that the encoder does not run again. The pixels of
                `encoder_inputs` are not read then.

        Returns:
            The last stage's projected features `[tokens, language hidden]`, image after image; on earlier stages
            `[seq_length, images, encoder hidden]`, packed `[patches, 1, encoder hidden]`. If gradients are on and a
            parameter of the stage is trainable, the output requires grad, even without images. If `hidden_states`
            requires grad, it always gets a gradient.

        Raises:
            ValueError: the first stage got `hidden_states`, or a later one got none.
        """
        if self.is_first_stage != (hidden_states is None):
            raise ValueError("every pipeline stage of an encoder but the first takes hidden_states; this is "
                             f"{'the first' if self.is_first_stage else 'a later'} one")
        if features is None:
            features = self.run_encoder(encoder_inputs, hidden_states)
        if features is None:
            return self._join(self.empty_output(), hidden_states)
        output = self.project(features, encoder_inputs) if self.is_last_stage else features
        return output if _is_trainable(self.encoder) else self._join(output, hidden_states)

    def run_encoder(self, encoder_inputs: dict[str, Any] | None,
                    hidden_states: torch.Tensor | None = None) -> torch.Tensor | None:
        """Run the encoder's layers of this stage without the projector, and without a graph if none of them trains.

        Args:
            encoder_inputs: see `forward`.
            hidden_states: see `forward`.

        Returns:
            The encoder's output, on the last stage `[images, tokens, features]`, packed `[1, tokens, features]`; None
            for no images.
        """
        inputs = dict(encoder_inputs or {})
        received = inputs.pop("pixel_values", None)
        if hidden_states is None:
            inputs["pixel_values"] = received
        else:
            received = hidden_states
        if received is None or received.numel() == 0:
            return None
        trainable = _is_trainable(self.encoder)
        if not trainable:
            self.encoder.eval()
        with torch.set_grad_enabled(trainable and torch.is_grad_enabled()):
            self.encoder.set_input_tensor(hidden_states)
            output: torch.Tensor = self.encoder(**inputs)
        return output

    def project(self, features: torch.Tensor, encoder_inputs: dict[str, Any] | None) -> torch.Tensor:
        """Project the encoder's output to `[tokens, language hidden]`.

        Args:
            features: result of `run_encoder`.
            encoder_inputs: see `forward`.
        """
        projected: torch.Tensor = self.project_embeddings([features.flatten(0, 1)])
        return projected

    def empty_output(self) -> torch.Tensor:
        """Return this stage's output for no images, which requires grad if gradients are on and the stage trains."""
        config = self.encoder.config
        shape: tuple[int, ...] = (self.encoder.seq_length, 0, config.hidden_size)
        if self.is_last_stage:
            shape = (0, self.input_projections[0].config.hidden_size if self.input_projections else config.hidden_size)
        empty = torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device())
        return empty.requires_grad_(torch.is_grad_enabled() and _is_trainable(self))

    def _join(self, output: torch.Tensor, hidden_states: torch.Tensor | None) -> torch.Tensor:
        """Return `output` so that `hidden_states` gets a zero gradient if the stage before waits for one."""
        if hidden_states is None or not hidden_states.requires_grad:
            return output
        return _ZeroGradient.apply(output, hidden_states)


def _is_trainable(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Return `max(x, 0) ** 2` (So et al., arXiv:2109.08668).

    Megatron Core's own function is wrapped in torch.compile, which compiles again whenever the number of tokens
    changes.
    """
    return torch.nn.functional.relu(x).square()


class Projector(MLP):
    """Two-layer projector from encoder features to language embeddings: `linear_fc2(activation(linear_fc1(norm(x))))`.

    With biases and no norm, it is that of LLaVA 1.5 (https://arxiv.org/abs/2310.03744). `linear_fc1` is column parallel
    and `linear_fc2` row parallel; input and output are replicated over tensor-parallel ranks. Megatron Core's
    `MultimodalProjector` wraps the same MLP one level deeper and adds nothing that is needed here.

    Args:
        config: `hidden_size` is the language width, `ffn_hidden_size` the inner one; `activation_func` is applied
            between the layers; `add_bias_linear` gives the biases; `normalization` and `layernorm_epsilon` belong to
            the norm.
        submodules: linear layers.
        input_size: width of the encoder's features.
        pg_collection: the encoder's process groups.
        norm: norm class of the features, called as `norm(config=, hidden_size=, eps=)`; None: no norm.
        norm_size: columns that are normalized together, a divisor of `input_size`; 0: all of them. Thus the features
            of several patches that become a token can be normalized patch by patch.
    """

    def __init__(self, config: TransformerConfig, submodules: MLPSubmodules, *, input_size: int,
                 pg_collection: ProcessGroupCollection, norm: Any = None, norm_size: int = 0) -> None:
        assert not config.sequence_parallel, "the projector's input is replicated over tensor-parallel ranks"
        super().__init__(config, submodules, input_size=input_size, tp_group=pg_collection.tp)
        self.layer_norm, self.norm_size = None, norm_size or input_size
        if norm is not None:
            self.layer_norm = norm(config=config, hidden_size=self.norm_size, eps=config.layernorm_epsilon)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Project `[tokens, input_size]` to `[tokens, hidden_size]`."""
        if self.layer_norm is not None:
            features = self.layer_norm(features.reshape(-1, self.norm_size)).view(features.shape)
        projected, bias = super().forward(features)
        return projected if bias is None else projected + bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (),
                           metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return Megatron Core's state, with the norm under the name that it has in a fused layer."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.layer_norm is not None:
            # Megatron Core's MLP gives its parts no group, so every tensor-parallel rank would save its copy of the
            # norm.
            state |= sharded_state_dict_default(self.layer_norm, f"{prefix}layer_norm.", sharded_offsets, metadata,
                                                tp_group=self.tp_group)
        apply_prefix_mapping(state, {f"{prefix}layer_norm.{kind}": f"{prefix}linear_fc1.layer_norm_{kind}"
                                     for kind in ("weight", "bias")})
        return state


class TiledProjector(Projector):
    """The projector of LLaVA with a learned token that ends each row of an image's tokens (`image_newline`).

    The token is a parameter of the projector, so that it is frozen with it and has its learning rate.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.image_newline = torch.nn.Embedding(1, self.config.hidden_size, dtype=self.config.params_dtype,
                                                device=torch.cuda.current_device())
        # transformers and LLaVA draw it with a deviation of hidden ** -0.5.
        torch.nn.init.normal_(self.image_newline.weight, std=self.config.hidden_size**-0.5)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (),
                           metadata: dict[str, Any] | None = None) -> ShardedStateDict:
        """Return the projector's state. Every tensor-parallel rank has the same token, and one saves it."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return state | sharded_state_dict_default(self.image_newline, f"{prefix}image_newline.", sharded_offsets,
                                                  metadata, tp_group=self.tp_group)


class TiledVision(VisionSubmodule):
    """A `VisionSubmodule` whose images are cut into tiles. Its output has the tokens of each image joined.

    Attributes:
        tiles: how images are cut.
    """

    def __init__(self, *args: Any, tiles: Tiles, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tiles = tiles

    def run_encoder(self, encoder_inputs: dict[str, Any] | None,
                    hidden_states: torch.Tensor | None = None) -> torch.Tensor | None:
        """Run the encoder's layers over all tiles; see `VisionSubmodule.run_encoder`."""
        of_tiles = {name: value for name, value in (encoder_inputs or {}).items() if name == "pixel_values"}
        return super().run_encoder(of_tiles, hidden_states)

    def project(self, features: torch.Tensor, encoder_inputs: dict[str, Any] | None) -> torch.Tensor:
        """Project the tokens of all tiles, and join those of each image in the order of `Tiles.token_order`."""
        assert encoder_inputs is not None, "tiles come with the sizes of their images"
        projected = super().project(features, encoder_inputs)
        newline = self.input_projections[0].image_newline.weight
        rows, first = [], 0
        for height, width in encoder_inputs["imgs_sizes"].tolist():
            order = self.tiles.token_order(height, width)
            rows.append(np.where(order < 0, len(projected), first + order))
            first += self.tiles.count(height, width) * self.tiles.num_tokens
        assert first == len(projected), (first, projected.shape)
        places = torch.from_numpy(np.concatenate(rows))
        # A copy from memory that is not page-locked could make the host wait for the device.
        places = (places.pin_memory() if projected.is_cuda else places).to(projected.device, non_blocking=True)
        return torch.cat([projected, newline.to(projected.dtype)]).index_select(0, places)
