"""torch.compile takes each operator as one node, forward and backward, and gives what eager calls give."""

import sys

import emulated_kda
import emulated_kernels
import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from flash_qla_tl import chunk_gated_delta_rule, chunk_kda, kda_fwd
from flash_qla_tl.custom_ops import TENSORS
from flash_qla_tl.testing import inputs, kda_inputs

FP32 = torch.float32
OPERATORS = {"gdn": (chunk_gated_delta_rule, inputs), "kda": (chunk_kda, kda_inputs)}
OPS = torch.ops.flash_qla_tl
on_gpu = pytest.mark.gpu


@pytest.fixture
def emulated(monkeypatch):
    """The kernels' stand-ins, and the keywords of every call of them."""
    calls = []

    def recorded(function):
        def call(*args, **kwargs):
            calls.append(kwargs)
            return function(*args, **kwargs)

        return call

    emulated_kernels.install(monkeypatch)
    emulated_kda.install(monkeypatch, recorded(emulated_kda.emulated_forward))
    forward = sys.modules[f"{emulated_kernels.MODULE}chunk_fwd"]
    monkeypatch.setattr(forward, "chunk_fwd", recorded(emulated_kernels.chunk_fwd))
    return calls


@pytest.fixture(params=["torch", "emulated", pytest.param("cuda", marks=on_gpu)])
def device(request):
    """Where every path is tried: in torch, behind the kernels' stand-ins, and in the kernels."""
    torch.compiler.reset()
    if request.param == "emulated":
        request.getfixturevalue("emulated")
    return "cuda" if request.param == "cuda" else "cpu"


def split(args):
    """Differentiable tensors, and the rest."""
    leaves = {x: y for x, y in args.items() if torch.is_tensor(y) and y.is_floating_point()}
    return leaves, {x: y for x, y in args.items() if x not in leaves}


def run(call, args):
    """Outputs, and gradients of a functional of them."""
    leaves, rest = split(args)
    leaves = {x: y.detach().clone().requires_grad_() for x, y in leaves.items()}
    o, ht = call(leaves, rest)
    loss = o.float().square().sum() + ht.square().sum()
    return o, ht, torch.autograd.grad(loss, list(leaves.values()))


def same(ours, theirs):
    o, ht, grads = ours
    assert torch.equal(o, theirs[0]) and torch.equal(ht, theirs[1])
    assert all(map(torch.equal, grads, theirs[2]))


def caller(operator):
    function = OPERATORS[operator][0]

    def call(leaves, rest):
        # Work on both sides, which is compiled with it.
        leaves = {**leaves, "v": leaves["v"] * 2}
        o, ht = function(**leaves, **rest, output_final_state=True)
        return o + 1, ht

    return call


def compile(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("lengths", [None, [30, 0, 70]], ids=["dense", "packed"])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_fullgraph(device, operator, with_state, lengths):
    make = OPERATORS[operator][1]
    args = make(2, 100, 1, 2, 128, lengths=lengths, h0_dtype=FP32 if with_state else None, device=device)
    compiled = compile(caller(operator))
    same(run(compiled, args), run(caller(operator), args))


@pytest.mark.parametrize("gated", [False, True])
def test_activations_and_no_gate(device, gated):
    args = inputs(1, 70, 1, 2, 128, normalised=False, device=device)
    args |= {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "g": None}
    if gated:
        args |= {"g": torch.randn(1, 70, 2, device=device, dtype=torch.bfloat16), "use_gate_in_kernel": True}
        args |= {"A_log": torch.randn(2, device=device), "dt_bias": torch.randn(2, device=device)}
    compiled = compile(caller("gdn"))
    same(run(compiled, args), run(caller("gdn"), args))


@pytest.mark.parametrize("operator", OPERATORS)
def test_dynamic_shapes(device, operator):
    """A second length and a third make no third graph."""
    make, graphs = OPERATORS[operator][1], []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(caller(operator), fullgraph=True, dynamic=True, backend=backend)
    for T in (70, 100, 200):
        args = make(1, T, 1, 2, 128, device=device)
        o = compiled(*split(args))[0]
        assert torch.equal(o, caller(operator)(*split(args))[0])
    assert len(graphs) == 1


@pytest.mark.parametrize("case", ["no tokens", "empty sequences", "views", "broadcast"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_unusual_inputs(device, operator, case):
    """Nothing at all, and strides that no result has."""
    lengths = [0, 0] if case == "empty sequences" else None
    T = 0 if case == "no tokens" else 70
    args = OPERATORS[operator][1](2, T, 1, 2, 128, lengths=lengths, h0_dtype=FP32, device=device)
    function = caller(operator)

    def call(leaves, rest):
        if case == "views":
            leaves = {**leaves, "q": leaves["q"].mT.contiguous().mT, "v": torch.cat([leaves["v"]] * 2, -1)[..., :128]}
        if case == "broadcast":
            leaves = {**leaves, "beta": leaves["beta"][:, :1].expand(2, 70, 2)}
        return function(leaves, rest)

    same(run(compile(call), args), run(call, args))


def test_without_a_final_state(device):
    args = inputs(1, 70, 1, device=device)
    call = compile(lambda args: chunk_gated_delta_rule(**args))
    o, ht = call(args)
    assert ht is None and torch.equal(o, chunk_gated_delta_rule(**args)[0])


def test_contents_are_checked_when_the_code_runs():
    torch.compiler.reset()
    args = inputs(H=1, lengths=[30, 40])
    call = compile(lambda args: chunk_gated_delta_rule(**args)[0])
    call(args)
    args["cu_seqlens"][1] = 80
    with pytest.raises(ValueError, match="cu_seqlens must not decrease"):
        call(args)


@pytest.mark.parametrize("wanted", ["o", "ht"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_loss_on_one_output(device, operator, wanted):
    """A gate of 16 bits, whose gradient comes in its dtype, and a loss that leaves out the other output."""
    function, make = OPERATORS[operator]
    args = make(1, 70, 1, 2, 128, g_dtype=torch.bfloat16, h0_dtype=torch.bfloat16, device=device)
    leaves, rest = split(args)
    leaves = {x: y.requires_grad_() for x, y in leaves.items()}

    def call(leaves):
        o, ht = function(**leaves, **rest, output_final_state=wanted == "ht")
        return o if wanted == "o" else ht

    losses = [f(leaves).float().square().sum() for f in (compile(call), call)]
    ours, eager = (torch.autograd.grad(x, list(leaves.values()), materialize_grads=True) for x in losses)
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(ours, eager, strict=True))


def test_one_forward_a_training_step(emulated):
    """What eager autograd keeps is kept, and the backward runs no second forward."""
    torch.compiler.reset()
    args = inputs(2, 100, 1, 2, 128)
    leaves, _ = split(args)
    leaves = {x: y.requires_grad_() for x, y in leaves.items()}
    call = compile(lambda leaves: chunk_gated_delta_rule(**leaves, auto_cp=False)[0])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        o = call(leaves)
    o.sum().backward()
    assert len(emulated) == 1 and emulated[0]["auto_cp"] is False
    inputs_at = {x.data_ptr() for x in leaves.values()}
    shapes = sorted(tuple(x.shape) for x in kept if x.data_ptr() not in inputs_at and x.numel())
    assert shapes == [(2, 100, 2), (2, 100, 2, 64)]


@pytest.mark.parametrize("needs_grad", [False, True])
def test_kda_is_in_torch_for_a_gradient_only(emulated, needs_grad):
    torch.compiler.reset()
    args = kda_inputs(1, 70, 1, 2, 128)
    args["v"].requires_grad_(needs_grad)
    o, _ = compile(lambda args: chunk_kda(**args))(args)
    assert len(emulated) == (not needs_grad) and torch.equal(o, chunk_kda(**args)[0])
    if needs_grad:
        with pytest.raises(ValueError, match="no kernel of its backward"):
            compile(lambda args: chunk_kda(**args, backend="tilelang"))(args)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_what_runs_in_torch_is_no_part_of_a_cuda_graph(emulated, operator, backend):
    torch.compiler.reset()
    function, make = OPERATORS[operator]
    args = make(1, 70, 1, 2, 128)
    ops = []

    def compiler(graph, example):
        ops.extend(x.target for x in graph.graph.nodes if getattr(x.target, "namespace", None) == "flash_qla_tl")
        return make_boxed_func(graph.forward)

    def names(needs_grad):
        ops.clear()
        args["v"].requires_grad_(needs_grad)
        o = torch.compile(call, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))(args)
        if needs_grad:
            o.sum().backward()
        return [(x._opname.removeprefix(name), torch.Tag.cudagraph_unsafe in x.tags) for x in ops]

    name = function.__name__
    call = lambda args: function(**args, backend=backend)[0]  # noqa: E731
    kernels, in_torch = ("_in_kernels", False), ("_in_torch", True)
    expected = in_torch if backend == "torch" else kernels
    assert names(False) == [expected]
    if operator == "kda":
        expected = in_torch
    assert names(True) == [expected, (f"{expected[0]}_backward", expected[1])]


@pytest.mark.parametrize("lengths", [None, [30, 0, 70]], ids=["dense", "packed"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_states_at_chunk_starts(device, operator, lengths):
    function, make = OPERATORS[operator]
    args = make(1, 100, 1, 2, 128, lengths=lengths, device=device)

    def call(args):
        return function(**args, state_v_first=True, output_final_state=True, return_intermediate_states=True)

    assert all(map(torch.equal, compile(call)(args), call(args)))


def test_states_at_chunk_starts_beside_a_gradient(device):
    args = kda_inputs(1, 100, 1, 2, 128, device=device)
    args["v"].requires_grad_()
    call = lambda args: chunk_kda(**args, return_intermediate_states=True)  # noqa: E731
    (o, _, h), (o_eager, _, h_eager) = compile(call)(args), call(args)
    assert torch.equal(h, h_eager) and not h.requires_grad
    grads = [torch.autograd.grad(x.float().square().sum(), args["v"])[0] for x in (o, o_eager)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("operator", OPERATORS)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_boundaries_on_the_cpu(device, operator):
    """Passed on: as many states as there are chunks, and contents that are compared."""
    function, make = OPERATORS[operator]
    args = make(H=1, HV=2, K=128, lengths=[30, 0, 70], device=device)
    args["cu_seqlens_cpu"] = args["cu_seqlens"].cpu().clone()
    call = lambda args: function(**args, return_intermediate_states=True)[::2]  # noqa: E731
    compiled = compile(call)
    for _ in range(2):
        o, h = compiled(args)
        assert h.shape[1] == 3
        assert all(map(torch.equal, (o, h), call(args)))
    args["cu_seqlens_cpu"][1] = 80
    args["cu_seqlens_cpu"][2] = 70
    with pytest.raises(ValueError, match="cu_seqlens_cpu must"):
        compiled(args)


@pytest.mark.parametrize("state", ["none", "final", "both", "in place", "pool"])
@pytest.mark.parametrize("given_out", [False, True])
def test_kda_fwd(device, given_out, state, monkeypatch):
    """Into the caller's tensors, as the eager call does it."""
    # Dynamo does not take the one that fills it with NaN.
    monkeypatch.setattr(torch, "empty_like", torch.empty_like.__wrapped__)
    args = kda_inputs(H=1, HV=2, K=128, lengths=[30, 0, 70], device=device)
    args = {x: args[x] for x in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens")} | {"scale": None}
    slots = 5 if state == "pool" else 3
    states = torch.randn(2, slots, 2, 128, 128, device=device)
    if state == "pool":
        args["initial_state_indices"] = torch.tensor([3, 0, -1], device=device)

    def call(args, out, initial, final):
        if state != "none":
            args = {**args, "final_state": final}
        if state == "both":
            args = {**args, "initial_state": initial}
        if state in ("in place", "pool"):
            args = {**args, "initial_state": final}
        return kda_fwd(**args, out=out) + 1, final * 2

    results = []
    for function in (compile(call), call):
        initial, final = states.clone()
        out = torch.zeros_like(args["v"]) if given_out else None
        results.append((*function(args, out, initial, final), initial, final, out if given_out else final))
    assert all(map(torch.equal, *results))
    assert state == "none" or not torch.equal(results[0][3], states[1])


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck(device, operator, needs_grad):
    """The op that is traced, the one that it stands for, and the backward of that."""
    function, make = OPERATORS[operator]
    leaves, rest = split(make(H=1, HV=2, K=128, lengths=[30, 0, 70], h0_dtype=FP32, device=device))
    tensors = [leaves[x].requires_grad_(needs_grad) if x in leaves else None for x in TENSORS]
    inside = operator == "kda"
    options = [0.1, True, not needs_grad, inside, inside, inside, False, False, "auto", -5.0 if inside else True]
    given = (*tensors, rest["cu_seqlens"], None, *options)
    emulated = emulated_kda.installed()
    in_kernels = (emulated or device == "cuda") and not (operator == "kda" and needs_grad)
    name = f"{function.__name__}_in_{'kernels' if in_kernels else 'torch'}"
    for op in (getattr(OPS, function.__name__), getattr(OPS, name)):
        torch.library.opcheck(op.default, (*given, needs_grad))
    if needs_grad and not (in_kernels and emulated):
        # The stand-ins would differentiate here, which the checks do not let them.
        given = [x.detach() if torch.is_tensor(x) else x for x in given]
        o, ht, _, g_cumsum, A = op(*given, True)
        for do, dht in ((o, ht), (o, None), (None, ht)):
            torch.library.opcheck(getattr(OPS, f"{name}_backward").default, (do, dht, g_cumsum, A, *given))


@pytest.mark.parametrize("in_place", [False, True])
def test_opcheck_of_kda_fwd(device, in_place):
    args = kda_inputs(H=1, HV=2, K=128, lengths=[30, 0, 70], h0_dtype=FP32, device=device)
    tensors = [args[x] for x in ("q", "k", "v", "g", "beta")]
    state = None if in_place else args["initial_state"]
    final, out = args["initial_state"].clone(), torch.zeros_like(args["v"])
    given = (*tensors, 0.1, out, args["A_log"], args["dt_bias"], -5.0, state, final, args["cu_seqlens"], None, -1)
    torch.library.opcheck(OPS.kda_fwd.default, (*given, in_place))


@on_gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_inductor(operator, mode):
    """With CUDA graphs too: other values, and other boundaries, of the same shapes."""
    torch.compiler.reset()
    make = OPERATORS[operator][1]
    compiled = torch.compile(caller(operator), fullgraph=True, mode=mode)
    for lengths in ([100, 0, 200], [100, 0, 200], [1, 129, 170], [300, 0, 0]):
        args = make(H=2, HV=4, K=128, lengths=lengths, h0_dtype=FP32, device="cuda")
        with torch.no_grad():
            ours = compiled(*split(args))
            assert all(map(torch.equal, ours, caller(operator)(*split(args))))
        # What a graph returns is overwritten by its next run.
        ours = run(lambda *x: tuple(y.clone() for y in compiled(*x)), args)
        same(ours, run(caller(operator), args))
