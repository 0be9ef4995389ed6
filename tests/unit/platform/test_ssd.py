"""Convolution and scan of a Mamba-2 layer against loops over tokens."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo.model.torch_layers.mamba import NO_LIMIT, causal_conv1d, split_conv1d_scan, ssd_scan

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
HEADS, CHANNELS, STATE = 4, 3, 5


def sequences(lengths):
    """Index of each token's sequence, `[tokens]`."""
    return torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))


def recurrence(x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=NO_LIMIT, seq_idx=None,
               initial_states=None):
    """The definition, token by token: output and last state."""
    rows, length, heads, channels = x.shape
    B, C = (part.repeat_interleave(heads // B.shape[2], 2) for part in (B, C))
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = F.softplus(dt)
    dt = dt.clamp(*dt_limit)
    state = torch.zeros(rows, heads, channels, B.shape[-1], dtype=x.dtype)
    if initial_states is not None:
        state = initial_states
    out = []
    for t in range(length):
        if seq_idx is not None and t > 0:
            state = torch.where((seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None], state, 0)
        state = state * torch.exp(dt[:, t] * A)[..., None, None]
        state = state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        out.append((state * C[:, t, :, None]).sum(-1))
    out = torch.stack(out, 1)
    if D is not None:
        out = out + x * (D if D.dim() == 2 else D[:, None])
    if z is not None:
        out = out * z * torch.sigmoid(z)
    return out, state


def inputs(length, rows=2, groups=2, options=(), dtype=torch.float64):
    """Random arguments of the scan, those named in `options` among them."""
    torch.manual_seed(0)
    shapes = {"x": (rows, length, HEADS, CHANNELS), "dt": (rows, length, HEADS), "A": (HEADS,),
              "B": (rows, length, groups, STATE), "C": (rows, length, groups, STATE), "D": (HEADS,),
              "z": (rows, length, HEADS, CHANNELS), "dt_bias": (HEADS,),
              "initial_states": (rows, HEADS, CHANNELS, STATE)}
    made = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    made["A"] = -made["A"].exp()
    if "dt_bias" not in options:
        made["dt"] = made["dt"].abs()  # with the bias goes softplus, which makes them positive
    wanted = {"x", "dt", "A", "B", "C", *options}
    return {name: value.requires_grad_() for name, value in made.items() if name in wanted}


def check_scan(arguments, chunk_size, **rest):
    """Output, last state and the gradients of every input are those of the recurrence."""
    expected, expected_state = recurrence(**arguments, **rest)
    out, state = ssd_scan(**arguments, chunk_size=chunk_size, return_final_states=True, **rest)
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(state, expected_state, **CLOSE)
    gradients = torch.randn_like(expected), torch.randn_like(expected_state)
    theirs = torch.autograd.grad((expected, expected_state), list(arguments.values()), gradients)
    ours = torch.autograd.grad((out, state), list(arguments.values()), gradients)
    for name, our, their in zip(arguments, ours, theirs, strict=True):
        torch.testing.assert_close(our, their, **CLOSE, msg=lambda text, name=name: f"gradient of {name}: {text}")


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 16, 40])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_scan_of_any_chunk_size_and_number_of_groups(groups, chunk_size):
    check_scan(inputs(16, groups=groups), chunk_size)


@pytest.mark.parametrize("options", [("D",), ("z",), ("dt_bias",), ("initial_states",),
                                     ("D", "z", "dt_bias", "initial_states")])
def test_scan_with_options(options):
    check_scan(inputs(11, options=options), 4, dt_softplus="dt_bias" in options)


def test_scan_with_limits_of_the_step_and_a_skip_for_every_channel():
    arguments = inputs(9, options=("dt_bias", "D"))
    arguments["D"] = torch.randn(HEADS, CHANNELS, dtype=torch.float64, requires_grad=True)
    check_scan(arguments, 4, dt_softplus=True, dt_limit=(0.4, 0.9))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(1, 12), st.booleans())
def test_no_state_passes_between_packed_sequences(lengths, chunk_size, initial):
    seq_idx = torch.stack([sequences(lengths), sequences(lengths[::-1])])
    check_scan(inputs(sum(lengths), options=("initial_states",) if initial else ()), chunk_size, seq_idx=seq_idx)


def test_an_index_that_comes_back_is_another_sequence():
    seq_idx = torch.tensor([[0, 0, 1, 0, 0, 0], [3, 3, 3, 2, 3, 3]])
    for chunk_size in (2, 3, 6):
        check_scan(inputs(6), chunk_size, seq_idx=seq_idx)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    weight = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(causal_conv1d(x, weight, None, seq_idx), convolution(x, weight, None, seq_idx), **CLOSE)


def test_half_precision_is_computed_in_float32():
    exact = inputs(32, options=("D", "z", "dt_bias"), dtype=torch.float32)
    half = {name: value.detach().bfloat16() for name, value in exact.items()}
    half["A"] = exact["A"].detach()
    expected = ssd_scan(**{name: value.float() for name, value in half.items()}, chunk_size=8, dt_softplus=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which would cast the matrix products
        out, state = ssd_scan(**half, chunk_size=8, dt_softplus=True, return_final_states=True)
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, expected.bfloat16())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scale", [1e3, 1e6, 1e30])
def test_extreme_decays_are_finite(scale, packed):
    arguments = inputs(12, dtype=torch.float32)
    arguments["A"] = (-scale * torch.rand(HEADS)).requires_grad_()
    seq_idx = sequences([5, 4, 3]).expand(2, -1) if packed else None
    out = ssd_scan(**arguments, chunk_size=5, seq_idx=seq_idx)
    gradients = torch.autograd.grad(out.square().sum(), list(arguments.values()))
    assert all(value.isfinite().all() for value in (out, *gradients))
    assert gradients[0].abs().sum() > 0


def test_slow_decays_keep_their_digits_behind_fast_ones():
    """A running sum of thousands, in float32, would leave three digits of a decay of 0.9."""
    arguments = inputs(64, rows=1, dtype=torch.float32)
    arguments["dt"] = torch.where(torch.arange(64)[:, None] < 32, 1e4, 1e-1).expand(1, 64, HEADS)
    arguments["A"] = -torch.ones(HEADS)
    out = ssd_scan(**arguments, chunk_size=64)
    expected, _ = recurrence(**{name: value.double() for name, value in arguments.items()})
    torch.testing.assert_close(out[:, 32:].double(), expected[:, 32:], rtol=1e-5, atol=1e-5)


def convolution(x, weight, bias, seq_idx):
    """The definition, token by token."""
    out = torch.zeros_like(x)
    for row in range(x.shape[0]):
        for t in range(x.shape[2]):
            for back in range(weight.shape[1]):
                if t - back >= 0 and len(seq_idx[row, t - back : t + 1].unique()) == 1:
                    out[row, :, t] += weight[:, -1 - back] * x[row, :, t - back]
    return out if bias is None else out + bias[:, None]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 5), st.booleans())
def test_convolution_stays_in_its_sequence(lengths, width, with_bias):
    torch.manual_seed(0)
    seq_idx = torch.stack([sequences(lengths), sequences(lengths[::-1])])
    x = torch.randn(2, 3, sum(lengths), dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, width, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True) if with_bias else None
    leaves = [x, weight] + ([bias] if with_bias else [])
    expected, out = convolution(x, weight, bias, seq_idx), causal_conv1d(x, weight, bias, seq_idx)
    torch.testing.assert_close(out, expected, **CLOSE)
    gradient = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(out, leaves, gradient), torch.autograd.grad(expected, leaves, gradient), **CLOSE)


@pytest.mark.parametrize("length", [1, 3, 9])
def test_convolution_of_whole_rows_is_torchs(length):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 3, length), torch.randn(3, 4), torch.randn(3)
    expected = F.conv1d(x, weight[:, None], bias, padding=3, groups=3)[..., :length]
    torch.testing.assert_close(causal_conv1d(x, weight, bias), expected)
    for activation in ("silu", "swish"):
        torch.testing.assert_close(causal_conv1d(x, weight, bias, activation=activation), F.silu(expected))
    assert causal_conv1d(x.bfloat16(), weight, bias).dtype == torch.bfloat16


def layer_inputs(length):
    """Input and parameters of convolution, scan and gate: two groups, width 4."""
    torch.manual_seed(0)
    inner, written = HEADS * CHANNELS, 2 * STATE
    return {"zxbcdt": torch.randn(1, length, 2 * inner + 2 * written + HEADS, dtype=torch.float64),
            "conv1d_weight": torch.randn(inner + 2 * written, 4, dtype=torch.float64),
            "conv1d_bias": torch.randn(inner + 2 * written, dtype=torch.float64),
            "dt_bias": torch.randn(HEADS, dtype=torch.float64), "A": -torch.randn(HEADS, dtype=torch.float64).exp(),
            "D": torch.randn(HEADS, dtype=torch.float64)}


def test_packed_row_equals_samples_in_rows_of_their_own():
    lengths = [3, 8, 1, 5]
    whole = {name: value.requires_grad_() for name, value in layer_inputs(sum(lengths)).items()}
    packed = split_conv1d_scan(**whole, chunk_size=4, headdim=CHANNELS, ngroups=2, seq_idx=sequences(lengths)[None])
    separate = torch.cat([
        split_conv1d_scan(**{**whole, "zxbcdt": part}, chunk_size=4, headdim=CHANNELS, ngroups=2)
        for part in whole["zxbcdt"].split(lengths, 1)], 1)
    torch.testing.assert_close(packed, separate, **CLOSE)
    gradient = torch.randn_like(packed)
    torch.testing.assert_close(
        torch.autograd.grad(packed, list(whole.values()), gradient),
        torch.autograd.grad(separate, list(whole.values()), gradient), **CLOSE)


def test_order_of_the_parts():
    parts = layer_inputs(6)
    z, x, B, C, dt = parts["zxbcdt"].split([12, 12, 10, 10, 4], -1)
    seq_idx = torch.zeros(1, 6)
    convolved = F.silu(convolution(
        torch.cat([x, B, C], -1).transpose(1, 2), parts["conv1d_weight"], parts["conv1d_bias"], seq_idx))
    x, B, C = convolved.transpose(1, 2).split([12, 10, 10], -1)
    expected, state = recurrence(
        x.reshape(1, 6, HEADS, CHANNELS), dt, parts["A"], B.reshape(1, 6, 2, STATE), C.reshape(1, 6, 2, STATE),
        parts["D"], z.reshape(1, 6, HEADS, CHANNELS), parts["dt_bias"], dt_softplus=True)
    out, last = split_conv1d_scan(**parts, chunk_size=3, headdim=CHANNELS, ngroups=2, return_final_states=True)
    torch.testing.assert_close(out, expected.flatten(2), **CLOSE)
    torch.testing.assert_close(last, state, **CLOSE)
    parts["D"] = parts["D"][:, None].expand(-1, CHANNELS)
    torch.testing.assert_close(split_conv1d_scan(**parts, chunk_size=3, ngroups=2), out, **CLOSE)
