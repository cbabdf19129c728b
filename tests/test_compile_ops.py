"""torch.compile takes each operator as one node, forward and backward, and gives what eager calls give."""

import pytest
import torch

from flash_qla_tl import chunk_gated_delta_rule, chunk_kda
from flash_qla_tl.testing import inputs, kda_inputs

FP32 = torch.float32
OPERATORS = {"gdn": (chunk_gated_delta_rule, inputs), "kda": (chunk_kda, kda_inputs)}
on_gpu = pytest.mark.gpu


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_gpu)])
def device(request):
    torch.compiler.reset()
    return request.param


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


@pytest.mark.parametrize("lengths", [None, [30, 0, 70]], ids=["dense", "packed"])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_fullgraph(device, operator, with_state, lengths):
    make = OPERATORS[operator][1]
    args = make(2, 100, 1, 2, 128, lengths=lengths, h0_dtype=FP32 if with_state else None, device=device)
    compiled = torch.compile(caller(operator), fullgraph=True, backend="aot_eager")
    same(run(compiled, args), run(caller(operator), args))


@pytest.mark.parametrize("gated", [False, True])
def test_activations_and_no_gate(device, gated):
    args = inputs(1, 70, 1, 2, 128, normalised=False, device=device)
    args |= {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "g": None}
    if gated:
        args |= {"g": torch.randn(1, 70, 2, device=device), "use_gate_in_kernel": True}
        args |= {"A_log": torch.randn(2, device=device), "dt_bias": torch.randn(2, device=device)}
    compiled = torch.compile(caller("gdn"), fullgraph=True, backend="aot_eager")
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


def test_without_a_final_state(device):
    args = inputs(1, 70, 1, device=device)
    call = torch.compile(lambda args: chunk_gated_delta_rule(**args), fullgraph=True, backend="aot_eager")
    o, ht = call(args)
    assert ht is None and torch.equal(o, chunk_gated_delta_rule(**args)[0])


def test_contents_are_checked_when_the_code_runs():
    torch.compiler.reset()
    args = inputs(H=1, lengths=[30, 40])
    call = torch.compile(lambda args: chunk_gated_delta_rule(**args)[0], fullgraph=True, backend="aot_eager")
    call(args)
    args["cu_seqlens"][1] = 80
    with pytest.raises(ValueError, match="cu_seqlens must not decrease"):
        call(args)


@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck(device, operator):
    make = OPERATORS[operator][1]
    leaves, rest = split(make(H=1, HV=2, K=128, lengths=[30, 0, 70], h0_dtype=FP32, device=device))
    tensors = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
    leaves = [leaves[x].requires_grad_() if x in leaves else None for x in tensors]
    inside = operator == "kda"
    options = [0.1, True, inside, inside, inside, False, False, "auto"] + ([-5.0] if inside else [])
    name = OPERATORS[operator][0].__name__
    given = (*leaves, rest["cu_seqlens"], *options, True)
    torch.library.opcheck(getattr(torch.ops.flash_qla_tl, name).default, given)
    # The backward's op has no such check: it differentiates, which opcheck's modes do not let it.


@on_gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_on_the_kernels(mode):
    torch.compiler.reset()
    args = inputs(1, 300, 2, 4, 128, h0_dtype=FP32, device="cuda")
    compiled = torch.compile(caller("gdn"), fullgraph=True, mode=mode)
    for _ in range(3):
        ours = run(lambda *x: tuple(y.clone() for y in compiled(*x)), args)
    same(ours, run(caller("gdn"), args))
