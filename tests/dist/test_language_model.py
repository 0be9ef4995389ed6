"""The padded vocabulary of the decoder: the same loss as without padding, and nothing reaches the padding."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import LANGUAGE
from providers import causal_lm
from tests.support.spawn import WorkerPool

SEQ_LENGTH = 8
SMALL = causal_lm.Config(
    num_layers=1, hidden_size=16, num_attention_heads=4, ffn_hidden_size=24, vocab_size=37,
    make_vocab_size_divisible_by=64, max_position_embeddings=16)


def outcome_of(rank: int, vocab_size: int, unit: int, tied: bool, language: GridSpec) -> dict[str, Any]:
    """Loss of each token, logits of this rank, and its gradients of the vocabulary's rows, after setting them by name.

    Rows beyond the tokens are large, so that they would be felt.
    """
    from megatron.core.transformer.spec_utils import build_module

    from mimo.grid.groups import Grids
    from mimo.platform import current_platform
    from mimo.weights.match import module_pieces
    from tests.support.global_state import initial_value
    from tests.support.provider_cases import context_of

    config = dataclasses.replace(SMALL, vocab_size=vocab_size, make_vocab_size_divisible_by=unit,
                                 untie_embeddings_and_output_weights=not tied)
    with Grids(Layout("disjoint", language.size, (), language), "gloo") as grids:
        current_platform().seed(7, tp_rank=0, ep_rank=0, expt_tp_rank=0)
        context = dataclasses.replace(context_of(grids, LANGUAGE, SEQ_LENGTH), sequence_parallel=False)
        model = build_module(causal_lm.provider.language_spec(config, context))
        pieces = {piece.name: piece for piece in module_pieces(model, grids.collections[LANGUAGE])
                  if piece.name.endswith(("word_embeddings.weight", "output_layer.weight"))}
        with torch.no_grad():
            for parameter, name in ((value, name) for name, value in model.named_parameters()):
                if name not in pieces and parameter.ndim > 1:  # split parts differ: the layers add nothing
                    parameter.zero_()
            for name, piece in pieces.items():
                rows = torch.full((piece.shape[0], config.hidden_size), 9.0)
                rows[:vocab_size] = initial_value(name, (vocab_size, config.hidden_size))
                piece.tensor.copy_(rows[piece.box.slices])
        ids = torch.arange(2 * SEQ_LENGTH).view(2, SEQ_LENGTH) * 5 % vocab_size
        inputs = {"input_ids": ids, "position_ids": torch.arange(SEQ_LENGTH).expand(2, -1), "attention_mask": None}
        loss = model(**inputs, labels=ids.roll(-1, 1))
        loss.sum().backward()
        gradients = {name: value.grad for name, value in model.named_parameters() if name in pieces}
        return {"loss": loss.detach(), "logits": model(**inputs).detach(), "gradients": gradients,
                "first_rows": {name: pieces[name].box.starts[0] for name in gradients}}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("vocab_size", "world_size"), [(37, 1), (37, 2), (20, 4)])
def test_padding_changes_no_loss_and_gets_no_gradient(pool, tied, vocab_size, world_size):
    (plain,) = pool.run(outcome_of, vocab_size, 1, tied, GridSpec(LANGUAGE), world_size=1)
    assert plain["logits"].shape == (2, SEQ_LENGTH, vocab_size)
    # With four ranks the last two hold nothing but padding.
    padded = pool.run(outcome_of, vocab_size, 64, tied, GridSpec(LANGUAGE, tp=world_size), world_size=world_size)
    logits = torch.cat([rank["logits"] for rank in padded], dim=-1)
    assert logits.shape[-1] == 64
    torch.testing.assert_close(logits[..., :vocab_size], plain["logits"], rtol=1e-6, atol=1e-6)
    assert (logits[..., vocab_size:] == torch.finfo(torch.float32).min).all()
    for rank in padded:
        torch.testing.assert_close(rank["loss"], plain["loss"], rtol=1e-6, atol=1e-6)
        for name, gradient in rank["gradients"].items():
            first = rank["first_rows"][name]
            real = max(0, min(len(gradient), vocab_size - first))
            torch.testing.assert_close(gradient[:real], plain["gradients"][name][first:first + real], rtol=1e-5,
                                       atol=1e-6)
            assert not gradient[real:].any()
    assert len(padded[0]["gradients"]) == (1 if tied else 2)


LONG, LARGE = 32, 512


def reduced(rank: int, tied: bool, sequence_parallel: bool, tp: int, chunk: int | None, fused: bool = False
            ) -> dict[str, Any]:
    """Losses, log-probs, entropies and choices of two rows, all gradients, and the elements of the largest tensor.

    Gradients are those of the losses, with half of the log-probs and entropies. With `fused`, the output layer adds its
    weight gradient to `main_grad`.
    """
    from megatron.core.transformer.spec_utils import build_module

    from mimo.grid.groups import Grids
    from mimo.model import compat
    from mimo.model.vocabulary import TokenFunction
    from mimo.platform import current_platform
    from mimo.rl.logprobs import VocabShard, entropy, log_probs
    from mimo.training.evaluate import vocabulary_argmax
    from tests.support.provider_cases import context_of

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (list, tuple)) else [result]:
                if isinstance(tensor, torch.Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return result

    language = GridSpec(LANGUAGE, tp=tp)
    config = dataclasses.replace(SMALL, vocab_size=LARGE - 3, untie_embeddings_and_output_weights=not tied,
                                 max_position_embeddings=LONG)
    with Grids(Layout("disjoint", tp, (), language), "gloo") as grids:
        current_platform().seed(7, tp_rank=rank, ep_rank=0, expt_tp_rank=0)
        context = dataclasses.replace(context_of(grids, LANGUAGE, LONG), sequence_parallel=sequence_parallel)
        model = build_module(causal_lm.provider.language_spec(config, context))
        model.logits_chunk, weight = chunk, model.shared_embedding_or_output_weight() if tied else None
        weight = model.output_layer.weight if weight is None else weight
        shard = VocabShard(config.vocab_size, grids.collections[LANGUAGE].tp, 0.7)
        if fused:
            compat.install_weight_gradients()
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
        hidden = torch.randn(LONG, 2, config.hidden_size, generator=torch.Generator().manual_seed(3))
        hidden = hidden.chunk(tp)[rank].contiguous() if sequence_parallel else hidden
        hidden.requires_grad_()
        labels = torch.arange(2 * LONG).view(2, LONG) * 7 % config.vocab_size

        def compute(logits: Any, wanted: Any) -> Any:
            chosen = vocabulary_argmax(logits, shard.group)
            return log_probs(logits, wanted, shard), entropy(logits, shard), chosen

        with Largest() as largest:
            losses = model.token_losses(labels, hidden)
            policy, entropies, chosen = model.token_values(hidden, TokenFunction(compute, (labels,)))
            (losses.sum() + 0.5 * (policy * torch.arange(LONG)).sum() + 0.5 * entropies.sum()).backward()
        gradient = weight.main_grad if fused else weight.grad
        assert not fused or weight.grad_added_to_main_grad
        return {"values": [values.detach() for values in (losses, policy, entropies, chosen)],
                "gradients": [hidden.grad, gradient], "largest": largest.elements}


@pytest.mark.parametrize(("tied", "sequence_parallel", "tp", "fused"), [
    (False, False, 1, False), (True, True, 2, False), (False, False, 2, True)])
def test_logits_of_some_tokens_at_a_time_give_the_same_values(pool, tied, sequence_parallel, tp, fused):
    whole = pool.run(reduced, tied, sequence_parallel, tp, None, world_size=tp)
    # 14 tokens are 7 of each row; the last chunk is smaller.
    parts = pool.run(reduced, tied, sequence_parallel, tp, 14, fused, world_size=tp)
    for expected, found in zip(whole, parts, strict=True):
        for values, others in zip(expected["values"][:3], found["values"][:3], strict=True):
            torch.testing.assert_close(others, values, rtol=1e-6, atol=1e-6)
        assert torch.equal(found["values"][3], expected["values"][3])
        for values, others in zip(expected["gradients"], found["gradients"], strict=True):
            assert values.abs().max() > 1e-2
            torch.testing.assert_close(others, values, rtol=1e-5, atol=1e-6 * values.abs().max().item())
        assert expected["largest"] >= 2 * LONG * LARGE // tp
        # Nothing is larger than the weight or the logits of one chunk.
        assert found["largest"] <= max(LARGE // tp * SMALL.hidden_size, 14 * LARGE // tp)


def embedded(rank: int, tp: int, fused: bool) -> dict[str, Any]:
    """Entries of two microbatches of tokens, and the gradient of the embedding after both.

    With `fused`, the layer adds it to `main_grad`.
    """
    from megatron.core.transformer.spec_utils import build_module

    from mimo.grid.groups import Grids
    from mimo.model.vocabulary import Embedding
    from mimo.platform import current_platform
    from tests.support.global_state import initial_value
    from tests.support.provider_cases import context_of

    with Grids(Layout("disjoint", tp, (), GridSpec(LANGUAGE, tp=tp)), "gloo") as grids:
        current_platform().seed(7, tp_rank=rank, ep_rank=0, expt_tp_rank=0)
        model = build_module(causal_lm.provider.language_spec(SMALL, context_of(grids, LANGUAGE, LONG)))
        layer = model.embedding.word_embeddings
        assert type(layer) is Embedding
        rows = len(layer.weight)
        with torch.no_grad():
            layer.weight.copy_(initial_value("words", (64, SMALL.hidden_size))[rank * rows:(rank + 1) * rows])
        if fused:
            layer.weight.main_grad = torch.zeros(layer.weight.shape)
            layer.weight.grad_added_to_main_grad = False
        found = []
        for seed in range(2):
            drawn = torch.Generator().manual_seed(seed)
            tokens = torch.randint(0, SMALL.vocab_size, (2, LONG), generator=drawn)
            tokens[:, 8:20] = 36  # such as the tokens of an image
            entries = model.embedding(tokens, None)
            weights = torch.randn(LONG, 2, SMALL.hidden_size, generator=drawn)
            (entries * weights).sum().backward()
            found.append(entries.detach())
        return {"entries": found, "gradient": layer.weight.main_grad if fused else layer.weight.grad,
                "is_added": getattr(layer.weight, "grad_added_to_main_grad", None)}


@pytest.mark.parametrize("tp", [1, 2])
def test_the_embedding_adds_its_gradient_to_the_buffer(pool: WorkerPool, tp: int) -> None:
    plain = pool.run(embedded, tp, False, world_size=tp)
    for expected, rank in zip(plain, pool.run(embedded, tp, True, world_size=tp), strict=True):
        assert rank["is_added"] and all(map(torch.equal, rank["entries"], expected["entries"]))
        assert expected["gradient"].abs().max() > 1.0
        torch.testing.assert_close(rank["gradient"], expected["gradient"], rtol=1e-6, atol=1e-6)


def shared_attention_errors(rank: int) -> list[str]:
    """Return the errors about what Transformer Engine's attention cannot share, as every rank raises them."""
    from mimo.config.cli import parse
    from mimo.model.build import check_shared_attention

    errors = []
    for flags, tp, cp in (("--no-bf16", 1, 2), ("--no-bf16", 1, 1), ("--cp-comm-type a2a", 2, 2),
                          ("--cp-comm-type a2a", 1, 2), ("", 2, 2)):
        sizes: Any = SimpleNamespace(num_query_groups=2, num_attention_heads=4)
        try:
            check_shared_attention(parse(flags.split()), GridSpec(LANGUAGE, tp=tp, cp=cp), sizes)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_ranks_without_the_language_model_refuse_the_same_attention(pool: WorkerPool) -> None:
    ((in_float32, by_heads),) = pool.run(shared_attention_errors, world_size=1)
    assert "--llm-cp 2 with --no-bf16: Transformer Engine has no float32 attention" in in_float32
    assert "--cp-comm-type a2a: the 1 key and value heads of a tensor-parallel rank (2 in all, --llm-tp 2)" in by_heads


def rotary_errors(rank: int) -> dict[str, float]:
    """Largest differences from transformers of the cosines and sines of positions of three axes."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
    from transformers.models.qwen3_vl import modeling_qwen3_vl

    from mimo.model.language import MultimodalRotaryEmbedding

    positions = torch.randint(0, 50, (3, 2, 40), generator=torch.Generator().manual_seed(0))
    errors = {}
    for kind, interleaved, sections in (
            (modeling_qwen2_5_vl.Qwen2_5_VLRotaryEmbedding, False, [2, 3, 3]),
            (modeling_qwen2_5_vl.Qwen2_5_VLRotaryEmbedding, False, [16, 24, 24]),
            (modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding, True, [4, 2, 2]),
            (modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding, True, [24, 20, 20])):
        name, channels = f"{kind.__name__} {sections}", 2 * sum(sections)
        config_class = (modeling_qwen3_vl.Qwen3VLTextConfig if interleaved
                        else modeling_qwen2_5_vl.Qwen2_5_VLTextConfig)
        config = config_class(
            hidden_size=4 * channels, num_attention_heads=4, head_dim=channels,
            rope_parameters={"rope_type": "default", "rope_theta": 5e3, "mrope_section": sections})
        expected = kind(config)(torch.zeros(1), positions)
        angles = MultimodalRotaryEmbedding(channels, 5e3, sections, interleaved=interleaved)(positions, sections)
        for angle, theirs in zip((angles.cos(), angles.sin()), expected, strict=True):
            errors[name] = max(errors.get(name, 0.0), float((angle[:, :, 0].transpose(0, 1) - theirs).abs().max()))
    return errors


def test_rotary_positions_of_three_axes_are_those_of_transformers(pool: WorkerPool) -> None:
    pytest.importorskip("transformers")
    (errors,) = pool.run(rotary_errors, world_size=1)
    assert len(errors) == 4 and max(errors.values()) < 1e-5, errors
