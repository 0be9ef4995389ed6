"""Log-probs and entropy on one process: values, gradients, and that nothing that is shared is written to."""

import itertools

import pytest
import torch

from mimo.rl import logprobs as vocab
from mimo.rl.logprobs import VocabShard, entropy, log_normaliser, log_probs

SHAPES = [(6,), (3, 2)]
VOCAB, PADDED = 11, 16


def inputs(shape=(6,), dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(*shape, PADDED, generator=generator, dtype=torch.float64)).to(dtype)
    labels = torch.randint(0, VOCAB, shape, generator=generator)
    return logits.requires_grad_(), labels


def reference(logits, labels, temperature=1.0):
    wide = logits[..., :VOCAB].to(torch.float64) / temperature
    log_p = wide.log_softmax(-1)
    return log_p.gather(-1, labels[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_are_those_of_log_softmax(shape, temperature, dtype):
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    logits, labels = inputs(shape, dtype)
    shard = VocabShard(VOCAB, temperature=temperature)
    expected = reference(logits, labels, temperature)
    got = log_probs(logits, labels, shard), entropy(logits, shard)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and ours.shape == shape
        torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_have_the_dtype_of_the_logits_and_its_precision(dtype):
    logits, labels = inputs((4,), dtype)
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    shard = VocabShard(VOCAB)
    for ours, theirs in zip((log_probs(logits, labels, shard), entropy(logits, shard)), reference(logits, labels),
                            strict=True):
        (mine,) = torch.autograd.grad((ours * weights).sum(), logits)
        (true,) = torch.autograd.grad((theirs * weights).sum(), logits, retain_graph=True)
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, true.to(dtype), atol=2e-6, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("rows", [None, 1, 4])
@pytest.mark.parametrize("temperature", [1.0, 1.3])
@pytest.mark.parametrize("shared", [False, True])
def test_gradcheck_of_both_on_the_same_logits(monkeypatch, rows, temperature, shared):
    if rows is not None:  # several chunks, the last one shorter
        monkeypatch.setattr(vocab, "CHUNK_ELEMENTS", rows * PADDED)
    logits, labels = inputs()
    labels[2] = -1
    shard = VocabShard(VOCAB, temperature=temperature)

    def both(leaf):
        hidden = leaf * 1.0
        normaliser = log_normaliser(hidden, shard) if shared else None
        return log_probs(hidden, labels, shard, normaliser), entropy(hidden, shard, normaliser)

    assert torch.autograd.gradcheck(both, (logits,))


def test_a_second_backward_pass_gives_the_same():
    logits, labels = inputs()
    hidden = logits * 1.0
    before = hidden.detach().clone()
    loss = (log_probs(hidden, labels, VocabShard(VOCAB)) * entropy(hidden, VocabShard(VOCAB))).sum()
    first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and torch.equal(hidden, before) and first.abs().sum() > 0


def test_logits_that_changed_since_are_noticed():
    logits, labels = inputs()
    hidden = logits * 1.0
    loss = log_probs(hidden, labels, VocabShard(VOCAB)).sum() + entropy(hidden, VocabShard(VOCAB)).sum()
    with torch.no_grad():
        hidden.div_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_a_result_that_is_written_to_does_not_change_the_gradient():
    logits, labels = inputs()
    expected = torch.autograd.grad(entropy(logits, VocabShard(VOCAB)).sum(), logits)[0]
    result = entropy(logits, VocabShard(VOCAB))
    loss = result.sum()
    result.detach().zero_()
    assert torch.equal(torch.autograd.grad(loss, logits)[0], expected)


def test_little_is_kept_beside_the_logits():
    logits, labels = inputs((50,), torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        log_probs(logits, labels, VocabShard(VOCAB)), entropy(logits, VocabShard(VOCAB))
    others = [tensor for tensor in kept if tensor.data_ptr() != logits.data_ptr()]
    assert len(others) < len(kept)
    assert sum(tensor.numel() for tensor in others) <= 4 * labels.numel()


def test_chunks_cover_every_row_once(monkeypatch):
    for elements, num_rows, num_columns in itertools.product((1, 7, 64), (0, 1, 5), (1, 3, 200)):
        monkeypatch.setattr(vocab, "CHUNK_ELEMENTS", elements)
        parts = list(vocab.chunks(num_rows, num_columns))
        assert [row for part in parts for row in range(num_rows)[part]] == list(range(num_rows))


def test_padding_columns_take_no_part():
    logits, labels = inputs()
    with torch.no_grad():
        logits[:, VOCAB:] = 1e4
    torch.testing.assert_close(log_probs(logits, labels, VocabShard(VOCAB)), reference(logits, labels)[0])
    gradient = torch.autograd.grad(entropy(logits, VocabShard(VOCAB)).sum(), logits)[0]
    assert (gradient[:, VOCAB:] == 0).all() and gradient.isfinite().all()


def test_labels_that_are_none_and_labels_past_the_vocabulary():
    logits, labels = inputs()
    labels[0], labels[1] = -1, VOCAB
    result = log_probs(logits, labels, VocabShard(VOCAB))
    assert result[0] == 0 and result[1].isnan() and result[2:].isfinite().all()
    gradient = torch.autograd.grad(result[0], logits)[0]
    assert (gradient == 0).all()


def test_forbidden_tokens_and_large_logits():
    logits, labels = inputs()
    with torch.no_grad():
        logits += 1e5
        logits[:, 4], labels[:] = -torch.inf, 3
    shard = VocabShard(VOCAB)
    expected = (logits - 1e5).detach().requires_grad_()
    torch.testing.assert_close(log_probs(logits, labels, shard), log_probs(expected, labels, shard))
    values = entropy(logits, shard)
    assert values.isfinite().all() and torch.autograd.grad(values.sum(), logits)[0].isfinite().all()
    torch.testing.assert_close(values, entropy(expected, shard))


def test_rows_that_are_not_contiguous():
    logits, labels = inputs((3, 2))
    turned = logits.transpose(0, 1)
    assert not turned.is_contiguous()
    torch.testing.assert_close(log_probs(turned, labels.t(), VocabShard(VOCAB)), reference(logits, labels)[0].t())
    assert torch.autograd.gradcheck(lambda x: entropy(x.transpose(0, 1), VocabShard(VOCAB)), (logits,))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_none(temperature):
    with pytest.raises(ValueError, match="--temperature"):
        VocabShard(VOCAB, temperature=temperature)
