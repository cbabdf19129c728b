"""Kimi Delta Attention through its public functions: small on the CPU, the same and more on the GPU.

The reference is the chunked form in float64, which test_kda_reference.py has shown to be the
recurrence. The budget of an error is twice that of a 16-bit emulation of the same form on the same
inputs, and never more than testing.CAP. What failed in the field once is a case here.
"""

import inspect
import warnings

import emulated_kda
import pytest
import torch

from flash_qla_tl import chunk_kda, dispatch, get_workspace_size, kda_fwd
from flash_qla_tl.compat import flash_kda
from flash_qla_tl.testing import CAP, CAP_NEG_EIGVAL, KDA_GATES, KDA_LOWER_BOUND_GATES, budget, emulated, rel_l2
from flash_qla_tl.testing import kda_inputs as any_inputs

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TOKENS = ("q", "k", "v", "g", "beta")
# kda_fwd does what these ask for unasked.
INSIDE = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first")

# Lengths on both sides of a chunk, and of the 16 x 16 blocks of its inverse and of its decay.
TAILS = [1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 63, 64, 65, 81, 97, 127, 128, 129, 130]

on_gpu = pytest.mark.gpu


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_gpu)])
def device(request):
    """The torch path, and the kernels."""
    return request.param


@pytest.fixture(params=["cpu", "emulated", pytest.param("cuda", marks=on_gpu)])
def anywhere(request, monkeypatch):
    """... and the kernel path around an emulated kernel."""
    if request.param != "emulated":
        return request.param
    emulated_kda.install(monkeypatch)
    return "cpu"


def kda_inputs(*args, **kwargs):
    """K = V = 128, which is what the kernels take, unless told otherwise."""
    return any_inputs(*args, **kwargs) if len(args) > 4 else any_inputs(*args, **{"K": 128, **kwargs})


def in_kernels(args):
    q, v = args["q"], args["v"]
    here = (q.is_cuda or emulated_kda.installed()) and q.dtype in (BF16, FP16) and q.shape[3] == v.shape[3] == 128
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in floats(args).values())
    return here and not needs_grad


def run(args, **options):
    """Where there are kernels for these tensors, insists on them."""
    args = {"output_final_state": True, **args, **options}
    return chunk_kda(**{"backend": "tilelang" if in_kernels(args) else "auto", **args})


def floats(args):
    return {name: x for name, x in args.items() if torch.is_tensor(x) and x.is_floating_point()}


def exact(args, **options):
    args = {**args, **options}
    return run({**args, **{name: x.double() for name, x in floats(args).items()}}, backend="torch")


def check_outputs(outputs, args, cap=CAP):
    """o and the final state against their budgets, and each sequence and head by itself."""
    reference, emulation = exact(args), emulated(**args)
    for name, x, y, e in zip(("o", "ht"), outputs, reference, emulation, strict=True):
        assert x.isfinite().all(), name
        assert rel_l2(x, y) <= budget(e, y, cap), name
    cu = args.get("cu_seqlens")
    for n, (x, y) in enumerate(zip(outputs[1], reference[1], strict=True)):
        bos, eos = (0, None) if cu is None else (int(cu[n]), int(cu[n + 1]))
        row = n if cu is None else 0
        o, exact_o, honest = (whole[row, bos:eos].transpose(0, 1) for whole in (outputs[0], reference[0], emulation[0]))
        # Where q and k of a single token are nearly orthogonal, all of o is rounding.
        typical = 0.5 * reference[0].square().mean().sqrt() * o[0].numel() ** 0.5
        limit = max(2 * cap, 2 * _worst_head(honest, exact_o, typical))
        assert _worst_head(o, exact_o, typical) <= limit, f"o of sequence {n}"
        assert _worst_head(x, y) <= 2 * cap, f"ht of sequence {n}"


def check(args, cap=CAP, **options):
    """One call of chunk_kda against its budgets; returns what it gave."""
    args = {**args, **options}
    outputs = run(args)
    assert outputs[0].dtype == args["q"].dtype and outputs[1].dtype == FP32
    check_outputs(outputs, args, cap)
    return outputs


def _worst_head(x, y, typical=0.0):
    """The largest relative error of a head, one that is smaller than typical being taken for that."""
    if not y.numel():
        return 0.0
    error, size = (x.double() - y).flatten(1).norm(dim=1), y.flatten(1).norm(dim=1).clamp_min(typical)
    return (error / size.where(size > 0, 1)).max().item()


def fwd_inputs(*args, **kwargs):
    """Arguments of kda_fwd, and those of chunk_kda that mean the same."""
    given = kda_inputs(*args, **{"state_v_first": True, **kwargs})
    forward = {name: x for name, x in given.items() if name not in INSIDE}
    return {"scale": 0.09, **forward}, {"scale": 0.09, **given}


def gradients(call, args, weights):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in floats(args).items()}
    outputs = call({**args, **leaves})
    # Without a sequence no state depends on anything.
    pairs = [(x, w.to(x.dtype)) for x, w in zip(outputs, weights, strict=True) if x.requires_grad]
    outputs, weights = zip(*pairs, strict=True)
    return dict(zip(leaves, torch.autograd.grad(outputs, leaves.values(), weights), strict=True))


def same(ours, theirs):
    return all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("regime", KDA_GATES)
@pytest.mark.parametrize("K, V", [(64, 64), (64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_dtypes_and_head_dims(device, dtype, K, V, regime):
    kwargs = {"dtype": dtype, "regime": regime, "h0_dtype": FP32, "device": device}
    check(kda_inputs(2, 150, 1, 2, K, V, **kwargs))
    check(kda_inputs(H=1, HV=2, K=K, V=V, lengths=[65, 1, 0, 130], **kwargs))


@pytest.mark.parametrize(
    "H, HV", [(1, 1), (1, 2), (1, 3), (1, 8), (3, 3), (12, 12), (2, 6), (4, 32), pytest.param(9, 72, marks=on_gpu)]
)
def test_heads(device, H, HV):
    """Grouped value heads and counts that no power of two divides, unlike from head to head."""
    args = kda_inputs(2, 100, H, HV, h0_dtype=FP32, device=device)
    args["A_log"] = torch.linspace(-2, 2, HV, device=device)
    args["dt_bias"] = torch.randn(HV, 128, device=device)
    check(args)


@pytest.mark.parametrize("regime", KDA_GATES)
def test_lengths_packed(device, regime):
    """The last valid row of a chunk decides its state: taken elsewhere, every tail is wrong."""
    lengths = list(range(131)) if device == "cuda" else [0, *TAILS, 0]
    check(kda_inputs(H=1, HV=2, lengths=lengths, regime=regime, h0_dtype=FP32, device=device))


@pytest.mark.parametrize("T", TAILS)
def test_lengths_dense(device, T):
    check(kda_inputs(2, T, 1, 2, h0_dtype=FP32, device=device))


@pytest.mark.parametrize("HV", [1, pytest.param(8, marks=on_gpu)])
def test_ragged_behind_full_chunks(device, HV):
    """A kernel keeps chunks in flight: a last chunk in every place of its rings, once round and again.

    With 8 heads of 14 sequences a CTA carries a whole head, and half of one otherwise.
    """
    chunks = range(2, 9) if device == "cuda" else (3,)
    lengths = [64 * n + tail for n in chunks for tail in (1, 40)]
    check(kda_inputs(H=1, HV=HV, lengths=lengths, regime="faint", h0_dtype=FP32, device=device))


@pytest.mark.parametrize("regime", KDA_GATES)
def test_gates_that_change_from_chunk_to_chunk(device, regime):
    """A kernel may choose its form for each chunk: gentle, this regime, gentle, and it again."""
    args = kda_inputs(1, 256, 2, regime=regime, device=device)
    args["g"][:, :64] = args["g"][:, 128:192] = -1e-3
    check(args)


@pytest.mark.parametrize("strong", [-0.5, -1.0, -1.19, -1.5, -2.0, -4.0, -20.0])
@pytest.mark.parametrize("channels", [slice(None), slice(5, 6)], ids=["all", "one"])
def test_decay_of_a_chunk_around_the_range_of_16_bits(device, strong, channels):
    """Where one anchor for 64 tokens stops to be enough, and far beyond, on one channel or on all."""
    args = kda_inputs(1, 130, 1, 2, regime="zero", device=device)
    args["g"][..., channels] = strong
    check(args)


@pytest.mark.parametrize("value", [-5.0, -5.9, -20.0, -1000.0])
def test_finite_for_strong_gates(device, value):
    """On every channel, and on some beside others that do not fade at all."""
    args = kda_inputs(1, 130, 1, 2, regime="zero", h0_dtype=FP32, device=device)
    for channels in (slice(None), slice(0, None, 2)):
        args["g"][..., channels] = value
        check(args)
        args["g"].zero_()


def test_slightly_positive_gates(device):
    args = kda_inputs(1, 100, 1, regime="zero", device=device)
    args["g"].fill_(0.01)
    check(args)


@pytest.mark.parametrize("scale", [None, 0.0, 0.1, 1, -2.0])
def test_scale(anywhere, scale):
    """0.0 is a value, and no value may be baked into a kernel under another's name."""
    o, _ = check(kda_inputs(1, 70, 1, device=anywhere), scale=scale)
    assert scale != 0.0 or not o.any()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("beta", ["beta", "sigmoid", "neg_eigval"])
@pytest.mark.parametrize("norm", [False, True])
def test_activations(anywhere, norm, beta, inside):
    regime = "normal" if inside else "spike"
    args = kda_inputs(H=2, HV=4, lengths=[65, 0, 30], regime=regime, activations=norm, h0_dtype=FP32, device=anywhere)
    shape = args["beta"].shape
    args["beta"] = torch.rand(shape, device=anywhere) if beta == "beta" else torch.randn(shape, device=anywhere)
    args["use_beta_sigmoid_in_kernel"] = beta != "beta"
    args["allow_neg_eigval"] = beta == "neg_eigval"
    check(args, CAP_NEG_EIGVAL if beta == "neg_eigval" else CAP)


@pytest.mark.parametrize("lower_bound", [-5.0, -1, 0, None])
def test_lower_bound(anywhere, lower_bound):
    """It chooses the formula of the gate, and 0 is a bound."""
    args = kda_inputs(1, 100, 1, 2, h0_dtype=FP32, device=anywhere)
    check(args, lower_bound=lower_bound)


@pytest.mark.parametrize("lower_bound", [-5.0, -5.9, -11.0])
def test_gates_at_their_lower_bound(device, lower_bound):
    """On every channel of every token, where factors of one anchor in the middle of a block overflow elsewhere."""
    args = kda_inputs(1, 64, 1, 2, 128, regime="saturated", h0_dtype=FP32, device=device)
    check(args, lower_bound=lower_bound)


def test_no_A_log_is_one_of_zeros(anywhere):
    args = kda_inputs(1, 100, 1, 2, regime="bias 2", device=anywhere)
    assert same(check({**args, "A_log": None}), run(args))


def test_no_dt_bias_is_one_of_zeros(anywhere):
    args = kda_inputs(1, 100, 1, 2, regime="softplus", device=anywhere)
    assert same(check({**args, "dt_bias": None}), run(args))


def test_shapes_of_dt_bias(anywhere):
    """[HV, K] and flat; of another stride too."""
    args = kda_inputs(1, 100, 1, 2, device=anywhere)
    bias = torch.randn(2, 128, device=anywhere)
    args["dt_bias"] = bias
    expected = check(args)
    assert same(run(args, dt_bias=bias.flatten()), expected)
    assert same(run(args, dt_bias=bias.T.contiguous().T), expected)


def test_parameters_of_a_gate_outside_are_not_read(anywhere):
    args = kda_inputs(1, 70, 1, 2, regime="spike", device=anywhere)
    nan = torch.full((1,), torch.nan, device=anywhere)
    assert same(run(args, A_log=nan, dt_bias=nan, lower_bound=1.0), run(args))


@pytest.mark.parametrize("beta_dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("g_dtype", [FP32, BF16, FP16], ids=str)
def test_dtypes_of_gate_and_beta(anywhere, g_dtype, beta_dtype):
    args = kda_inputs(1, 100, 1, 2, g_dtype=g_dtype, beta_dtype=beta_dtype, device=anywhere)
    check(args)
    for parameter in ("A_log", "dt_bias"):
        check(args, **{parameter: torch.randn_like(args[parameter]).to(g_dtype)})


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("h0_dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("K, V", [(64, 128), (128, 128)])
def test_initial_state(anywhere, K, V, h0_dtype, state_v_first):
    """Read in the dtype and layout it has: a square head dim hides a mix-up from every check."""
    args = kda_inputs(
        H=1, HV=2, K=K, V=V, lengths=[70, 1, 64], h0_dtype=h0_dtype, state_v_first=state_v_first, device=anywhere
    )
    o, ht = check(args)
    other = {**args, "initial_state": args["initial_state"].mT.contiguous(), "state_v_first": not state_v_first}
    assert same(run(other), (o, ht.mT))


def test_former_name_of_the_layout(anywhere):
    args = kda_inputs(1, 70, 1, K=64, V=128, h0_dtype=FP32, state_v_first=True, device=anywhere)
    expected = run(args)
    del args["state_v_first"]
    with pytest.warns(DeprecationWarning, match="use state_v_first"):
        assert same(run(args, transpose_state_layout=True), expected)


def test_final_state_only_on_request(anywhere):
    args = kda_inputs(1, 10, 1, h0_dtype=FP32, device=anywhere)
    assert chunk_kda(**args)[1] is None
    assert len(chunk_kda(**args, return_intermediate_states=True)) == 3


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("lengths", [None, [70, 0, 64, 1, 130]])
@pytest.mark.parametrize("K, V", [(64, 128), (128, 64), (128, 128)])
def test_intermediate_states(anywhere, K, V, lengths, state_v_first):
    """Those that a run over the tokens before ends with."""
    args = kda_inputs(2, 150, 2, 4, K, V, lengths=lengths, h0_dtype=FP32, state_v_first=state_v_first, device=anywhere)
    args["return_intermediate_states"] = True
    o, ht, h = run(args)
    theirs = exact(args)
    assert o.dtype == h.dtype == BF16 and ht.dtype == FP32
    assert h.shape == theirs[2].shape and h.shape[3:] == ht.shape[2:]
    assert all(rel_l2(x, y) <= CAP for x, y in zip((o, ht, h), theirs, strict=True))

    initial_state = args["initial_state"].to(BF16)
    if lengths is None:
        assert h.shape[1] == 3
        assert torch.equal(h[:, 0], initial_state)
        first = {**args, **{name: args[name][:, :64] for name in TOKENS}}
        assert rel_l2(h[:, 1], exact(first)[1]) <= CAP
    else:
        assert h.shape[1] == 265 // 64 + 5 and not h[:, 7:].any()
        few = run(args, cu_seqlens_cpu=args["cu_seqlens"].cpu())[2]
        assert torch.equal(few, h[:, :7])
        assert torch.equal(h[0, [0, 2, 3, 4]], initial_state[[0, 2, 3, 4]])
    args["q"].requires_grad_()
    assert not run(args)[2].requires_grad


@on_gpu
def test_intermediate_states_of_whole_heads():
    """The variant for many heads."""
    args = kda_inputs(H=4, HV=8, lengths=[70 * n for n in range(20)], h0_dtype=FP16, dtype=FP16, device="cuda")
    for x, y in zip(
        run(args, return_intermediate_states=True), exact(args, return_intermediate_states=True), strict=True
    ):
        assert rel_l2(x, y) <= CAP


@pytest.mark.parametrize("split", [1, 63, 64, 65, 128, 299])
def test_resuming(anywhere, split):
    """A prompt in two parts, where an initial state was once ignored."""
    args = kda_inputs(1, 300, 2, regime="faint", h0_dtype=FP32, device=anywhere)
    o, ht = exact(args)
    first = {**args, **{name: args[name][:, :split] for name in TOKENS}}
    o1, state = run(first)
    rest = {**args, **{name: args[name][:, split:] for name in TOKENS}}
    o2, state = run(rest, initial_state=state)
    assert rel_l2(torch.cat((o1, o2), dim=1), o) <= CAP
    assert rel_l2(state, ht) <= CAP


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_dtype_of_cu_seqlens(anywhere, dtype):
    check(kda_inputs(H=1, lengths=[70, 3], cu_dtype=dtype, device=anywhere))


def test_cu_seqlens_cpu(anywhere):
    args = kda_inputs(H=1, lengths=[64, 65, 71], device=anywhere)
    assert same(run(args, cu_seqlens_cpu=args["cu_seqlens"].cpu()), run(args))


def test_fresh_cu_seqlens_each_time(anywhere):
    """A table cached under the address of a tensor outlived it, and its address was used again."""
    for _ in range(200 if anywhere == "cuda" else 5):
        lengths = torch.randint(1, 100, (4,)).tolist()
        args = kda_inputs(H=1, T=400, lengths=lengths, device=anywhere)
        cu = args["cu_seqlens"].clone()
        outputs = run({**args, "cu_seqlens": cu})
        del cu
        assert all(rel_l2(x, y) <= CAP for x, y in zip(outputs, exact(args), strict=True))


def test_cu_seqlens_changed_in_place(anywhere):
    """The same tensor, the same N and T, other boundaries."""
    args = kda_inputs(H=1, lengths=[64, 65, 71], device=anywhere)
    check(args)
    args["cu_seqlens"].copy_(torch.tensor([0, 1, 130, 200]))
    check(args)


def test_packed_is_separate(device):
    """State leaked across sequences; here one of NaN lies between."""
    args = kda_inputs(H=1, HV=2, lengths=[70, 33, 64], h0_dtype=FP32, device=device)
    for name in TOKENS:
        args[name][:, 70:103] = torch.nan
    o, ht = run(args)
    del args["cu_seqlens"]
    for n, bos, eos in ((0, 0, 70), (2, 103, 167)):
        own = {name: args[name][:, bos:eos].clone() for name in TOKENS}
        alone = exact({**args, **own, "initial_state": args["initial_state"][n : n + 1]})
        assert rel_l2(o[:, bos:eos], alone[0]) <= CAP
        assert rel_l2(ht[n : n + 1], alone[1]) <= CAP


@pytest.mark.parametrize("tail", [17, 33, 49, 63, 64 + 17, 64 + 33])
def test_tail_beside_large_values(device, tail):
    """A mask forgotten in one 16 x 16 block lets the next sequence in."""
    args = kda_inputs(H=1, HV=2, lengths=[64, tail, 64], device=device)
    alone = {**args, **{name: args[name][:, 64 : 64 + tail].clone() for name in TOKENS}}
    del alone["cu_seqlens"]
    for name in TOKENS:
        args[name][:, 64 + tail :] = 1e4 if name in "qkv" else -1.0
    o, ht = run(args)
    reference = exact(alone)
    assert rel_l2(o[:, 64 : 64 + tail], reference[0]) <= CAP
    assert rel_l2(ht[1:2], reference[1]) <= CAP


@pytest.mark.parametrize("future", ["random", "saturated", "no decay", "reset"])
@pytest.mark.parametrize("past", [1, 20, 40, 63, 70])
def test_the_future_changes_nothing(device, past, future):
    """An anchor in the middle of a block let gates behind a token round its output otherwise.

    Two continuations of ``past`` tokens that end within a chunk, and within 16 rows of it. Whole exponents are
    what anchors take out: to the bit, though no more than rounding is promised.
    """
    first, second = (kda_inputs(1, 100, 1, 2, device=device) for _ in range(2))
    if future != "random":
        second["g"].fill_(20 if future == "saturated" else -20)
    if future == "reset":
        for args in (first, second):
            args.update(use_gate_in_kernel=False, g=-args["g"].abs())
        second["g"].fill_(-1000)
    for name in ("q", "k", "v") if future == "saturated" else ():
        second[name] *= -30
    for name in TOKENS:
        second[name][:, :past] = first[name][:, :past]
    o1, o2 = (run(args)[0] for args in (first, second))
    assert o1.isfinite().all() and o2.isfinite().all()
    assert torch.equal(o1[:, :past], o2[:, :past])


@pytest.mark.parametrize("h0_dtype", [None, FP32], ids=["zeros", "h0"])
def test_empty_sequences(anywhere, h0_dtype):
    """What was left in shared memory once became the state of a sequence without tokens."""
    args = kda_inputs(H=2, lengths=[0, 64, 0, 36, 0], h0_dtype=h0_dtype, device=anywhere)
    _, ht = check(args)
    state = args.get("initial_state", torch.zeros_like(ht))
    assert torch.equal(ht[::2], state[::2])


@pytest.mark.parametrize("h0_dtype", [None, FP32], ids=["zeros", "h0"])
def test_loops_of_no_and_of_one_iteration(device, h0_dtype):
    """Each role of a kernel must come through, or the others wait for it for ever."""
    check(kda_inputs(H=2, K=128, lengths=[0, 1, 2, 63, 64, 65], h0_dtype=h0_dtype, device=device))


@on_gpu
@pytest.mark.parametrize("state", [None, "zeros", "random"])
def test_many_short_sequences_and_a_long_one(state):
    """Hung elsewhere as soon as there was an initial state, of zeros even."""
    h0_dtype = None if state is None else FP32
    args = kda_inputs(H=2, HV=4, K=128, lengths=[5] * 200 + [8192], h0_dtype=h0_dtype, device="cuda")
    if state == "zeros":
        args["initial_state"].zero_()
    check(args)


@pytest.mark.parametrize("shape", [(0, 64), (1, 0), (2, 0)])
def test_nothing_at_all_dense(anywhere, shape):
    args = kda_inputs(*shape, 2, 4, h0_dtype=FP32, device=anywhere)
    o, ht, h = run(args, return_intermediate_states=True)
    assert o.shape == (*shape, 4, 128) and torch.equal(ht, args["initial_state"])
    assert h.shape == (shape[0], -(-shape[1] // 64), 4, 128, 128)
    del args["initial_state"]
    o, ht = run(args)
    assert not ht.any()
    grads = gradients(run, args, (torch.zeros_like(o), torch.ones_like(ht)))
    assert all(grad.shape == args[name].shape for name, grad in grads.items())


@pytest.mark.parametrize("h0_dtype", [None, FP32, BF16], ids=str)
@pytest.mark.parametrize("H", [1, 4])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_nothing_at_all_packed(anywhere, lengths, H, h0_dtype):
    """T = 0: another implementation aborted."""
    args, both = fwd_inputs(H=H, T=0, lengths=lengths, h0_dtype=h0_dtype, device=anywhere)
    state = both.get("initial_state", torch.zeros(len(lengths), H, 128, 128, device=anywhere))
    o, ht = run(both)
    assert o.shape == (1, 0, H, 128) and torch.equal(ht, state.float())
    final_state = torch.full_like(state, torch.nan)
    assert kda_fwd(**args, final_state=final_state).shape == (1, 0, H, 128)
    assert torch.equal(final_state, state)


@pytest.mark.parametrize("lengths, T", [([73, 42, 94], 256), ([0, 30], 64), ([], 40)])
def test_rows_past_the_last_sequence(anywhere, lengths, T):
    """Zero, and so are their gradients: what is summed over all rows must not meet garbage."""
    args = kda_inputs(H=1, HV=2, lengths=lengths, T=T, device=anywhere)
    end = sum(lengths)
    for name in TOKENS:
        args[name][:, end:] = torch.nan
    o, ht = run(args)
    assert not o[:, end:].any()
    assert o.isfinite().all() and ht.isfinite().all()
    grads = gradients(run, args, (torch.randn_like(o), torch.randn_like(ht)))
    assert all(grad.isfinite().all() for grad in grads.values())
    assert not any(grads[name][:, end:].any() for name in TOKENS)


def test_strided_inputs(anywhere):
    """Views of one fused projection, transposes, broadcasts: right, and equal to their copies."""
    B, T, H, HV, D = 2, 100, 2, 4, 128
    qkv = torch.randn(B, T, (2 * H + HV) * D, dtype=BF16, device=anywhere)
    q, k, v = qkv.split((H * D, H * D, HV * D), dim=-1)
    given = kda_inputs(B, T, H, HV, D, regime="normal", device=anywhere)
    views = {
        "q": q.unflatten(-1, (H, D)),
        "k": k.unflatten(-1, (H, D)),
        "v": v.unflatten(-1, (HV, D)),
        "g": torch.randn(B, HV, T, D, device=anywhere).transpose(1, 2),
        "beta": torch.rand(B, T, 1, device=anywhere).expand(B, T, HV),
        "initial_state": torch.randn(B, HV, D, D, device=anywhere).mT,
        "A_log": torch.randn(HV, 3, device=anywhere)[:, 1],
    }
    copies = {name: x.contiguous() for name, x in views.items()}
    ours, theirs = check({**given, **views}), run({**given, **copies})
    assert (
        same(ours, theirs) or anywhere == "cpu" and all(rel_l2(x, y) <= 1e-3 for x, y in zip(ours, theirs, strict=True))
    )


@pytest.mark.parametrize("offset, last", [(1, 1), (4, 1), (0, 2)])
def test_strides_a_kernel_cannot_take(anywhere, offset, last):
    """Rows that are not 16-byte aligned, and a last stride of 2; of the outputs too."""
    args, both = fwd_inputs(1, 70, 1, 2, g_dtype=BF16, device=anywhere)

    def odd(x):
        return x.new_zeros(*x.shape[:-1], (x.shape[-1] + offset) * last)[..., offset * last :: last].copy_(x)

    o, ht = run(both)
    views = {name: odd(args[name]) for name in ("q", "k", "v", "g")}
    views |= {"out": odd(o.new_zeros(o.shape)), "final_state": odd(torch.zeros_like(ht))}
    assert not any(x.is_contiguous() for x in views.values())
    assert torch.equal(kda_fwd(**{**args, **views}), o) and torch.equal(views["final_state"], ht)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP64], ids=str)
def test_states_at_odd_addresses(anywhere, dtype):
    """A kernel that moves two numbers at a time stops the process there."""
    args, both = fwd_inputs(H=1, HV=2, lengths=[70, 5], h0_dtype=dtype, device=anywhere)
    h0 = args["initial_state"]

    def odd(x):
        return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)

    o, ht = run(both)
    final_state = odd(torch.zeros_like(h0))
    assert torch.equal(kda_fwd(**{**args, "initial_state": odd(h0)}, final_state=final_state), o)
    assert torch.equal(final_state, ht.to(dtype))
    one_too_many = torch.cat((h0, h0), -1).flatten(2).unflatten(2, (128, 256))[..., :128]
    assert torch.equal(kda_fwd(**{**args, "initial_state": one_too_many}), o)


def test_one_dtype_after_the_other(anywhere):
    """A kernel compiled for one dtype must not serve the other, nor a result be written twice."""
    args = {dtype: kda_inputs(1, 70, 1, dtype=dtype, device=anywhere) for dtype in (BF16, FP16)}
    first = run(args[BF16])
    kept = [x.clone() for x in first]
    check(args[FP16])
    again = run(args[BF16])
    assert same(first, kept) and same(again, kept)
    assert all(x.data_ptr() != y.data_ptr() for x, y in zip(first, again, strict=True))


def test_two_runs_are_equal_to_the_bit(device):
    args = kda_inputs(H=2, HV=4, K=128, lengths=[300, 1, 0, 200], h0_dtype=FP32, device=device)
    once = run(args)
    for _ in range(300 if device == "cuda" else 2):
        assert same(run(args), once)


@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
def test_wide_inputs(device, dtype):
    args = kda_inputs(1, 100, 1, 2, dtype=dtype, device=device)
    outputs = run(args)
    assert all(x.dtype == dtype for x in outputs)
    tolerance = 1e-5 if dtype == FP32 else 1e-6  # gates and beta of an fp32 input are fp32
    assert all(rel_l2(x, y) <= tolerance for x, y in zip(outputs, exact(args), strict=True))


@pytest.mark.parametrize("K, V", [(32, 48), (96, 128), (256, 64)])
def test_other_head_dims(anywhere, K, V):
    check(kda_inputs(1, 70, 1, 2, K, V, device=anywhere))


@pytest.mark.parametrize("regime", ["normal", "softplus", "reset"])
def test_gradients(anywhere, regime):
    """In the dtype of every input, and right within what 16-bit outputs and inputs allow."""
    args = kda_inputs(H=2, HV=4, lengths=[70, 0, 30], regime=regime, h0_dtype=BF16, g_dtype=BF16, device=anywhere)
    o, ht = run(args)
    weights = torch.randn_like(o), torch.randn_like(ht)
    theirs = gradients(exact, args, weights)
    for name, grad in gradients(run, args, weights).items():
        assert grad.dtype == args[name].dtype and grad.shape == args[name].shape, name
        assert rel_l2(grad, theirs[name]) <= CAP, name


def test_no_graph_without_need(anywhere):
    args = kda_inputs(1, 70, 1, device=anywhere)
    args["q"].requires_grad_()
    with torch.no_grad():
        assert not run(args)[0].requires_grad
    assert run(args)[0].requires_grad
    args, _ = fwd_inputs(1, 70, 1, device=anywhere)
    args["q"].requires_grad_()
    assert not kda_fwd(**args).requires_grad


def test_autocast(anywhere):
    """Neither the fp32 inputs nor the products of the torch path may be cast on the way."""
    args = kda_inputs(1, 70, 1, 2, device=anywhere)
    expected = run(args)
    with torch.autocast(anywhere, dtype=BF16):
        assert same(run(args), expected)


def test_positional_call(anywhere):
    """The five inputs, and then what follows them, in the order that callers know."""
    args = kda_inputs(1, 70, 1, 2, regime="spike", activations=False, h0_dtype=FP32, device=anywhere)
    five, h0 = [args[name] for name in TOKENS], args["initial_state"]
    assert torch.equal(chunk_kda(*five)[0], run(args, initial_state=None)[0])
    assert same(chunk_kda(*five, 0.1, h0, True, True), run(args, scale=0.1, use_qk_l2norm_in_kernel=True))


def test_options_without_effect(anywhere):
    args = kda_inputs(1, 70, 1, device=anywhere)
    assert same(run(args, safe_gate=True, disable_recompute=True), run(args))


def test_backends_agree(anywhere):
    args = kda_inputs(H=2, HV=4, lengths=[100, 0, 70], h0_dtype=FP32, device=anywhere)
    options = {"return_intermediate_states": True, "cu_seqlens_cpu": args["cu_seqlens"].cpu()}
    for x, y in zip(run(args, **options), run(args, **options, backend="torch"), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and rel_l2(x, y) <= CAP


def test_which_calls_run_in_kernels(monkeypatch):
    """The emulated ones: all that have what they take, and need no gradient."""
    calls = []

    def forward(*args, **kwargs):
        calls.append(kwargs)
        return emulated_kda.emulated_forward(*args, **kwargs)

    emulated_kda.install(monkeypatch, forward)
    args = kda_inputs(1, 10, 1, h0_dtype=FP32)
    wide = {name: args[name].float() for name in "qkv"}
    for elsewhere in ({"backend": "torch"}, wide, {"v": args["v"][..., :64], "initial_state": None}):
        chunk_kda(**{**args, **elsewhere})
    assert not calls
    chunk_kda(**args)
    assert calls.pop()["ht"] is None
    outside = {**args, "use_gate_in_kernel": False, "g": -args["g"].abs()}
    chunk_kda(**{**outside, "A_log": args["A_log"].clone().requires_grad_()}, backend="tilelang")
    assert calls.pop()["A_log"] is None
    kda_fwd(**{**fwd_inputs(1, 10, 1)[0], "q": args["q"].clone().requires_grad_()})
    assert calls.pop()["lower_bound"] == -5.0
    for name in floats(args):
        leaf = {**args, name: args[name].clone().requires_grad_()}
        assert chunk_kda(**leaf)[0].requires_grad and not calls
        with pytest.raises(ValueError, match="no kernel of its backward yet, and an input requires a gradient$"):
            chunk_kda(**leaf, backend="tilelang")
        with torch.no_grad():
            chunk_kda(**leaf, backend="tilelang")
        assert calls.pop()


@on_gpu
@pytest.mark.parametrize("reason", ["K=96", "gradient", "float32"])
def test_says_once_why_it_runs_in_torch(reason):
    dispatch._say_why.cache_clear()
    K, dtype = 96 if reason == "K=96" else 128, FP32 if reason == "float32" else BF16
    args = kda_inputs(1, 10, 1, K=K, dtype=dtype, device="cuda")
    args["q"].requires_grad_(reason == "gradient")
    with pytest.warns(UserWarning, match=f"^Kimi Delta Attention runs in torch instead of its kernels: .*{reason}"):
        run(args)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(args)


# On the card


@on_gpu
@pytest.mark.parametrize("HV", [2, 12])
def test_graph(HV):
    """Captured once; replayed with other values in the same tensors, the boundaries among them."""
    lengths = [[100, 0, 63, 64, 1, 72], [1, 130, 0, 0, 64, 100]]
    (args, both), (other, both_other) = (
        fwd_inputs(H=1, HV=HV, T=310, lengths=x, h0_dtype=FP32, device="cuda") for x in lengths
    )
    expected, expected_other = (run(x, return_intermediate_states=True) for x in (both, both_other))
    kda_fwd(**args)  # compiles
    kept = args["initial_state"].clone()
    out, state = torch.empty_like(args["v"]), args["initial_state"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kda_fwd(**args, out=out, final_state=state)
        h = run({**both, "initial_state": kept}, return_intermediate_states=True)[2]
    graph.replay()
    torch.cuda.synchronize()
    assert same((out, state, h), expected)
    for name, x in floats(other).items():
        args[name].copy_(x)
    args["cu_seqlens"].copy_(other["cu_seqlens"])
    kept.copy_(other["initial_state"])
    graph.replay()
    torch.cuda.synchronize()
    assert same((out, state, h), expected_other)


@on_gpu
def test_own_stream():
    args = kda_inputs(1, 2000, 4, device="cuda")
    expected = run(args)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # Work in front of the inputs that a launch on another stream would not wait for.
        torch.cuda._sleep(50_000_000)
        late = {name: x.clone() if torch.is_tensor(x) else x for name, x in args.items()}
        outputs = run(late)
    stream.synchronize()
    assert same(outputs, expected)


@on_gpu
@pytest.mark.parametrize("lengths", [None, [100, 0, 30]])
def test_no_host_synchronisation(lengths):
    args, both = fwd_inputs(1, 130, 2, lengths=lengths, h0_dtype=FP32, device="cuda")
    out, final_state = torch.empty_like(args["v"]), torch.empty_like(args["initial_state"])

    def calls():
        run(both, return_intermediate_states=True)
        kda_fwd(**args, out=out, final_state=final_state)

    calls()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_gpu
@pytest.mark.parametrize("HV", [2, 12])
@pytest.mark.parametrize(
    "boundaries", [[5, 1 << 30, -7, 300, 0, 300, -(1 << 31)], [-1] * 7, [300] * 7, [0, 300] * 3 + [0]], ids=str
)
def test_boundaries_that_make_no_sense(boundaries, HV):
    """Nobody looks at them on a GPU: the call ends, and what is not its own stays as it is."""
    args, both = fwd_inputs(H=1, HV=HV, lengths=[50] * 6, h0_dtype=FP32, device="cuda")
    bad = torch.tensor(boundaries, dtype=torch.int32, device="cuda")
    wide = torch.full((3, 300, HV, 128), 7.0, dtype=BF16, device="cuda")
    states = torch.full((8, HV, 128, 128), 7.0, device="cuda")
    kda_fwd(**{**args, "cu_seqlens": bad}, out=wide[1:2], final_state=states[1:7])
    run({**both, "cu_seqlens": bad}, return_intermediate_states=True)
    torch.cuda.synchronize()
    assert (wide[::2] == 7).all() and (states[::7] == 7).all()
    check(both)


@on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device_than_the_current():
    check(kda_inputs(1, 130, 2, device="cuda:1"))
    assert torch.cuda.current_device() == 0


@on_gpu
def test_more_than_two_to_the_31_elements():
    """Offsets in 32 bits overflow to finite wrong numbers: the end against a run on it alone."""
    T, HV, end = 2**18 + 64, 64, 128
    shape = {"dtype": BF16, "device": "cuda"}
    args = {name: torch.randn(1, T, 1, 128, **shape) for name in "qk"}
    args |= {"v": torch.randn(1, T, HV, 128, **shape), "g": torch.full((1, T, HV, 128), -0.01, **shape)}
    args |= {"beta": torch.rand(1, T, HV, **shape), "use_qk_l2norm_in_kernel": True}
    assert args["v"].numel() > 2**31
    o, ht = run(args)
    _, state = run({**args, **{name: args[name][:, :-end] for name in TOKENS}})
    rest = {name: args[name][:, -end:].clone() for name in TOKENS}
    assert same(run({**args, **rest}, initial_state=state), (o[:, -end:], ht))


@on_gpu
@pytest.mark.parametrize("lengths", [None, [100, 0, 130]])
def test_the_workspace_is_what_is_said(lengths):
    from flash_qla_tl.kernels.kda.prepare import prepare

    args = kda_inputs(2, 130, 1, 4, lengths=lengths, regime="zero", activations=False, device="cuda")
    N = 2 if lengths is None else 3
    workspace = prepare(*(args[name] for name in ("q", "k", "g", "beta")), 1.0, cu_seqlens=args.get("cu_seqlens"))
    taken = sum(x.numel() * x.element_size() for x in workspace if x is not None)
    said = get_workspace_size(args["q"].shape[0] * args["q"].shape[1], 4, N)
    assert taken == said if lengths else taken <= said


# kda_fwd


@pytest.mark.parametrize("regime", KDA_LOWER_BOUND_GATES)
@pytest.mark.parametrize("state_dtype", [None, FP32, BF16, FP16], ids=str)
def test_forward_fills_what_it_is_given(anywhere, regime, state_dtype):
    """And nothing else: not the inputs, not what lies around the outputs."""
    args, both = fwd_inputs(H=2, lengths=[65, 0, 1, 100], T=180, regime=regime, h0_dtype=state_dtype, device=anywhere)
    kept = {name: x.clone() for name, x in args.items() if torch.is_tensor(x)}
    wide_out = torch.full((3, 180, 4, 128), torch.nan, dtype=BF16, device=anywhere)
    wide_state = torch.full((6, 2, 128, 128), torch.nan, dtype=state_dtype or FP32, device=anywhere)
    out, final_state = wide_out[1:2, :, 1:3], wide_state[1:5]

    assert kda_fwd(**args, out=out, final_state=final_state) is out
    o, ht = run(both)
    assert torch.equal(out, o) and torch.equal(final_state, ht.to(final_state.dtype))
    if state_dtype in (None, FP32):
        check_outputs((out, final_state), both)
    assert not out[:, 166:].any()
    assert all(torch.equal(args[name], x) for name, x in kept.items())
    assert wide_out[::2].isnan().all() and wide_out[1, :, ::3].isnan().all()
    assert wide_state[0].isnan().all() and wide_state[5].isnan().all()

    assert torch.equal(kda_fwd(**args), o)
    assert all(torch.equal(args[name], x) for name, x in kept.items())


@pytest.mark.parametrize("lengths", [None, [30, 0, 70]])
@pytest.mark.parametrize("K", [64, 128])
def test_forward_takes_what_others_refuse(anywhere, K, lengths):
    """Batches, grouped value heads, other head dims, fp16, fp32 logits, no A_log, int32, softplus."""
    args, both = fwd_inputs(2, 100, 2, 4, K=K, V=128, dtype=FP16, lengths=lengths, h0_dtype=FP16, device=anywhere)
    for change in ({}, {"A_log": None}, {"dt_bias": None}, {"lower_bound": None}, {"scale": None}):
        o, ht = check({**both, **change})
        final_state = torch.empty_like(ht)
        assert torch.equal(kda_fwd(**{**args, **change}, final_state=final_state), o)
        assert torch.equal(final_state, ht)


def test_forward_has_a_lower_bound_unless_told(anywhere):
    args, both = fwd_inputs(1, 70, 1, device=anywhere)
    assert args.pop("lower_bound") == -5.0
    assert torch.equal(kda_fwd(**args), run(both)[0])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_forward_in_place_on_its_state(anywhere, dtype):
    args, both = fwd_inputs(H=1, lengths=[100, 0, 3], h0_dtype=dtype, device=anywhere)
    o, ht = run(both)
    state = args["initial_state"]
    assert torch.equal(kda_fwd(**args, final_state=state), o)
    assert torch.equal(state, ht.to(dtype))


def test_forward_positional(anywhere):
    args, both = fwd_inputs(H=2, lengths=[20, 50], h0_dtype=FP32, device=anywhere)
    five = [args[name] for name in TOKENS]
    parameters = [args["A_log"], args["dt_bias"], -5.0]
    o, ht = run(both)
    out, final_state = torch.empty_like(o), torch.empty_like(ht)
    rest = args["initial_state"], final_state, args["cu_seqlens"]
    assert kda_fwd(*five, 0.09, out, *parameters, *rest) is out
    assert torch.equal(out, o) and torch.equal(final_state, ht)


# FlashKDA's names


def test_names_and_arguments_of_flash_kda():
    wanted = "q k v g beta scale out A_log dt_bias lower_bound initial_state final_state cu_seqlens"
    parameters = inspect.signature(flash_kda.fwd).parameters
    assert list(parameters) == wanted.split()
    assert [p.default for p in parameters.values()] == [inspect.Parameter.empty] * 10 + [None] * 3
    assert list(inspect.signature(flash_kda.get_workspace_size).parameters) == ["T_total", "H", "N"]


@pytest.mark.parametrize("state_dtype", [FP32, BF16], ids=str)
def test_flash_kda_as_serving_calls_it(anywhere, state_dtype):
    """Everything bf16, the pool's rows gathered, boundaries in int64, the result only in place."""
    kwargs = {"g_dtype": BF16, "beta_dtype": BF16, "h0_dtype": state_dtype, "cu_dtype": torch.int64}
    args, both = fwd_inputs(H=2, lengths=[64, 100], **kwargs, device=anywhere)
    o, ht = run(both)
    out, final_state = torch.empty_like(args["v"]), torch.empty_like(args["initial_state"])
    five = [args[name] for name in TOKENS]
    last = {"initial_state": args["initial_state"], "final_state": final_state, "cu_seqlens": args["cu_seqlens"]}
    assert flash_kda.fwd(*five, 0.09, out, args["A_log"], args["dt_bias"], -5.0, **last) is None
    assert torch.equal(out, o) and torch.equal(final_state, ht.to(state_dtype))


def test_workspace():
    assert get_workspace_size(0, 96) == get_workspace_size(100, 96, 0) == 0
    assert get_workspace_size(64, 1) == 2 * 58112 + 8 and get_workspace_size(8192, 96, N=8) == 136 * 96 * 58112 + 36
    assert flash_kda.get_workspace_size is get_workspace_size
