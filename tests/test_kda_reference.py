"""The recurrence of Kimi Delta Attention against its formula, and the chunked torch path against it.

In float64, where the two differ by rounding alone, so that a wrong mask cannot hide in a tolerance.
"""

import time

import pytest
import torch

from flash_qla_tl import chunk_kda, reference
from flash_qla_tl.testing import KDA_GATES, emulated, kda_gate, kda_inputs, rel_l2

K, V = 6, 4

# Around the chunk of 64, the blocks of 1, 2, 4, ... tokens that it is joined from, and a second chunk.
LENGTHS = (1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 48, 49, 63, 64, 65, 100, 127, 128, 129, 130)


def double(args):
    return {name: x.double() if name in leaves(args) else x for name, x in args.items()}


def leaves(args):
    return {name: x for name, x in args.items() if torch.is_tensor(x) and x.is_floating_point()}


def problem(*args, **kwargs):
    kwargs = {"K": K, "V": V, "H": 1, "HV": 2, "dtype": torch.float32, "h0_dtype": torch.float32, **kwargs}
    return double(kda_inputs(*args, **kwargs))


def chunked(**args):
    return chunk_kda(**args, output_final_state=True)


def close(ours, theirs, tolerance=1e-9):
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def gradients(call, args):
    """Those of a random functional of o and the final state, by name."""
    inputs = {name: x.detach().requires_grad_() for name, x in leaves(args).items()}
    outputs = call(**{**args, **inputs})
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs]
    return dict(zip(inputs, torch.autograd.grad(outputs, inputs.values(), weights), strict=True))


def test_formula_of_two_tokens():
    args = problem(1, 2, HV=1, regime="half", activations=False)
    args["g"] -= torch.rand_like(args["g"])
    q, k, v, g, beta = (args[name][0, :, 0] for name in ("q", "k", "v", "g", "beta"))
    S, o = args["initial_state"][0, 0], []
    for t in range(2):
        S = torch.diag(g[t].exp()) @ S
        S = S + beta[t] * torch.outer(k[t], v[t] - S.T @ k[t])
        o.append(0.5 * S.T @ q[t])
    close(reference.kda(**args, scale=0.5), (torch.stack(o)[None, :, None], S[None, None]))


def test_formula_of_the_gates():
    """And the parameters of head 1, channel 2, act there alone."""
    args = kda_inputs(1, 3, 1, 2, K, V)
    x, A_log, dt_bias = args["g"], torch.tensor([0.5, -1.0]), torch.randn(2, K)
    options = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
    for lower_bound in (None, -5.0, -0.5):
        _, _, g, _ = reference.activate(*(args[n] for n in ("q", "k", "g", "beta")), **options, lower_bound=lower_bound)
        at = x[0, 1, 1, 2] + dt_bias[1, 2]
        if lower_bound is None:
            expected = -A_log[1].exp() * (1 + at.exp()).log()
        else:
            expected = lower_bound / (1 + (-A_log[1].exp() * at).exp())
        torch.testing.assert_close(g[0, 1, 1, 2], expected)


def test_equal_channels_are_the_gated_delta_rule():
    args = problem(H=1, lengths=[70, 0, 3], regime="zero", activations=False)
    g = -torch.rand_like(args["beta"])
    o, ht = reference.gated_delta_rule(**{**args, "g": g})
    args["g"] = g[..., None].expand_as(args["g"])
    close(reference.kda(**args), (o, ht), 1e-12)
    close(chunked(**args), (o, ht))


@pytest.mark.parametrize("regime", KDA_GATES)
@pytest.mark.parametrize("T", LENGTHS)
def test_chunked_is_the_recurrence(T, regime):
    args = problem(2, T, regime=regime)
    close(chunked(**args), reference.kda(**args))


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("regime", KDA_GATES)
def test_packed_with_empty_sequences(regime, state_v_first):
    lengths = [0, 65, 0, 1, 130, 64, 0]
    args = problem(H=2, HV=6, lengths=lengths, regime=regime, state_v_first=state_v_first)
    close(chunked(**args), reference.kda(**args))


@pytest.mark.parametrize("regime", KDA_GATES)
def test_gradients_are_those_of_the_recurrence(regime):
    args = problem(H=2, HV=4, lengths=[70, 0, 17], regime=regime)
    ours, theirs = gradients(chunked, args), gradients(reference.kda, args)
    close(ours.values(), theirs.values())


@pytest.mark.parametrize("options", [{}, {"allow_neg_eigval": True}, {"A_log": None}, {"dt_bias": None}])
def test_gradients_through_the_activations(options):
    args = problem(H=2, HV=4, lengths=[70, 0, 17])
    args |= {"A_log": torch.randn(4).double(), "dt_bias": torch.randn(4 * K).double(), **options}
    ours, theirs = gradients(chunked, args), gradients(reference.kda, args)
    close(ours.values(), theirs.values())


@pytest.mark.parametrize("regime", KDA_GATES)
def test_gradcheck(regime):
    args = problem(K=3, V=2, lengths=[66, 0, 3], regime=regime)
    names = list(leaves(args))
    values = [args[name].requires_grad_() for name in names]
    call = lambda *xs: chunked(**{**args, **dict(zip(names, xs, strict=True))})  # noqa: E731
    assert torch.autograd.gradcheck(call, values, fast_mode=True)


@pytest.mark.parametrize("split", [1, 63, 64, 65, 299])
def test_segmented_is_whole(split):
    args = problem(2, 300)
    o, ht = chunked(**args)
    tokens = ("q", "k", "v", "g", "beta")
    o1, state = chunked(**{**args, **{name: args[name][:, :split] for name in tokens}})
    rest = {name: args[name][:, split:] for name in tokens}
    o2, state = chunked(**{**args, **rest, "initial_state": state})
    close((torch.cat((o1, o2), dim=1), state), (o, ht))


@pytest.mark.parametrize("call", [chunked, reference.kda])
def test_packed_is_separate(call):
    """... and a sequence of NaN leaves its neighbours alone."""
    lengths, cu = [70, 33, 0, 64], [0, 70, 103, 103, 167]
    args = problem(lengths=lengths, regime="zero")
    args["g"] = -torch.rand_like(args["g"])
    tokens = ("q", "k", "v", "g", "beta")
    for name in tokens:
        args[name][:, 70:103] = torch.nan
    o, ht = call(**args)
    assert o[:, 70:103].isnan().all()
    del args["cu_seqlens"]
    for n in (0, 2, 3):
        own = {name: args[name][:, cu[n] : cu[n + 1]] for name in tokens}
        alone = call(**{**args, **own, "initial_state": args["initial_state"][n : n + 1]})
        close((o[:, cu[n] : cu[n + 1]], ht[n : n + 1]), alone, 1e-12)


@pytest.mark.parametrize("call", [chunked, reference.kda])
def test_rows_past_the_last_sequence(call):
    args = problem(lengths=[73, 42], T=140)
    for name in ("q", "k", "v", "g", "beta"):
        args[name][:, 115:] = torch.nan
    o, ht = call(**args)
    assert not o[:, 115:].any()
    assert o.isfinite().all() and ht.isfinite().all()
    for name, grad in gradients(call, args).items():
        assert grad.isfinite().all()
        if name in ("q", "k", "v", "g", "beta"):
            assert not grad[:, 115:].any(), name


@pytest.mark.parametrize("value", [0.0, -1.0, -5.9, -20.0, -100.0, -1000.0, -1e30])
def test_finite_for_every_gate(value):
    args = problem(1, 130, regime="zero", activations=False)
    args = {name: x.float() for name, x in args.items()}
    for channels in (slice(None), slice(0, None, 2)):
        args["g"][..., channels] = value
        assert all(x.isfinite().all() for x in chunked(**args))
        assert all(x.isfinite().all() for x in gradients(chunked, args).values())
        args["g"].zero_()


@pytest.mark.parametrize("regime", KDA_GATES)
def test_single_precision(regime):
    """Also behind a gate of -1000, and of the gradient of the gate, whose large terms cancel."""
    args = kda_inputs(H=2, HV=4, K=16, V=8, lengths=[47, 81, 130], regime=regime, dtype=torch.float32)
    exact = double(args)
    for x, y in zip(chunked(**args), reference.kda(**exact), strict=True):
        assert rel_l2(x, y) <= 1e-6
    theirs = gradients(reference.kda, exact)
    ours = gradients(chunked, args)
    if regime == "saturated":
        # 1 - sigmoid(20) is 0 in fp32, and so is what passes through it.
        assert all(not ours.pop(name).any() for name in ("g", "A_log", "dt_bias"))
    for name, grad in ours.items():
        assert rel_l2(grad, theirs[name]) <= 1e-5, name


def test_a_long_sequence_takes_less_than_three_seconds():
    args = kda_inputs(1, 2048, 2, K=128)
    chunk_kda(**args)
    start = time.perf_counter()
    chunk_kda(**args)
    assert time.perf_counter() - start < 3


@pytest.mark.parametrize("scale", [0.0, 1, -2.5])
def test_scale(scale):
    args = problem(1, 70)
    o, ht = chunked(**args, scale=scale)
    close((o, ht), reference.kda(**args, scale=scale))
    close((o, ht), (scale * K**0.5 * chunked(**args)[0], ht))


@pytest.mark.parametrize("regime", KDA_GATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_emulation_rounds_where_a_kernel_does(dtype, regime):
    """Worse than rounding o alone, and not much: a budget twice its error is neither 0 nor lax."""
    args = kda_inputs(1, 200, 2, 4, 64, dtype=dtype, regime=regime)
    o, ht = emulated(**args)
    exact, exact_ht = chunked(**double(args))
    rounding = rel_l2(exact.to(dtype), exact)
    assert o.dtype == dtype and ht.dtype == torch.float32
    assert 1.2 * rounding < rel_l2(o, exact) < 4 * rounding
    assert rounding < rel_l2(ht, exact_ht) < 4 * rounding


def test_gates_are_what_their_names_say():
    shape = 1, 640, 3, 40
    decays = {}
    for regime in KDA_GATES:
        gate = kda_gate(regime, *shape)
        q = torch.zeros(1)
        decays[regime] = reference.activate(q, q, gate.pop("g"), q, **gate)[2]
    assert all(g.shape == shape and (g <= 0).all() for g in decays.values())
    assert (decays["saturated"] < -4.999).all() and (decays["faint"] > -1e-7).all()
    assert -21 < decays["softplus"].mean() < -19
    assert 0.04 < (decays["reset"] == -1000).float().mean() < 0.06
    assert (decays["half"] == -20).float().mean() == 0.5
    assert (decays["spike"] == -20).all(-1).all(-1).sum() == 10
    assert decays["bias 2"].mean() < decays["normal"].mean() < decays["bias -2"].mean()
    assert (decays["steep"] < -4.9).any() and (decays["steep"] > -0.1).any()
