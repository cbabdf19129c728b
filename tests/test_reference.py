"""The recurrence against its formula, and the chunked torch path against the recurrence.

In float64, where the two differ by rounding alone, so that a wrong mask cannot hide in a tolerance.
"""

import time

import pytest
import torch

from flash_qla_tl import chunk_gated_delta_rule
from flash_qla_tl.reference import gated_delta_rule
from flash_qla_tl.testing import GATES, emulated, gate, inputs, rel_l2

K, V = 6, 4

# Around the chunk of 64, its sub-blocks of 16 that the kernels invert, and a second chunk.
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 49, 63, 64, 65, 100, 127, 128, 129, 130)

ACTIVATIONS = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def problem(*args, **kwargs):
    kwargs = {"K": K, "V": V, "H": 1, "dtype": torch.float64, "g_dtype": torch.float64, **kwargs}
    return inputs(*args, beta_dtype=torch.float64, h0_dtype=torch.float64, **kwargs)


def chunked(**args):
    return chunk_gated_delta_rule(**args, output_final_state=True)


def close(ours, theirs, tolerance=1e-9):
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def leaves(args):
    return {name: x for name, x in args.items() if torch.is_tensor(x) and x.is_floating_point()}


def gradients(call, args):
    """Those of a random functional of o and the final state, by name."""
    inputs = {name: x.detach().requires_grad_() for name, x in leaves(args).items()}
    outputs = call(**{**args, **inputs})
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs]
    return dict(zip(inputs, torch.autograd.grad(outputs, inputs.values(), weights), strict=True))


def test_formula_of_two_tokens():
    args = problem(1, 2)
    q, k, v, g, beta = (args[name][0, :, 0] for name in ("q", "k", "v", "g", "beta"))
    S = g[0].exp() * args["initial_state"][0, 0]
    S = S + beta[0] * torch.outer(k[0], v[0] - S.T @ k[0])
    o = [0.5 * S.T @ q[0]]
    S = g[1].exp() * S
    S = S + beta[1] * torch.outer(k[1], v[1] - S.T @ k[1])
    o.append(0.5 * S.T @ q[1])
    close(gated_delta_rule(**args, scale=0.5), (torch.stack(o)[None, :, None], S[None, None]))


def test_full_write_is_read_back():
    """With beta = 1 and a key of unit length, the key returns the value just written."""
    args = problem(2, 70, regime="zero")
    args |= {"q": args["k"], "beta": torch.ones_like(args["beta"])}
    for call in (gated_delta_rule, chunked):
        close([call(**args, scale=1.0)[0]], [args["v"]], 1e-5)  # keys are unit length in fp32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_reference_computes_in_the_dtype_asked_for(dtype):
    o, ht = gated_delta_rule(**problem(1, 3), dtype=dtype)
    assert o.dtype == ht.dtype == dtype


@pytest.mark.parametrize("regime", GATES)
@pytest.mark.parametrize("T", LENGTHS)
def test_chunked_is_the_recurrence(T, regime):
    args = problem(2, T, HV=2, regime=regime)
    close(chunked(**args), gated_delta_rule(**args))


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("regime", GATES)
def test_packed_with_empty_sequences(regime, state_v_first):
    lengths = [0, 65, 0, 1, 130, 64, 0]
    args = problem(H=2, HV=6, lengths=lengths, regime=regime, state_v_first=state_v_first)
    close(chunked(**args), gated_delta_rule(**args))


@pytest.mark.parametrize("regime", GATES)
def test_gradients_are_those_of_the_recurrence(regime):
    args = problem(H=2, HV=4, lengths=[70, 0, 17], regime=regime)
    ours, theirs = gradients(chunked, args), gradients(gated_delta_rule, args)
    close(ours.values(), theirs.values())


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_gradients_through_the_activations(allow_neg_eigval):
    args = problem(H=2, HV=4, lengths=[70, 0, 17], normalised=False)
    args |= {"A_log": torch.randn(4).double(), "dt_bias": torch.randn(4).double()}
    args |= {**ACTIVATIONS, "allow_neg_eigval": allow_neg_eigval}
    ours, theirs = gradients(chunked, args), gradients(gated_delta_rule, args)
    close(ours.values(), theirs.values())


@pytest.mark.parametrize("regime", GATES)
def test_gradcheck(regime):
    args = problem(H=1, HV=2, K=3, V=2, lengths=[66, 0, 3], regime=regime)
    names = list(leaves(args))
    values = [args[name].requires_grad_() for name in names]
    call = lambda *xs: chunked(**{**args, **dict(zip(names, xs, strict=True))})  # noqa: E731
    assert torch.autograd.gradcheck(call, values, fast_mode=True)


def test_gradcheck_of_the_activations():
    args = problem(1, 66, H=1, HV=2, K=3, V=2, normalised=False)
    args |= {"A_log": torch.randn(2).double(), "dt_bias": torch.randn(2).double()}
    names = list(leaves(args))
    values = [args[name].requires_grad_() for name in names]
    call = lambda *xs: chunked(**dict(zip(names, xs, strict=True)), **ACTIVATIONS)  # noqa: E731
    assert torch.autograd.gradcheck(call, values, fast_mode=True)


@pytest.mark.parametrize("split", [1, 63, 64, 65, 299])
def test_segmented_is_whole(split):
    args = problem(2, 300, HV=2)
    o, ht = chunked(**args)
    tokens = ("q", "k", "v", "g", "beta")
    o1, state = chunked(**{**args, **{name: args[name][:, :split] for name in tokens}})
    rest = {name: args[name][:, split:] for name in tokens}
    o2, state = chunked(**rest, initial_state=state)
    close((torch.cat((o1, o2), dim=1), state), (o, ht))


@pytest.mark.parametrize("call", [chunked, gated_delta_rule])
def test_packed_is_separate(call):
    """... and a sequence of NaN leaves its neighbours alone."""
    lengths = [70, 33, 0, 64]
    args = problem(lengths=lengths, HV=2)
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    for name in ("q", "k", "v", "g", "beta"):
        args[name][:, cu[1] : cu[2]] = torch.nan
    o, ht = call(**args)
    assert o[:, cu[1] : cu[2]].isnan().all()
    for n in (0, 2, 3):
        own = {name: args[name][:, cu[n] : cu[n + 1]] for name in ("q", "k", "v", "g", "beta")}
        alone = call(**own, initial_state=args["initial_state"][n : n + 1])
        close((o[:, cu[n] : cu[n + 1]], ht[n : n + 1]), alone, 1e-12)


def test_batch_rows_are_independent():
    args = problem(3, 100, HV=2)
    o, ht = chunked(**args)
    row = {name: x[1:2] for name, x in args.items()}
    close(chunked(**row), (o[1:2], ht[1:2]), 1e-12)


def test_the_future_changes_nothing():
    """Not even in the last bit: 20 tokens in a partly filled chunk, with two continuations."""
    first, second = problem(1, 40), problem(1, 40)
    second["g"].fill_(-5)
    first["g"].zero_()
    for name in first:
        second[name][:, :20] = first[name][:, :20]
    second["initial_state"] = first["initial_state"]
    assert torch.equal(chunked(**first)[0][:, :20], chunked(**second)[0][:, :20])


@pytest.mark.parametrize("call", [chunked, gated_delta_rule])
def test_rows_past_the_last_sequence(call):
    args = problem(lengths=[73, 42], T=140, HV=2)
    for name in ("q", "k", "v", "g", "beta"):
        args[name][:, 115:] = torch.nan
    o, ht = call(**args)
    assert torch.equal(o[:, 115:], torch.zeros_like(o[:, 115:]))
    assert o.isfinite().all() and ht.isfinite().all()
    for name, grad in gradients(call, args).items():
        assert grad.isfinite().all()
        if name != "initial_state":
            assert torch.equal(grad[:, 115:], torch.zeros_like(grad[:, 115:]))


@pytest.mark.parametrize("call", [chunked, gated_delta_rule])
def test_no_gate_is_a_gate_of_zeros(call):
    args = problem(1, 100)
    zeros = {**args, "g": torch.zeros_like(args["g"])}
    none = {**args, "g": None}
    close(call(**none), call(**zeros), 0)
    ours, theirs = gradients(call, none), gradients(call, zeros)
    close(ours.values(), [theirs[name] for name in ours], 0)


@pytest.mark.parametrize("value", [0.0, -1.0, -20.0, -100.0, -1000.0])
def test_finite_for_every_gate(value):
    args = problem(1, 130, HV=2, dtype=torch.float32)
    args["g"] = torch.full_like(args["g"], value, dtype=torch.float32)
    assert all(x.isfinite().all() for x in chunked(**args))
    assert all(x.isfinite().all() for x in gradients(chunked, args).values())


@pytest.mark.parametrize("regime", [*GATES, "softplus"])
def test_single_precision(regime):
    """Also of the gradient of the gate, whose large terms cancel under strong decay."""
    args = problem(H=2, HV=4, lengths=[47, 81, 130], regime="model", dtype=torch.float32)
    if regime == "softplus":
        x = torch.randn_like(args["g"])
        args["g"] = -16 * torch.nn.functional.softplus(0.5 * x + 1)
    else:
        args["g"] = gate(regime, *args["g"].shape).double()
    double = {name: x.double() if name in leaves(args) else x for name, x in args.items()}
    # Sums of gates near -1000 leave fp32 four digits in their differences.
    tolerance = 1e-3 if regime == "reset" else 1e-4
    for x, y in zip(chunked(**args), gated_delta_rule(**double), strict=True):
        assert rel_l2(x, y) <= tolerance
    theirs = gradients(gated_delta_rule, double)
    for name, grad in gradients(chunked, args).items():
        assert rel_l2(grad, theirs[name]) <= tolerance, name


def test_a_long_sequence_takes_less_than_two_seconds():
    args = inputs(1, 4096, 4, K=128)
    chunk_gated_delta_rule(**args)
    start = time.perf_counter()
    chunk_gated_delta_rule(**args)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("scale", [0.0, 1, -2.5])
def test_scale(scale):
    args = problem(1, 70)
    o, ht = chunked(**args, scale=scale)
    close((o, ht), gated_delta_rule(**args, scale=scale))
    close((o, ht), (scale * K**0.5 * chunked(**args)[0], ht))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_emulation_rounds_where_a_kernel_does(dtype):
    """Worse than rounding o alone, and not much: a budget twice its error is neither 0 nor lax."""
    args = inputs(1, 200, 2, 4, 64, dtype=dtype)
    o, ht = emulated(**args)
    exact, exact_ht = gated_delta_rule(**args, dtype=torch.float64)
    rounding = rel_l2(exact.to(dtype), exact)
    assert o.dtype == dtype and ht.dtype == torch.float32
    assert 1.2 * rounding < rel_l2(o, exact) < 4 * rounding
    assert rounding < rel_l2(ht, exact_ht) < 4 * rounding
