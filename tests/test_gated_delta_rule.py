"""The operator through its public functions: small on the CPU, the same and more on the GPU.

The reference is the chunked form in float64, which test_reference.py has shown to be the
recurrence. The budget of an error is twice that of a 16-bit emulation of the same form on the same
inputs, and never more than testing.CAP. What failed in the field once is a case here.
"""

import multiprocessing
import os
import subprocess
import sys
import warnings

import emulated_kernels
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flash_qla_tl import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd, dispatch
from flash_qla_tl.testing import (
    CAP,
    CAP_NEG_EIGVAL,
    GATE_GRADIENT_FLOOR,
    GATES,
    GRADIENT_FLOOR,
    budget,
    emulated,
    gate,
    gradient_budget,
    inputs,
    rel_l2,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TOKENS = ("q", "k", "v", "g", "beta")

# Lengths on both sides of a chunk, of the 16 x 16 blocks of its inverse, and of their merges.
TAILS = [1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 63, 64, 65, 81, 97, 127, 128, 129, 130]

NORM = {"use_qk_l2norm_in_kernel": True}
SIGMOID = {"use_beta_sigmoid_in_kernel": True}
NEG_EIGVAL = {**SIGMOID, "allow_neg_eigval": True}

on_gpu = pytest.mark.gpu


@pytest.fixture(params=["cpu", "emulated", pytest.param("cuda", marks=on_gpu)])
def device(request, monkeypatch):
    """The torch path, the kernel path around an emulated kernel, and the kernels."""
    if request.param != "emulated":
        return request.param
    emulated_kernels.install(monkeypatch)
    return "cpu"


def run(args, **options):
    return chunk_gated_delta_rule(**{"output_final_state": True, **args, **options})


def floats(args):
    return {name: x for name, x in args.items() if torch.is_tensor(x) and x.is_floating_point()}


def exact(args, **options):
    double = {name: x.double() for name, x in floats(args).items()}
    options = {name: x.double() if torch.is_tensor(x) else x for name, x in options.items()}
    return run({**args, **double}, **options)


def check(args, cap=CAP, **options):
    """One call against its budgets; returns what it gave."""
    outputs = run(args, **options)
    reference = exact(args, **options)
    emulation = emulated(**args, **options)
    assert outputs[0].dtype == args["q"].dtype and outputs[1].dtype == FP32
    for name, x, y, e in zip(("o", "ht"), outputs, reference, emulation, strict=True):
        assert x.isfinite().all(), name
        assert rel_l2(x, y) <= budget(e, y, cap), name
    # A short sequence cannot hide behind a long one, nor a head behind another.
    cu = args.get("cu_seqlens")
    o, exact_o = outputs[0], reference[0]
    for n, (x, y) in enumerate(zip(outputs[1], reference[1], strict=True)):
        bos, eos = (0, None) if cu is None else (int(cu[n]), int(cu[n + 1]))
        row = n if cu is None else 0
        assert _worst_head(o[row, bos:eos].transpose(0, 1), exact_o[row, bos:eos].transpose(0, 1)) <= (2 * cap), (
            f"o of sequence {n}"
        )
        assert _worst_head(x, y) <= 2 * cap, f"ht of sequence {n}"
    return outputs


def _worst_head(x, y):
    error = (x.double() - y).flatten(1).norm(dim=1)
    size = y.flatten(1).norm(dim=1)
    return (error / size.where(size > 0, 1)).max().item() if y.numel() else 0.0


def gradients(call, args, weights, **options):
    """By name, of the functional of o and the final state that the weights (or None) say."""
    tensors = {**args, **{name: x for name, x in options.items() if torch.is_tensor(x)}}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in floats(tensors).items()}
    outputs = call({**args, **options, **leaves})
    pairs = zip(outputs, weights, strict=True)
    # Without a sequence no state depends on anything.
    pairs = [(x, w.to(x.dtype)) for x, w in pairs if w is not None and x.requires_grad]
    outputs, weights = zip(*pairs, strict=True)
    return dict(zip(leaves, torch.autograd.grad(outputs, leaves.values(), weights), strict=True))


def check_gradients(args, final_state=True, **options):
    """... of its gradients, that of the emulation being rounded at the same places on its way back."""
    o, ht = run(args, **options)
    weights = torch.randn_like(o), torch.randn_like(ht) if final_state else None
    ours = gradients(run, args, weights, **options)
    theirs = gradients(exact, args, weights, **options)
    emulation = gradients(lambda args: emulated(**args), args, weights, **options)
    for name, grad in ours.items():
        given = args[name] if name in args else options[name]
        assert grad.dtype == given.dtype and grad.shape == given.shape, name
        assert grad.isfinite().all(), name
        error = gradient_error(name, grad, theirs, args, weights, **options)
        assert error <= gradient_budget(name, emulation[name], theirs[name]), name
    return ours


def gradient_error(name, grad, theirs, args, weights, **options):
    error = rel_l2(grad, theirs[name])
    if name == "g" and error > GRADIENT_FLOOR:
        # Under strong decay the gradient of the gate itself nearly vanishes.
        undecayed = gradients(exact, {**args, "g": torch.zeros_like(args["g"])}, weights, **options)["g"]
        size = theirs[name].norm()
        error *= size / max(size, 1e-4 * undecayed.norm())
    return error


def same(ours, theirs):
    return all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("regime", GATES)
@pytest.mark.parametrize("K, V", [(64, 64), (64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_dtypes_and_head_dims(device, dtype, K, V, regime):
    kwargs = {"dtype": dtype, "regime": regime, "h0_dtype": FP32, "device": device}
    check(inputs(2, 150, 1, 2, K, V, **kwargs))
    check(inputs(H=1, HV=2, K=K, V=V, lengths=[65, 1, 0, 130], **kwargs))


@pytest.mark.parametrize(
    ("H", "HV"), [(1, HV) for HV in range(1, 9)] + [(2, 2), (3, 3), (5, 5), (12, 12), (2, 6), (3, 12), (4, 32)]
)
def test_heads(device, H, HV):
    """Grouped value heads and counts that no power of two divides, unlike from head to head."""
    args = inputs(2, 100, H, HV, h0_dtype=FP32, device=device)
    args["g"] *= torch.arange(1, HV + 1, device=device)
    check(args)


@pytest.mark.parametrize("regime", GATES)
def test_lengths_packed(device, regime):
    """The last valid row of a chunk decides its state: taken elsewhere, every tail is wrong."""
    lengths = list(range(1, 131)) if device == "cuda" else TAILS
    check(inputs(H=1, HV=2, lengths=lengths, regime=regime, h0_dtype=FP32, device=device))


@on_gpu
@pytest.mark.parametrize("H, HV", [(1, 8), (3, 12), (5, 5)])
def test_gradients_of_a_group(H, HV):
    """dq and dk are summed over the value heads of a group; the last chunk comes round the ring again."""
    check_gradients(inputs(1, 200, H, HV, 128, h0_dtype=FP32, device="cuda"))


@pytest.mark.parametrize("T", TAILS)
def test_lengths_dense(device, T):
    check(inputs(2, T, 1, 2, h0_dtype=FP32, device=device))


def test_ragged_behind_full_chunks(device):
    """A kernel keeps three chunks in flight: a last chunk in every place of that ring, once round and again."""
    chunks = range(2, 9) if device == "cuda" else (3,)
    lengths = [64 * n + tail for n in chunks for tail in (1, 40)]
    args = inputs(H=1, HV=2, K=128, lengths=lengths, h0_dtype=FP32, device=device)
    check(args)
    check_gradients(args)


@pytest.mark.parametrize("tail", [17, 33, 49, 63, 64 + 17, 64 + 33])
def test_tail_beside_large_values(device, tail):
    """A mask forgotten in one 16 x 16 block of the inverse lets the next sequence in."""
    args = inputs(H=1, HV=2, lengths=[64, tail, 64], device=device)
    alone = {name: args[name][:, 64 : 64 + tail].clone() for name in TOKENS}
    for name in TOKENS:
        args[name][:, 64 + tail :] = 1e4 if name in "qkv" else -1.0
    o, ht = run(args)
    reference = exact(alone)
    assert rel_l2(o[:, 64 : 64 + tail], reference[0]) <= CAP
    assert rel_l2(ht[1:2], reference[1]) <= CAP


@pytest.mark.parametrize("T", [512, pytest.param(2048, marks=on_gpu), pytest.param(20468, marks=on_gpu)])
def test_gates_of_a_softplus(T):
    """Lengths at which another implementation gave other tokens than its peers."""
    device = "cpu" if T == 512 else "cuda"
    args = inputs(1, T, 2, 8, 128, device=device, normalised=False)
    options = {**NORM, "A_log": torch.rand(8, device=device), "use_gate_in_kernel": True}
    args["g"] = torch.randn_like(args["g"]) - 4
    check(args, **options, dt_bias=torch.ones(8, device=device))


@pytest.mark.parametrize("T", [7, 50, 63, 64, 65, 128])
def test_no_decay_is_the_plain_delta_rule(device, T):
    """g = 0 everywhere and g of one token in two: exponentials under a mask made NaN of them."""
    args = inputs(1, T, 2, regime="zero", device=device)
    args["beta"] = torch.ones_like(args["beta"])
    check(args)
    args["g"][:, ::2] = gate("model", 1, (T + 1) // 2, 2, device=device)
    check(args)


def test_no_gate(device):
    """None once left a gradient unwritten."""
    args = inputs(1, 128, 2, device=device)
    args["g"].zero_()
    none = {**args, "g": None}
    assert same(run(none), run(args))
    weights = torch.randn_like(args["v"]), None
    ours, theirs = gradients(run, none, weights), gradients(run, args, weights)
    assert all(torch.equal(grad, theirs[name]) for name, grad in ours.items())


@pytest.mark.parametrize("scale", [None, 0.0, 0.1, 1, -2.0])
def test_scale(device, scale):
    """0.0 is a value, and no value may be baked into a kernel under another's name."""
    args = inputs(1, 70, 1, device=device)
    o, _ = check(args, scale=scale)
    assert scale != 0.0 or not o.any()


def test_slightly_positive_gates(device):
    args = inputs(1, 100, 1, device=device)
    args["g"] = torch.full_like(args["g"], 0.01)
    check(args)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("beta", [{}, SIGMOID, NEG_EIGVAL], ids=["beta", "sigmoid", "neg_eigval"])
@pytest.mark.parametrize("norm", [{}, NORM], ids=["", "l2norm"])
def test_activations(device, norm, beta, gated):
    args = inputs(H=2, HV=4, lengths=[65, 0, 30], normalised=not norm, h0_dtype=FP32, device=device)
    options = {**norm, **beta}
    if beta:
        args["beta"] = torch.randn_like(args["beta"])
    if gated:
        args["g"] = torch.randn_like(args["g"])
        options |= {
            "use_gate_in_kernel": True,
            "A_log": torch.randn(4, device=device),
            "dt_bias": torch.randn(4, device=device),
        }
    cap = CAP_NEG_EIGVAL if "allow_neg_eigval" in beta else CAP
    check(args, cap, **options)
    check_gradients(args, **options)


def inside(device, *shape, HV=4, dt_bias=True, **kwargs):
    """Arguments and options with every activation inside."""
    args = inputs(*shape, HV=HV, normalised=False, device=device, **kwargs)
    args["g"], args["beta"] = torch.randn_like(args["g"]), torch.randn_like(args["beta"])
    args["A_log"] = torch.randn(HV, device=device)
    if dt_bias:
        args["dt_bias"] = torch.randn(HV, device=device)
    return args, {**NORM, **SIGMOID, "use_gate_in_kernel": True}


@pytest.mark.parametrize("dt_bias", [False, True], ids=["", "dt_bias"])
@pytest.mark.parametrize("g_dtype, beta_dtype", [(BF16, FP32), (FP32, BF16), (FP16, FP16)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_gradients_of_raw_inputs(device, dtype, g_dtype, beta_dtype, dt_bias):
    """Each in the dtype it came in, the parameters of the gate included; more heads than a warp has lanes."""
    kwargs = {"dtype": dtype, "g_dtype": g_dtype, "beta_dtype": beta_dtype, "dt_bias": dt_bias}
    args, options = inside(device, 2, 70, 2, **kwargs)
    args["A_log"] = args["A_log"].to(beta_dtype)
    check_gradients(args, **options)
    args, options = inside(device, 1, 40, 1, HV=35, **kwargs)
    check_gradients(args, **options)


def test_gradients_of_raw_inputs_in_any_strides(device):
    B, T, H, D = 2, 70, 2, 64
    qkv = torch.randn(B, T, 3 * H * D, dtype=BF16, device=device)
    q, k, v = (x.unflatten(-1, (H, D)) for x in qkv.split(H * D, dim=-1))
    ba = torch.randn(B, T, 2 * H, device=device)
    odd = torch.randn(B, T, H, D + 1, dtype=BF16, device=device)
    options = {**NORM, **SIGMOID, "use_gate_in_kernel": True}
    for key in (k, odd[..., 1:], k[:, :, :1].expand(B, T, H, D), k[:1].expand(B, T, H, D)):
        views = {"q": q, "k": key, "v": v, "g": ba[..., :H], "beta": ba[..., H:], "A_log": torch.ones(H, device=device)}
        outputs = run(views, **options)
        weights = tuple(torch.randn_like(x) for x in outputs)
        leaves = {name: x.detach().requires_grad_() for name, x in views.items()}
        grads = torch.autograd.grad(run(leaves, **options), leaves.values(), weights)
        copies = gradients(run, {name: x.contiguous() for name, x in views.items()}, weights, **options)
        # torch's own sums take their order from the strides.
        pairs = zip(grads, copies.values(), strict=True)
        assert all(torch.equal(x, y) if device == "cuda" else rel_l2(x, y) <= 1e-3 for x, y in pairs)


@pytest.mark.parametrize("name", [*TOKENS, "initial_state", "A_log", "dt_bias"])
def test_gradient_of_one_raw_input_alone(device, name):
    args, options = inside(device, 1, 70, 2, h0_dtype=FP32)
    everything = gradients(run, args, (torch.ones_like(args["v"]), None), **options)
    args[name].requires_grad_()
    o, _ = run(args, **options)
    (grad,) = torch.autograd.grad(o, args[name], torch.ones_like(o))
    assert torch.equal(grad, everything[name])


def test_gradients_of_raw_inputs_twice(device):
    """The same to the bit, on a graph that was kept: nothing saved is written to."""
    args, options = inside(device, H=2, lengths=[300, 1, 0, 130], g_dtype=BF16)
    leaves = {name: x.requires_grad_() for name, x in floats(args).items()}
    o = run({**args, **leaves}, **options)[0].sum()
    once = torch.autograd.grad(o, leaves.values(), retain_graph=True)
    for _ in range(10 if device == "cuda" else 1):
        assert same(once, torch.autograd.grad(o, leaves.values(), retain_graph=True))


@pytest.mark.parametrize("device", ["emulated", pytest.param("cuda", marks=on_gpu)], indirect=True)
def test_bytes_saved_for_the_backward(device):
    """With every activation inside no more than with all outside, but the raw gate and what is as small."""
    plain = inputs(H=2, HV=4, K=64, lengths=[100, 30], h0_dtype=FP32, device=device)
    raw, options = inside(device, H=2, K=64, lengths=[100, 30], h0_dtype=FP32)

    def saved(args, **options):
        leaves = {name: x.requires_grad_() for name, x in floats(args).items()}
        given = {x.untyped_storage().data_ptr() for x in leaves.values()}
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            outputs = run({**args, **leaves}, **options)
        new = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
        new = sum(size for address, size in new.items() if address not in given)
        assert all(x.requires_grad for x in outputs)
        return sum(x.nbytes for x in kept), new

    total, new = saved(raw, **options)
    expected_total, expected_new = saved(plain)
    assert total <= expected_total + sum(raw[name].nbytes for name in ("g", "A_log", "dt_bias"))
    assert new <= expected_new


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_norm_of_rows_of_zeros_and_of_large_rows(device, dtype):
    args = inputs(1, 70, 1, dtype=dtype, device=device)
    args["q"][:, 3], args["k"][:, 5] = 0, 0
    args["k"][:, 7], args["q"][:, 9] = 300, 300  # whose squares pass the range of fp16
    check(args, **NORM)
    check_gradients(args, **NORM)


@pytest.mark.parametrize("beta_dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("g_dtype", [FP32, BF16, FP16], ids=str)
def test_dtypes_of_gate_and_beta(device, g_dtype, beta_dtype):
    """Each in its own dtype, and so are their gradients."""
    args = inputs(1, 100, 1, 2, g_dtype=g_dtype, beta_dtype=beta_dtype, device=device)
    check(args)
    check_gradients(args)


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("h0_dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("K, V", [(64, 128), (128, 128)])
def test_initial_state(device, K, V, h0_dtype, state_v_first):
    """Read in the dtype and layout it has: a square head dim hides a mix-up from every check."""
    args = inputs(
        H=1, HV=2, K=K, V=V, lengths=[70, 1, 64], h0_dtype=h0_dtype, state_v_first=state_v_first, device=device
    )
    o, ht = check(args)
    other = {**args, "initial_state": args["initial_state"].mT.contiguous(), "state_v_first": not state_v_first}
    assert same(run(other), (o, ht.mT))
    check_gradients(args)


def test_final_state_only_on_request(device):
    args = inputs(1, 10, 1, h0_dtype=FP32, device=device)
    assert chunk_gated_delta_rule(**args)[1] is None


@pytest.mark.parametrize("split", [1, 63, 64, 65, 128, 299])
def test_resuming(device, split):
    """A prompt in two parts, where an initial state was once ignored."""
    args = inputs(1, 300, 2, h0_dtype=FP32, device=device)
    o, ht = exact(args)
    first = {**args, **{name: args[name][:, :split] for name in TOKENS}}
    o1, state = run(first)
    rest = {name: args[name][:, split:] for name in TOKENS}
    o2, state = run(rest, initial_state=state)
    assert rel_l2(torch.cat((o1, o2), dim=1), o) <= CAP
    assert rel_l2(state, ht) <= CAP


def test_one_token_after_a_prompt(device):
    """Padding of the last chunk once changed the state that decoding starts from."""
    args = inputs(1, 100, 2, device=device)
    o, ht = exact(args)
    _, state = run({name: args[name][:, :99] for name in TOKENS})
    last, state = run({name: args[name][:, 99:] for name in TOKENS}, initial_state=state)
    assert rel_l2(last, o[:, 99:]) <= 2 * CAP  # of two rows only
    assert rel_l2(state, ht) <= CAP


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_dtype_of_cu_seqlens(device, dtype):
    check(inputs(H=1, lengths=[70, 3], cu_dtype=dtype, device=device))


def test_packed_is_separate(device):
    """State leaked across sequences; here one of NaN lies between."""
    lengths = [70, 33, 64]
    args = inputs(H=1, HV=2, lengths=lengths, h0_dtype=FP32, device=device)
    for name in TOKENS:
        args[name][:, 70:103] = torch.nan
    o, ht = run(args)
    for n, bos, eos in ((0, 0, 70), (2, 103, 167)):
        own = {name: args[name][:, bos:eos].clone() for name in TOKENS}
        alone = exact({**own, "initial_state": args["initial_state"][n : n + 1]})
        assert rel_l2(o[:, bos:eos], alone[0]) <= CAP
        assert rel_l2(ht[n : n + 1], alone[1]) <= CAP


def test_batch_rows_are_independent(device):
    args = inputs(3, 100, 1, 2, device=device)
    expected = run(args)
    for name in TOKENS:
        args[name][1] = torch.nan
    o, ht = run(args)
    assert same((o[::2], ht[::2]), (expected[0][::2], expected[1][::2]))


def test_the_future_changes_nothing(device):
    """Not even in the last bit: two continuations of 20 tokens within a chunk, and of 70."""
    for T in (20, 70):
        first, second = (inputs(1, 100, 1, device=device) for _ in range(2))
        second["g"].fill_(-5)
        for name in TOKENS:
            second[name][:, :T] = first[name][:, :T]
        assert torch.equal(run(first)[0][:, :T], run(second)[0][:, :T])


@pytest.mark.parametrize("h0_dtype", [None, FP32], ids=["zeros", "h0"])
def test_empty_sequences(device, h0_dtype):
    """They once ran an epilogue of nothing over their neighbours, and a wrong state."""
    lengths = [0, 64, 0, 36, 0]
    args = inputs(H=2, lengths=lengths, h0_dtype=h0_dtype, device=device)
    _, ht = check(args)
    state = args.get("initial_state", torch.zeros_like(ht))
    assert torch.equal(ht[::2], state[::2])


def test_gradient_of_an_empty_sequence_is_that_of_its_state(device):
    args = inputs(H=2, lengths=[0, 64, 0, 36], h0_dtype=FP32, device=device)
    dht = torch.randn_like(args["initial_state"])
    grads = gradients(run, args, (torch.randn_like(args["v"]), dht))
    assert torch.equal(grads["initial_state"][::2], dht[::2])


@pytest.mark.parametrize("h0_dtype", [None, FP32], ids=["zeros", "h0"])
def test_loops_of_no_and_of_one_iteration(device, h0_dtype):
    """Each role of a kernel must come through, or the others wait for it for ever."""
    check(inputs(H=2, lengths=[0, 1, 2, 63, 64, 65], h0_dtype=h0_dtype, device=device))


@on_gpu
@pytest.mark.parametrize("state", [None, "zeros", "random"])
def test_many_short_sequences_and_a_long_one(state):
    """Hung elsewhere as soon as there was an initial state, of zeros even."""
    h0_dtype = None if state is None else FP32
    args = inputs(H=2, HV=4, K=128, lengths=[5] * 200 + [8192], h0_dtype=h0_dtype, device="cuda")
    if state == "zeros":
        args["initial_state"].zero_()
    check(args)


@pytest.mark.parametrize("lengths, T", [([73, 42, 94], 256), ([0, 30], 64), ([], 40)])
def test_rows_past_the_last_sequence(device, lengths, T):
    """Zero, and so are their gradients: what is summed over all rows must not meet garbage."""
    args = inputs(H=1, HV=2, lengths=lengths, T=T, device=device)
    end = sum(lengths)
    for name in TOKENS:
        args[name][:, end:] = torch.nan
    o, ht = run(args)
    assert not o[:, end:].any()
    assert o.isfinite().all() and ht.isfinite().all()
    grads = gradients(run, args, (torch.randn_like(o), torch.randn_like(ht)))
    for name, grad in grads.items():
        assert not grad[:, end:].any(), name
        assert grad.sum().isfinite(), name


@pytest.mark.parametrize("norm", [{}, NORM], ids=["", "l2norm"])
@pytest.mark.parametrize("beta", [{}, SIGMOID], ids=["", "sigmoid"])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gate"])
def test_rows_past_the_last_sequence_in_the_activations(device, gated, beta, norm):
    """A gradient of 0 times a derivative of NaN once reached the parameters of the gate."""
    args = inputs(H=1, HV=2, lengths=[73, 42], T=140, device=device)
    for name, garbage in zip(TOKENS, (torch.nan, torch.inf, torch.nan, -torch.inf, torch.nan), strict=True):
        args[name][:, 115:] = garbage
    if gated:
        args |= {"A_log": torch.zeros(2, device=device), "dt_bias": torch.zeros(2, device=device)}
    run_all = lambda args: run(args, use_gate_in_kernel=gated, **norm, **beta)  # noqa: E731
    o, ht = run_all(args)
    grads = gradients(run_all, args, (torch.randn_like(o), torch.randn_like(ht)))
    assert all(grad.isfinite().all() for grad in grads.values())
    assert not any(grads[name][:, 115:].any() for name in TOKENS)


@pytest.mark.parametrize("shape", [(0, 64), (1, 0), (2, 0)])
def test_nothing_at_all_dense(device, shape):
    """A grid of no blocks is an error to the driver, and a size of 0 was once read as 1."""
    args = inputs(*shape, 2, 4, h0_dtype=FP32, device=device)
    o, ht = run(args)
    assert o.shape == (*shape, 4, 64) and torch.equal(ht, args["initial_state"])
    o, ht = run({name: args[name] for name in TOKENS})
    assert not ht.any()
    grads = gradients(run, args, (torch.zeros_like(o), torch.ones_like(ht)))
    assert all(grad.shape == args[name].shape for name, grad in grads.items())


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_nothing_at_all_packed(device, lengths):
    args = inputs(H=2, T=0, lengths=lengths, h0_dtype=FP32, device=device)
    o, ht = run(args)
    assert o.shape == (1, 0, 2, 64) and torch.equal(ht, args["initial_state"])


def test_fresh_cu_seqlens_each_time(device):
    """A table cached under the address of a tensor outlived it, and its address was used again."""
    for _ in range(200 if device == "cuda" else 5):
        lengths = torch.randint(1, 100, (4,)).tolist()
        args = inputs(H=1, T=400, lengths=lengths, device=device)
        cu = args["cu_seqlens"].clone()
        o, ht = run({**args, "cu_seqlens": cu})
        del cu
        reference = exact(args)
        assert rel_l2(o, reference[0]) <= CAP and rel_l2(ht, reference[1]) <= CAP


def test_cu_seqlens_changed_in_place(device):
    """The same tensor, the same N and T, other boundaries."""
    args = inputs(H=1, lengths=[64, 65, 71], device=device)
    check(args)
    args["cu_seqlens"].copy_(torch.tensor([0, 1, 130, 200]))
    check(args)


def test_cu_seqlens_cpu(device):
    args = inputs(H=1, lengths=[64, 65, 71], device=device)
    assert same(run(args, cu_seqlens_cpu=args["cu_seqlens"].cpu()), run(args))


@on_gpu
@pytest.mark.parametrize(
    "values",
    [
        [0, 100, 200, 10**9],
        [0, -5, 100, 200],
        [50, 100, 150, 200],
        [0, 150, 50, 200],
        [-(10**9), 10**9, -(10**9), 10**9],
        [2**31 - 1] * 4,
    ],
)
def test_corrupt_cu_seqlens_touch_nothing_else(values):
    """Outputs may be anything; the next call is right, and the tensors around are untouched."""
    args = inputs(H=2, HV=4, lengths=[100, 50, 50], h0_dtype=FP32, device="cuda")
    before = {name: x.clone() for name, x in floats(args).items()}
    for dtype in (torch.int32, torch.int64):
        cu = torch.tensor(values, dtype=dtype, device="cuda")
        run({**args, "cu_seqlens": cu})
        chunk_gated_delta_rule_fwd(**{**args, "cu_seqlens": cu}, output_h=True)
        torch.cuda.synchronize()
    assert all(torch.equal(args[name], x) for name, x in before.items())
    check(args)


def test_strided_inputs(device):
    """Views of one fused projection, transposes, broadcasts: right, and equal to their copies."""
    B, T, H, HV, D = 2, 100, 2, 4, 64
    qkv = torch.randn(B, T, (2 * H + HV) * D, dtype=BF16, device=device)
    q, k, v = qkv.split((H * D, H * D, HV * D), dim=-1)
    views = {
        "q": q.unflatten(-1, (H, D)),
        "k": k.unflatten(-1, (H, D)),
        "v": v.unflatten(-1, (HV, D)),
        "g": gate("model", B, HV, T, device=device).transpose(1, 2),
        "beta": torch.rand(B, T, 1, device=device).expand(B, T, HV),
        "initial_state": torch.randn(B, HV, D, D, device=device).mT,
    }
    copies = {name: x.contiguous() for name, x in views.items()}
    assert same(check(views, **NORM), run(copies, **NORM))

    head_first = {name: copies[name].transpose(1, 2).contiguous().transpose(1, 2) for name in TOKENS}
    assert same(run(head_first, **NORM), run({name: copies[name] for name in TOKENS}, **NORM))


def test_broadcast_inputs(device):
    """Strides of zero, which TMA refuses: one key for all heads, one value for all tokens."""
    args = inputs(1, 70, 2, device=device)
    args["k"] = args["k"][:, :, :1].expand(args["q"].shape)
    args["v"] = args["v"][:, :1].expand(args["v"].shape)
    assert same(check(args), run({name: x.contiguous() for name, x in args.items()}))


@on_gpu
def test_first_call_in_a_graph():
    """What the first call keeps for the next ones must not belong to the graph that it is captured in."""
    args = inputs(1, 70, 2, device="cuda")
    expected = run(args, g=None)  # compiles
    from flash_qla_tl.kernels.common import tensors

    tensors._kept_constants.cache_clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(args, g=None)
    assert same(run(args, g=None), expected)
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, expected)


@on_gpu
@pytest.mark.parametrize("inside", [False, True], ids=["plain", "activations"])
def test_training_step_in_a_graph(inside):
    """Forward and backward captured once; replayed with other values in the same tensors, the boundaries among them."""
    options = {**NORM, **SIGMOID, "use_gate_in_kernel": True} if inside else {}

    def make(lengths):
        x = inputs(H=2, HV=4, K=128, lengths=lengths, T=330, h0_dtype=FP32, device="cuda")
        if inside:
            x |= {"A_log": torch.randn(4, device="cuda"), "dt_bias": torch.randn(4, device="cuda")}
        return x, torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])

    def step(x, do, dht):
        leaves = {name: y.detach().requires_grad_() for name, y in x.items() if y.is_floating_point()}
        outputs = chunk_gated_delta_rule(**{**x, **leaves}, **options, output_final_state=True)
        return *outputs, *torch.autograd.grad(outputs, list(leaves.values()), (do, dht))

    (x, do, dht), other = make([100, 0, 63, 100]), make([1, 130, 64, 0])
    expected = step(x, do, dht)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x, do, dht)
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, expected)
    for name, y in other[0].items():
        x[name].copy_(y)
    do.copy_(other[1]), dht.copy_(other[2])
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, step(*other))


@pytest.mark.parametrize("offset, last", [(1, 1), (4, 1), (0, 2)])
def test_strides_a_kernel_cannot_take(device, offset, last):
    """Rows that are not 16-byte aligned, and a last stride of 2."""
    args = inputs(1, 70, 1, device=device)
    odd = dict(args)
    for name in ("q", "k", "v"):
        x = args[name]
        wide = x.new_zeros(*x.shape[:-1], (x.shape[-1] + offset) * last)
        odd[name] = wide[..., offset * last :: last].copy_(x)
        assert not odd[name].is_contiguous()
    assert same(run(odd), run(args))


def test_expanded_gradient(device):
    """That of a sum is one number with strides of zero."""
    args = inputs(1, 70, 1, 2, device=device)
    leaves = {name: x.requires_grad_() for name, x in args.items()}
    run(leaves)[0].sum().backward()
    theirs = gradients(exact, args, (torch.ones_like(args["v"]), None))
    for name, x in leaves.items():
        assert rel_l2(x.grad, theirs[name]) <= CAP, name


def test_one_dtype_after_the_other(device):
    """A kernel compiled for one dtype must not serve the other, nor a result be written twice."""
    args = {dtype: inputs(1, 70, 1, dtype=dtype, device=device) for dtype in (BF16, FP16)}
    first = run(args[BF16])
    kept = [x.clone() for x in first]
    check(args[FP16])
    again = run(args[BF16])
    assert same(first, kept) and same(again, kept)
    assert all(x.data_ptr() != y.data_ptr() for x, y in zip(first, again, strict=True))


def test_two_runs_are_equal_to_the_bit(device):
    """Forward and gradients; a missing fence shows as one run in hundreds."""
    args = inputs(H=2, HV=4, K=128, lengths=[300, 1, 0, 200], h0_dtype=FP32, device=device)
    once = run(args)
    for _ in range(300 if device == "cuda" else 2):
        assert same(run(args), once)
    weights = torch.randn_like(once[0]), torch.randn_like(once[1])
    grads = gradients(run, args, weights)
    for _ in range(10 if device == "cuda" else 1):
        again = gradients(run, args, weights)
        assert all(torch.equal(grad, again[name]) for name, grad in grads.items())


def test_auto_cp(device):
    """Splitting a long sequence over the card is a choice of speed alone."""
    T = 8192 if device == "cuda" else 128
    args = inputs(1, T, 4, 4, regime="zero", device=device)
    reference = exact(args)
    for auto_cp in (True, False):
        outputs = run(args, auto_cp=auto_cp)
        assert all(rel_l2(x, y) <= CAP for x, y in zip(outputs, reference, strict=True))


@on_gpu
def test_own_stream():
    args = inputs(1, 2000, 4, device="cuda")
    expected = run(args)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # Work in front of the inputs that a launch on another stream would not wait for.
        torch.cuda._sleep(50_000_000)
        late = {name: x.clone() for name, x in args.items()}
        outputs = run(late)
    stream.synchronize()
    assert same(outputs, expected)


@on_gpu
@pytest.mark.parametrize("lengths", [None, [100, 0, 30]])
def test_no_host_synchronisation(lengths):
    args = inputs(1, 130, 2, lengths=lengths, h0_dtype=FP32, device="cuda")
    run(args)
    chunk_gated_delta_rule_fwd(**args, output_h=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(args)
        chunk_gated_delta_rule_fwd(**args, output_h=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device_than_the_current():
    args = inputs(1, 130, 2, device="cuda:1")
    check(args)
    assert torch.cuda.current_device() == 0


@on_gpu
def test_more_than_two_to_the_31_elements():
    """Offsets in 32 bits overflow to finite wrong numbers: the end against a run on it alone."""
    T, HV, end = 2**18 + 64, 64, 128
    args = inputs(1, T, 1, HV, 128, regime="zero", device="cuda")
    assert args["v"].numel() > 2**31
    o, ht = run(args)
    _, state = run({name: args[name][:, :-end] for name in TOKENS})
    rest = {name: args[name][:, -end:].clone() for name in TOKENS}
    assert same(run(rest, initial_state=state), (o[:, -end:], ht))


@on_gpu
def test_gradients_of_more_than_two_to_the_31_elements_of_state():
    """Both ends against themselves alone, cut off by gates that leave nothing. The states before all chunks are the most."""
    T, HV, end = 2**17 + 256, 64, 128
    args = inputs(1, T, 1, HV, 128, regime="zero", device="cuda")
    assert T // 64 * HV * 128 * 128 > 2**31
    args["g"][:, [end, T - end]] = -1000
    do = torch.randn_like(args["v"])

    def grads(rows):
        part = {name: args[name][:, rows] for name in TOKENS}
        return gradients(run, part, (do[:, rows], None))

    whole = grads(slice(None))
    for rows in (slice(end), slice(T - end, None)):
        for name, grad in grads(rows).items():
            assert rel_l2(whole[name][:, rows], grad) < 1e-3, name


@on_gpu
def test_first_call_in_a_spawned_process():
    """Device facts taken at import, or in the parent, are not those of a worker."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_work) <= CAP


def _work():
    args = inputs(1, 100, 2, device="cuda")
    return rel_l2(run(args)[0], exact(args)[0])


@on_gpu
def test_runs_on_the_cpu_where_the_gpu_is_hidden():
    code = (
        "import torch; from flash_qla_tl import chunk_gated_delta_rule as f; "
        "from flash_qla_tl.testing import inputs; "
        "assert not torch.cuda.is_available(); assert f(**inputs(1, 70, 1))[0].isfinite().all()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize("K, V", [(32, 48), (96, 128), (160, 64), (192, 64), (64, 256), (256, 128)])
def test_other_head_dims_run_in_torch(device, K, V):
    """Elsewhere they ran in the kernels and were wrong."""
    args = inputs(1, 70, 1, 2, K, V, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        check(args)
    with pytest.raises(ValueError, match=r"^backend must be .* got 'tilelang': the kernels need"):
        run(args, backend="tilelang")


@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
def test_wide_inputs_run_in_torch(device, dtype):
    args = inputs(1, 100, 1, 2, dtype=dtype, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        outputs = run(args)
    assert all(x.dtype == dtype for x in outputs)
    tolerance = 1e-5 if dtype == FP32 else 1e-12
    assert all(rel_l2(x, y) <= tolerance for x, y in zip(outputs, exact(args), strict=True))


@on_gpu
def test_says_once_why_it_runs_in_torch():
    dispatch._say_why.cache_clear()
    args = inputs(1, 10, 1, K=96, device="cuda")
    with pytest.warns(UserWarning, match="K=96"):
        run(args)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(args)


@on_gpu
def test_backends_agree():
    args = inputs(1, 200, 2, 4, h0_dtype=FP32, device="cuda")
    for x, y in zip(run(args, backend="tilelang"), run(args, backend="torch"), strict=True):
        assert rel_l2(x, y) <= CAP


def test_positional_call(device):
    """The five inputs, and then what follows them, in the order that callers know."""
    args = inputs(1, 70, 1, 2, h0_dtype=FP32, device=device)
    five, h0 = [args[name] for name in TOKENS], args["initial_state"]
    assert torch.equal(chunk_gated_delta_rule(*five)[0], run(args, initial_state=None)[0])
    assert same(chunk_gated_delta_rule(*five, 0.1, h0, True, True), run(args, scale=0.1, **NORM))


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("lengths", [None, [70, 0, 64, 1, 130]])
@pytest.mark.parametrize("K, V", [(64, 128), (128, 64)])
def test_parts_of_the_forward(device, K, V, lengths, state_v_first):
    args = inputs(2, 150, 2, 4, K, V, lengths=lengths, h0_dtype=FP32, state_v_first=state_v_first, device=device)
    double = {**args, **{name: x.double() for name, x in floats(args).items()}}
    g_cumsum, A, o, h, ht = ours = chunk_gated_delta_rule_fwd(**args, output_h=True)
    theirs = chunk_gated_delta_rule_fwd(**double, output_h=True)
    assert [x.dtype for x in ours] == [FP32, BF16, BF16, BF16, FP32]
    assert [x.shape for x in ours] == [x.shape for x in theirs]
    assert rel_l2(g_cumsum, theirs.g_cumsum) <= 1e-6
    assert rel_l2(A, theirs.A) <= CAP
    assert not A[theirs.A == 0].any()
    assert rel_l2(h, theirs.h) <= CAP
    assert rel_l2(o, theirs.o) <= CAP and rel_l2(ht, theirs.final_state) <= CAP

    if lengths is None:
        assert h.shape[1] == 3
        assert torch.equal(h[:, 0], args["initial_state"].to(BF16))
    else:
        cu = args["cu_seqlens"]
        assert h.shape[1] == 265 // 64 + 5 and not h[:, 7:].any()
        few = chunk_gated_delta_rule_fwd(**args, output_h=True, cu_seqlens_cpu=cu.cpu())
        assert torch.equal(few.h, h[:, :7])
        first_chunks = h[0, [0, 2, 3, 4]]
        assert torch.equal(first_chunks, args["initial_state"][[0, 2, 3, 4]].to(BF16))


def test_parts_only_on_request(device):
    args = inputs(1, 70, 1, device=device)
    out = chunk_gated_delta_rule_fwd(**args, output_final_state=False)
    assert out.h is None and out.final_state is None
    assert not chunk_gated_delta_rule_fwd(**{**args, "g": None}).g_cumsum.any()


def test_forward_alone_records_no_graph(device):
    args = inputs(1, 70, 1, device=device)
    args["q"].requires_grad_()
    assert not any(x.requires_grad for x in chunk_gated_delta_rule_fwd(**args) if x is not None)


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("h0_dtype", [None, FP32, BF16], ids=str)
@pytest.mark.parametrize("with_dht", [False, True])
@pytest.mark.parametrize("regime", ["model", "strong"])
def test_backward_alone(device, regime, with_dht, h0_dtype, state_v_first):
    """As frameworks with an autograd of their own call it; dh0 also where nothing used ht."""
    args = inputs(
        regime=regime, H=2, HV=4, lengths=[70, 0, 30], h0_dtype=h0_dtype, state_v_first=state_v_first, device=device
    )
    fwd = chunk_gated_delta_rule_fwd(**args)
    do = torch.randn_like(fwd.o)
    dht = torch.randn_like(fwd.final_state) if with_dht else None
    bwd = chunk_gated_delta_rule_bwd(**{**args, "g": fwd.g_cumsum}, A=fwd.A, do=do, dht=dht)
    theirs = gradients(exact, args, (do, dht))
    names = dict(q=bwd.dq, k=bwd.dk, v=bwd.dv, beta=bwd.db, g=bwd.dg, initial_state=bwd.dh0)
    for name, grad in names.items():
        if name in theirs:
            floor = GATE_GRADIENT_FLOOR if name in ("g", "beta") else GRADIENT_FLOOR
            assert gradient_error(name, grad, theirs, args, (do, dht)) <= floor, name
    assert [x.dtype for x in bwd[:5]] == [BF16, BF16, BF16, FP32, FP32]
    assert bwd.dh0 is None if h0_dtype is None else bwd.dh0.dtype == FP32


def test_backward_alone_without_a_gate(device):
    args = {**inputs(1, 70, 1, device=device), "g": None}
    fwd = chunk_gated_delta_rule_fwd(**args)
    bwd = chunk_gated_delta_rule_bwd(**args, A=fwd.A, do=fwd.o)
    assert bwd.dg is None and bwd.dh0 is None and bwd.dq.isfinite().all()


@pytest.mark.parametrize("regime", GATES)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_gradients(device, dtype, regime):
    kwargs = {"dtype": dtype, "regime": regime, "h0_dtype": FP32, "device": device}
    check_gradients(inputs(H=2, HV=4, lengths=[70, 0, 1, 130], **kwargs))
    check_gradients(inputs(2, 100, 1, 2, 128, 64, **kwargs))


def test_gradients_of_fp16_and_a_small_scale(device):
    """The gradient of the gate once was 4% off here."""
    shape = (4, 1024, 4) if device == "cuda" else (1, 256, 2)
    grads = check_gradients(inputs(*shape, dtype=FP16, device=device, K=128), scale=0.1)
    assert grads["g"].dtype == FP32


@pytest.mark.parametrize("extreme", [False, True])
def test_gradients_under_strong_decay(device, extreme):
    """-21 a token: terms that cancel in the gradient of the gate are far larger than it is."""
    args = inputs(H=2, lengths=[47, 81], K=128, device=device)
    A_log = torch.full((2,), 16.0, device=device).log()
    if extreme:
        A_log[0] = -torch.inf  # no decay in this head
    x = 0.5 * torch.randn_like(args["g"])
    args["g"] = -A_log.exp() * torch.nn.functional.softplus(x + 1)
    grads = check_gradients(args)
    # A decay before anything was written has nothing to act on.
    first = grads["g"][0, [0, 47]]
    assert first.abs().max() <= 1e-5 * max(1.0, grads["g"].abs().max().item())


@pytest.mark.parametrize("final_state", [False, True])
@pytest.mark.parametrize("h0_dtype", [None, FP32, BF16], ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_with_and_without_every_optional_input(device, packed, gated, h0_dtype, final_state):
    """A backward once returned one gradient too many, and one of h0 only if ht had one."""
    lengths = [60, 0, 40] if packed else None
    args = inputs(1, 100, 1, 2, lengths=lengths, h0_dtype=h0_dtype, device=device)
    if not gated:
        args["g"] = None
    grads = check_gradients(args, final_state=final_state)
    assert h0_dtype is None or grads["initial_state"].any()


@pytest.mark.parametrize("name", [*TOKENS, "initial_state"])
def test_gradient_of_one_input_alone(device, name):
    args = inputs(1, 70, 1, 2, h0_dtype=FP32, device=device)
    args[name].requires_grad_()
    o, ht = run(args)
    (o.float().sum() + ht.sum()).backward()
    assert args[name].grad.isfinite().all() and args[name].grad.any()
    assert all(x.grad is None for other, x in args.items() if other != name)


def test_gradient_of_the_final_state_alone(device):
    args = inputs(1, 70, 1, 2, h0_dtype=FP32, device=device)
    leaves = {name: x.requires_grad_() for name, x in args.items()}
    ht = run(leaves)[1]
    weights = torch.randn_like(ht)
    ht.backward(weights)
    theirs = gradients(exact, args, (torch.zeros_like(args["v"]), weights))
    for name in ("k", "v", "g", "beta", "initial_state"):
        floor = GATE_GRADIENT_FLOOR if name in ("g", "beta") else GRADIENT_FLOOR
        assert rel_l2(leaves[name].grad, theirs[name]) <= floor, name
    assert leaves["q"].grad is None or not leaves["q"].grad.any()


def test_backward_twice_on_a_kept_graph(device):
    args = {name: x.requires_grad_() for name, x in inputs(1, 70, 1, device=device).items()}
    o = run(args)[0].sum()
    once = torch.autograd.grad(o, args.values(), retain_graph=True)
    assert same(once, torch.autograd.grad(o, args.values()))


def test_checkpointing(device):
    args = inputs(H=1, HV=2, lengths=[30, 40], h0_dtype=FP32, device=device)
    weights = torch.randn_like(args["v"]), torch.randn_like(args["initial_state"])
    again = lambda args: checkpoint(run, args, use_reentrant=False)  # noqa: E731
    ours, theirs = gradients(again, args, weights), gradients(run, args, weights)
    assert all(torch.equal(grad, theirs[name]) for name, grad in ours.items())


def test_autocast(device):
    """Neither the fp32 inputs nor the products of the torch path may be cast on the way."""
    args = inputs(1, 70, 1, 2, normalised=False, device=device)
    options = {**NORM, **SIGMOID}
    leaves = {name: x.requires_grad_() for name, x in args.items()}
    expected = run(leaves, **options)[0]
    grads = torch.autograd.grad(expected.sum(), leaves.values())
    with torch.autocast(device, dtype=BF16):
        o = run(leaves, **options)[0]
    assert torch.equal(o, expected)
    assert same(torch.autograd.grad(o.sum(), leaves.values()), grads)


def test_autocast_around_the_backward(device):
    args = inputs(1, 70, 1, 2, device=device)
    fwd = chunk_gated_delta_rule_fwd(**args)
    back = {**args, "g": fwd.g_cumsum, "A": fwd.A, "do": fwd.o}
    expected = chunk_gated_delta_rule_bwd(**back)
    with torch.autocast(device, dtype=BF16):
        assert same(chunk_gated_delta_rule_bwd(**back)[:5], expected[:5])


def test_no_graph_without_need(device):
    args = inputs(1, 70, 1, device=device)
    args["q"].requires_grad_()
    with torch.no_grad():
        assert not run(args)[0].requires_grad
    assert run(args)[0].requires_grad


@pytest.mark.parametrize("needs_grad", [False, True])
def test_lengths_that_the_host_knows(monkeypatch, needs_grad):
    """cu_seqlens_cpu tells the kernels how many chunks there are, and how many the longest sequence has."""
    emulated_kernels.install(monkeypatch)
    said = []

    def chunk_fwd(*args, **options):
        said.append((options["num_chunks"], options["longest"]))
        return emulated_kernels.chunk_fwd(*args, **options)

    monkeypatch.setattr(sys.modules[f"{emulated_kernels.MODULE}chunk_fwd"], "chunk_fwd", chunk_fwd)
    args = inputs(H=1, K=64, lengths=[130, 0, 64])
    args["v"].requires_grad_(needs_grad)
    chunk_gated_delta_rule(**args)
    chunk_gated_delta_rule(**args, cu_seqlens_cpu=args["cu_seqlens"])
    assert said == [(None, None), (4, 3)]


@pytest.mark.parametrize("strong", [-1e3, -1e6, -1e9])
def test_a_strong_gate_is_its_own_token(device, strong):
    """However strong: the tokens before it do not know it, to the bit, nor does the sum of their gates."""
    args = inputs(1, 130, 1, 2, 128, g_dtype=FP32, device=device)
    other = {**args, "g": args["g"].clone()}
    for token in (21, 64, 99):
        args["g"][:, token], other["g"][:, token] = -20, strong
        for call in (run, lambda x: chunk_gated_delta_rule_fwd(**x)[:3]):
            assert all(
                torch.equal(x[:, :token], y[:, :token]) for x, y in zip(call(args)[:1], call(other)[:1], strict=True)
            )
        args["g"][:, token] = other["g"][:, token] = -0.1


def test_norms_of_keys_far_apart(device):
    """With the L2 norm inside, a short key behind a long one is as good as any: nothing overflows."""
    args = inputs(1, 70, 1, 1, 128, device=device)
    direction = args["k"][:, 3:4]
    args["k"] = (direction + args["k"]).to(BF16)
    lengths = torch.logspace(-3, 2.5, 70, device=device)[torch.randperm(70, device=device)]
    args["k"] = (args["k"] * lengths[:, None, None]).to(BF16)
    check(args, **NORM)
