"""cp_context: sequences over several ranks give what one process gives, gradients included.

Ranks are threads where that is enough, since they start at once and can be as many as eight; what passes through
torch.distributed has tests with processes over gloo.
"""

import os
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import emulated_kda
import emulated_kernels
import pytest
import ranks
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flash_qla_tl
from flash_qla_tl import build_cp_context, chunk_gated_delta_rule, chunk_kda, gated_delta_rule
from flash_qla_tl.affine import Call, affine_pair, affine_pair_bwd
from flash_qla_tl.context_parallel import fold, of_rank
from flash_qla_tl.testing import inputs, rel_l2

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
DOCS = Path(__file__).parents[1] / "docs"


def contexts(lengths, world_size):
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return [of_rank(bounds, rank, world_size, None, "cpu") for rank in range(world_size)]


def run(operator, args, world_size, call=ranks.on_rank):
    """``call`` of every rank -> results, gathered shapes."""
    mine = [of_rank(ranks.bounds(args), rank, world_size, None, "cpu") for rank in range(world_size)]
    return ranks.in_threads(world_size, lambda rank: call(operator, args, mine[rank], world_size))


def check(operator, args, world_size):
    parts, shapes = run(operator, args, world_size)
    ranks.compare(operator, args, parts)
    return shapes


# Contexts.


def test_pieces():
    """Sequences of 30, 0, 250, 1 and 119 tokens over four ranks of 100."""
    four = contexts([30, 0, 250, 1, 119], 4)
    assert [x.cu_seqlens.tolist() for x in four] == [[0, 30, 100], [0, 100], [0, 80, 81, 100], [0, 100]]
    assert [x.sequences for x in four] == [[0, 2], [2], [2, 3, 4], [4]]
    assert [(x.pre_num_ranks, x.post_num_ranks) for x in four] == [(0, 2), (1, 1), (2, 1), (1, 0)]
    assert [x.passes_through for x in four] == [False, True, False, False]
    assert {x.most_num_ranks for x in four} == {2}
    assert all(torch.equal(x.cu_seqlens, x.cu_seqlens_cpu) and x.cu_seqlens.dtype == torch.int32 for x in four)


def test_sequences_that_end_where_ranks_do():
    four = contexts([100, 0, 100, 200], 4)
    assert [x.cu_seqlens.tolist() for x in four] == [[0, 100]] * 4
    assert [(x.pre_num_ranks, x.post_num_ranks) for x in four] == [(0, 0), (0, 0), (0, 1), (1, 0)]
    assert {x.most_num_ranks for x in four} == {1} and not any(x.passes_through for x in four)
    assert {x.most_num_ranks for x in contexts([100, 100, 50, 50], 3)} == {0}


PACKINGS = st.tuples(st.integers(1, 8), st.lists(st.integers(0, 90), min_size=1, max_size=6))


def packing(world_size, lengths):
    """As given, the last sequence lengthened until they divide."""
    missing = -sum(lengths) % world_size
    return [*lengths[:-1], lengths[-1] + (missing if sum(lengths) else world_size)]


@given(PACKINGS)
@settings(deadline=None)
def test_pieces_make_up_the_sequences(drawn):
    world_size, lengths = drawn
    lengths = packing(*drawn)
    size = sum(lengths) // world_size
    tokens, owners = dict.fromkeys(range(len(lengths)), 0), {}
    for context in contexts(lengths, world_size):
        pieces = context.cu_seqlens.diff().tolist()
        assert sum(pieces) == size and min(pieces) > 0 and len(pieces) == len(context.sequences)
        for sequence, length in zip(context.sequences, pieces, strict=True):
            tokens[sequence] += length
            owners.setdefault(sequence, []).append(context)
    assert list(tokens.values()) == lengths
    for sequence, holders in owners.items():
        for i, (before, after) in enumerate(pairwise(holders)):
            assert after.rank == before.rank + 1
            assert (before.sequences[-1], after.sequences[0]) == (sequence, sequence)
            assert after.pre_num_ranks == i + 1 and before.post_num_ranks == len(holders) - 1 - i
    assert {x.most_num_ranks for x in contexts(lengths, world_size)} == {max(map(len, owners.values())) - 1}


def test_fold():
    pairs = torch.randn(5, 3, 4, 6 + 4, dtype=FP64)
    state = torch.zeros(3, 4, 6, dtype=FP64)
    for N, M in ((pair[..., :6], pair[..., 6:]) for pair in pairs):
        state = M @ state + N
    assert torch.allclose(fold(list(pairs), 6), state)
    assert torch.equal(fold([pairs[0][..., :6]], 6), pairs[0][..., :6])
    with torch.autocast("cpu", torch.bfloat16):
        assert rel_l2(fold(list(pairs.float()), 6), state) < 1e-6


# Values and gradients, ranks being threads.

# What a rank sees of sequences: the whole of one, its begin, its end, both, the middle; nothing crossing; many in one.
LENGTHS = {
    "one": [240],
    "begins and ends within": [30, 0, 150, 1, 59],
    "ends with a rank": [80, 0, 160],
    "stays": [60, 60, 60, 60],
    "short ones": [7] * 33 + [9],
}


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("operator", ranks.OPERATORS)
def test_equals_one_process(operator, lengths, world_size):
    check(operator, ranks.make(operator, lengths), world_size)


@pytest.mark.parametrize("world_size", range(1, 9))
def test_world_sizes(world_size):
    """840 tokens divide by all of them; slices from a chunk and a half up."""
    check("gdn", ranks.make("gdn", [100, 700, 40]), world_size)


@given(PACKINGS, st.sampled_from(["gdn", "kda"]))
@settings(deadline=None, max_examples=15)
def test_any_packing(drawn, operator):
    check(operator, ranks.make(operator, packing(*drawn), HV=1, K=4, V=3), drawn[0])


@pytest.mark.parametrize("operator", ranks.OPERATORS)
@pytest.mark.parametrize(
    "options", [{"state_v_first": True}, {"K": 8, "V": 16, "H": 2, "HV": 2}], ids=["V first", "V > K"]
)
def test_layouts(operator, options):
    check(operator, ranks.make(operator, [300, 60], **options), 4)


def test_activations():
    check("gdn", ranks.make("gdn", [300, 60], inside=True), 4)


@pytest.mark.parametrize("operator", ranks.OPERATORS)
@pytest.mark.parametrize("regime", ["zero", "reset"])
def test_gates(operator, regime):
    """A state that does not fade, and one that is forgotten."""
    options = {"activations": False} if operator == "kda" else {}
    check(operator, ranks.make(operator, [300, 60], regime=regime, **options), 4)


def test_no_gate():
    args = ranks.make("gdn", [300, 60])
    given, expected = ({**args, "g": g} for g in (None, torch.zeros_like(args["g"])))
    parts, _ = run("gdn", given, 4)
    one = ranks.whole("gdn", expected, 4)
    found = ranks.joined(parts, args)
    assert all(rel_l2(x, one[name]) < 1e-11 for name, x in found.items())


@pytest.mark.parametrize("operator", ranks.OPERATORS)
def test_states_of_another_dtype(operator):
    """The rows that a rank has of its own keep their gradient in it."""
    args = ranks.make(operator, [150, 0, 90], h0_dtype=FP32)
    parts, _ = run(operator, args, 2)
    assert {part["initial_state"].dtype for part in parts} == {FP32}
    found, exact = ranks.joined(parts, args), ranks.whole(operator, ranks.moved(args, dtype=FP64), 2)
    assert all(rel_l2(x, exact[name]) < 1e-6 for name, x in found.items())


@pytest.mark.parametrize("operator", ranks.OPERATORS)
@pytest.mark.parametrize("lengths", [[1024], [100, 700, 224]], ids=str)
def test_around_emulated_kernels(operator, lengths, monkeypatch):
    """The kernels' path: gated delta rule with its own backward; Kimi Delta Attention, whose gradients are torch's."""
    for module in (emulated_kernels, emulated_kda):
        module.install(monkeypatch)
    args = ranks.make(operator, lengths, K=128, V=128, dtype=BF16)
    check(operator, args, 4)


@pytest.mark.parametrize("operator", ranks.OPERATORS)
def test_forward_on_emulated_kernels(operator, monkeypatch):
    """Without a gradient both operators run on their kernels, head dims of the transfer matrix included."""
    for module in (emulated_kernels, emulated_kda):
        module.install(monkeypatch)
    V = 64 if operator == "gdn" else 128
    args = ranks.make(operator, [1024], K=128, V=V, dtype=BF16) | {"backend": "tilelang"}
    parts, _ = run(operator, args, 4, ranks.forward_on_rank)
    monkeypatch.undo()
    ranks.compare(operator, args | {"backend": "auto"}, parts)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [40, 64, 500, 1344], ids=lambda n: f"{n} tokens")
@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (dict(H=2, HV=2, K=128, V=128), BF16),
        (dict(H=1, HV=4, K=128, V=128), torch.float16),
        (dict(H=2, HV=4, K=64, V=128), BF16),
        (dict(H=2, HV=4, K=128, V=64), torch.float16),
        (dict(H=8, HV=80, K=128, V=128), BF16),  # one segment
    ],
    ids=str,
)
@pytest.mark.parametrize("inside", [False, True], ids=["plain", "inside"])
def test_maps_by_the_kernels(given, dtype, inside, T):
    """N, M and D as whole calls make them, of heads that do not decay, that do slowly, and fast."""
    x = inputs(1, T, **given, dtype=dtype, h0_dtype=FP32, device="cuda")
    h0 = x.pop("initial_state")
    rates = torch.tensor([0.0, 2.0, 0.003, 0.15], device="cuda").repeat(20)[: given["HV"]]
    x["g"] = -rates * torch.rand_like(x["g"])
    x |= {"scale": 0.3, "use_qk_l2norm_in_kernel": inside, "use_beta_sigmoid_in_kernel": inside}
    x |= {"A_log": None, "dt_bias": None, "allow_neg_eigval": inside, "use_gate_in_kernel": False}
    if inside:
        x |= {"use_gate_in_kernel": True, "A_log": rates.clamp_min(1e-6).log(), "dt_bias": torch.zeros_like(rates)}
    do, dht = torch.randn_like(x["v"]), torch.randn_like(h0[0])
    ours, whole = (Call(chunk_gated_delta_rule, x, kernels) for kernels in (gated_delta_rule._MAPS, None))
    for begin in (None, h0):
        pair = zip(affine_pair(ours, begin, True), affine_pair(whole, begin, True), strict=True)
        assert all(rel_l2(a, b) < 0.008 for a, b in pair)
    found = affine_pair_bwd(ours, do, dht)
    assert rel_l2(found, affine_pair_bwd(whole, do, dht)) < 0.008
    assert torch.equal(found, affine_pair_bwd(ours, do, dht))


# The contract.


def test_what_travels():
    """One gather a pass, of fp32; no transfer matrix where no state passes through a rank; nothing where none crosses."""
    pair, state = (2, 16, 8 + 16), (2, 16, 8)
    for lengths, world_size, shape in (([240], 4, pair), ([60, 120, 60], 4, state), ([240], 2, state)):
        assert check("gdn", ranks.make("gdn", lengths), world_size) == [[shape] * 2] * world_size
        _, shapes = run("gdn", ranks.make("gdn", lengths), world_size, ranks.forward_on_rank)
        assert shapes == [[shape]] * world_size
    for lengths, world_size in (([60] * 4, 4), ([240], 1)):
        assert check("gdn", ranks.make("gdn", lengths), world_size) == [[]] * world_size


@pytest.mark.parametrize("operator", ranks.OPERATORS)
def test_no_states(operator):
    """Neither given nor asked for: gradients cross the ranks all the same."""
    args = ranks.make(operator, [300, 60])

    def call(operator, args, context, world_size):
        own = ranks.sliced(args, context, world_size) | {"initial_state": None}
        found = {x: own[x].clone().requires_grad_() for x in ranks.TOKENS}
        o, ht = ranks.OPERATORS[operator][0](**{**own, **found})
        assert ht is None
        loss = ranks.loss(args, o, o.new_zeros(1, *args["initial_state"].shape[1:]), context.rank * o.shape[1])
        return o.detach(), *torch.autograd.grad(loss, list(found.values()))

    results, _ = run(operator, args, 4, call)
    found = {x: args[x].clone().requires_grad_() for x in ranks.TOKENS}
    o, _ = ranks.OPERATORS[operator][0](**{**args, **found, "initial_state": None})
    loss = ranks.loss(args, o, o.new_zeros(1, *args["initial_state"].shape[1:]))
    expected = o.detach(), *torch.autograd.grad(loss, list(found.values()))
    for x, parts in zip(expected, zip(*results, strict=True), strict=True):
        assert rel_l2(torch.cat(parts, 1), x) < 1e-11


def test_state_of_a_sequence_from_before_is_not_read():
    args = ranks.make("gdn", [240])

    def call(operator, args, context, world_size):
        own = ranks.sliced(args, context, world_size)
        if context.pre_num_ranks:
            own["initial_state"] = torch.full_like(own["initial_state"], torch.nan)
        own["initial_state"].requires_grad_()
        o, _ = chunk_gated_delta_rule(**own)
        return o.detach(), *torch.autograd.grad(o.sum(), own["initial_state"])

    results, _ = run("gdn", args, 3, call)
    assert all(o.isfinite().all() for o, _ in results)
    assert [grad.any().item() for _, grad in results] == [True, False, False]


def test_loss_on_one_rank_alone():
    """The others' part of it is zero, and their gradients are not."""
    args = ranks.make("gdn", [240])

    def call(operator, args, context, world_size):
        own = ranks.sliced(args, context, world_size)
        own["v"].requires_grad_()
        o, _ = chunk_gated_delta_rule(**own)
        return torch.autograd.grad(o.sum() * (context.rank == 2), own["v"])[0]

    results, _ = run("gdn", args, 3, call)
    v = args["v"].clone().requires_grad_()
    o, _ = chunk_gated_delta_rule(**{**args, "v": v})
    (expected,) = torch.autograd.grad(o[:, 160:].sum(), v)
    assert rel_l2(torch.cat(results, 1), expected) < 1e-11 and all(x.any() for x in results)


def test_under_autocast_and_checkpointing():
    args = ranks.make("gdn", [240], dtype=FP32)

    def call(operator, args, context, world_size):
        own = ranks.sliced(args, context, world_size)
        found = ranks.leaves(own)
        names, values = zip(*found.items(), strict=True)
        body = lambda *x: chunk_gated_delta_rule(**{**own, **dict(zip(names, x, strict=True))})[0]  # noqa: E731
        with torch.autocast("cpu", BF16):
            o = torch.utils.checkpoint.checkpoint(body, *values, use_reentrant=False)
        grads = torch.autograd.grad(o.square().sum(), values)
        return {"o": o.detach()} | dict(zip(names, grads, strict=True))

    results, shapes = run("gdn", args, 3, call)
    # The forward runs once more before the backward.
    assert [len(x) for x in shapes] == [3, 3, 3]
    found = ranks.leaves(ranks.moved(args, dtype=FP64))
    o, _ = chunk_gated_delta_rule(**{**args, **found})
    grads = torch.autograd.grad(o.square().sum(), list(found.values()))
    for name, x in zip(("o", *found), (o, *grads), strict=True):
        if name != "initial_state":
            assert rel_l2(torch.cat([part[name] for part in results], 1), x) < 1e-5, name


def test_intermediate_states():
    args = ranks.make("kda", [240]) | {"return_intermediate_states": True}
    results, _ = run("kda", args, 3, lambda operator, args, context, W: chunk_kda(**ranks.sliced(args, context, W)))
    for rank, (_, _, h) in enumerate(results):
        ends = torch.tensor([0, 80 * rank])
        _, start = chunk_kda(
            **{**args, "cu_seqlens": ends, "return_intermediate_states": False}, output_final_state=True
        )
        assert h.shape == (1, 2, 2, 16, 8) and rel_l2(h[0, 0], start[0]) < 1e-11


# What is refused.

HERE, HERE_TWO = (contexts(lengths, 1)[0] for lengths in ([100], [60, 40]))
LIKE_FLA = {
    "group": None,
    "cu_seqlens": torch.tensor([0, 100], dtype=torch.int32),
    "cu_seqlens_cpu": torch.tensor([0, 100], dtype=torch.int32),
    "pre_num_ranks": 0,
    "post_num_ranks": 0,
}


@pytest.mark.parametrize(
    "context, options, error, message",
    [
        (object(), {}, TypeError, "cp_context must be what build_cp_context returns, got object"),
        (SimpleNamespace(**LIKE_FLA, layout="zigzag"), {}, ValueError, "cp_context must have the layout 'contiguous'"),
        (
            SimpleNamespace(**LIKE_FLA, pre_num_ranks_dev=torch.zeros(1)),
            {},
            ValueError,
            "cp_context must have its counts of ranks on the host",
        ),
        (SimpleNamespace(**{**LIKE_FLA, "cu_seqlens": None}), {}, ValueError, "cp_context must have cu_seqlens"),
        (HERE, {"cu_seqlens": torch.tensor([0, 100])}, ValueError, "cu_seqlens must be None with cp_context"),
        (HERE, {"cu_seqlens_cpu": torch.tensor([0, 100])}, ValueError, "cu_seqlens_cpu must be None with cp_context"),
        (
            contexts([80], 1)[0],
            {},
            ValueError,
            "q must have T = 80, the tokens of this rank in cp_context, got T = 100",
        ),
        (contexts([50, 50], 1)[0], {}, ValueError, "initial_state must have shape .N, HV, K, V. = .2, 2, 16, 8."),
        (of_rank([0, 100], 0, 1, None, "meta"), {}, ValueError, "cp_context must have its cu_seqlens on device cpu"),
    ],
)
@pytest.mark.parametrize("operator", ranks.OPERATORS)
def test_refused_contexts(operator, context, options, error, message):
    args = ranks.make(operator, [100]) | {"cu_seqlens": None}
    with pytest.raises(error, match=message):
        ranks.OPERATORS[operator][0](**args | options, cp_context=context)


def test_batch_of_rows():
    args = {x: y.expand(2, *y.shape[1:]) for x, y in ranks.make("gdn", [100]).items() if x in ranks.TOKENS}
    with pytest.raises(ValueError, match="q must have B = 1 with cu_seqlens"):
        chunk_gated_delta_rule(**args, cp_context=HERE)


def test_tokens_that_do_not_divide():
    for total in (0, 3, 101):
        with pytest.raises(ValueError, match=f"must end at a multiple of the 4 ranks of group, .* got {total}"):
            contexts([total], 4)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"layout": "zigzag"}, ValueError, "layout must be 'contiguous', got 'zigzag'"),
        ({"cu_seqlens_global": [0, 4]}, TypeError, "cu_seqlens_global must be a torch.Tensor, got list"),
        ({"cu_seqlens_global": torch.tensor([0.0, 4])}, TypeError, "cu_seqlens_global must have dtype torch.int32"),
        ({"cu_seqlens_global": torch.tensor([0])}, ValueError, "cu_seqlens_global must have shape .N.1."),
        ({"cu_seqlens_global": torch.tensor([1, 4])}, ValueError, "cu_seqlens_global must start at 0, got 1"),
        ({"cu_seqlens_global": torch.tensor([0, 4, 2])}, ValueError, "cu_seqlens_global must not decrease"),
        ({"cu_seqlens_cpu": torch.tensor([0, 2, 4])}, ValueError, "cu_seqlens_cpu must have shape .N.1. = .2."),
        ({"cu_seqlens_cpu": torch.tensor([0, 4], device="meta")}, ValueError, "cu_seqlens_cpu must be on device cpu"),
    ],
)
def test_refused_boundaries(options, error, message):
    with pytest.raises(error, match=message):
        build_cp_context(**{"cu_seqlens_global": torch.tensor([0, 4])} | options)


# FLA's context, and torch.compile.


@pytest.mark.parametrize("lengths", [*LENGTHS.values(), [800]], ids=str)
def test_our_contexts_are_those_of_fla(lengths):
    try:
        from fla.ops.cp.context import get_cp_cu_seqlens
    except ImportError:
        pytest.skip("flash-linear-attention is not installed")
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    for context in contexts(lengths, 4):
        theirs = get_cp_cu_seqlens(cu_seqlens, cu_seqlens, 4, context.rank, object())
        assert theirs.cu_seqlens.tolist() == context.cu_seqlens.tolist()
        for name in ("pre_num_ranks", "post_num_ranks"):
            assert getattr(theirs, name) == getattr(context, name)


def test_context_of_fla_that_is_off():
    args = ranks.make("gdn", [100])
    own = {**args, "cu_seqlens": LIKE_FLA["cu_seqlens"], "cu_seqlens_cpu": LIKE_FLA["cu_seqlens_cpu"]}
    o, _ = chunk_gated_delta_rule(**own, cp_context=SimpleNamespace(**LIKE_FLA))
    assert torch.equal(o, chunk_gated_delta_rule(**args)[0])


@pytest.mark.parametrize("operator", ranks.OPERATORS)
def test_compile(operator):
    """The call leaves the compiled code; with fullgraph=True that is an error that says so."""
    torch.compiler.reset()
    args = ranks.make(operator, [60, 40])
    own = {x: y for x, y in args.items() if x != "cu_seqlens"}
    function = ranks.OPERATORS[operator][0]
    call = lambda own: function(**own, cp_context=HERE_TWO)[0] * 2  # noqa: E731
    assert torch.equal(torch.compile(call, backend="aot_eager")(own), 2 * function(**args)[0])
    torch.compiler.reset()
    with pytest.raises(Exception, match="with a cp_context the operator runs eagerly"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(own)


# Through torch.distributed.


def in_processes(folder, world_size, function, *args, timeout=120):
    """Of every rank in a process of its own. An error of one is raised here, and ends the others."""
    folder.mkdir(exist_ok=True)
    torch.multiprocessing.spawn(ranks.worker, (world_size, folder, timeout, function, *args), nprocs=world_size)


@pytest.mark.parametrize("world_size", [2, 4])
def test_gloo(world_size, tmp_path):
    names = LENGTHS if world_size == 2 else ("one", "begins and ends within")
    given = [(operator, LENGTHS[name], {}) for name in names for operator in ranks.OPERATORS]
    given += [("gdn", [240], {"inside": True}), ("gdn", [240], {}, "fla")]
    given += [("kda", [240], {"dtype": BF16}, "fla", "forward")]
    in_processes(tmp_path, world_size, ranks.cases, given, "cpu")


BIG = {"H": 2, "HV": 4, "K": 128, "V": 128, "dtype": BF16}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "world_size, given",
    [
        pytest.param(2, [("gdn", lengths, BIG) for lengths in ([4096], [1000, 3000, 96], [2048, 2048])], id="two"),
        # M is made with a V of K.
        pytest.param(4, [("gdn", [4096], BIG), ("gdn", [100, 3900, 96], {**BIG, "V": 64})], id="four"),
        pytest.param(4, [("gdn", [2048], {**BIG, "inside": True}), ("gdn", [2048], BIG, "forward")], id="inside"),
        pytest.param(4, [("gdn", [2048], {**BIG, "dtype": torch.float16, "state_v_first": True}, "fla")], id="fp16"),
        pytest.param(4, [("kda", [100, 3996], BIG, "forward"), ("kda", [1024], BIG)], id="kda"),
    ],
)
def test_gloo_on_one_gpu(world_size, given, tmp_path):
    """The kernels; but gradients of Kimi Delta Attention, which are torch's."""
    in_processes(tmp_path, world_size, ranks.cases, given, "cuda")


@pytest.mark.parametrize("how", ["raises", "does nothing"])
def test_a_rank_that_fails_fails_all(how, tmp_path):
    """Soon where it raises an error, after the group's timeout where it does not come."""
    began = time.monotonic()
    with pytest.raises((torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException)):
        in_processes(tmp_path, 2, ranks.one_fails, how, timeout=3)
    assert time.monotonic() - began < 60
    # An error of its own; the first rank has one too, if it was not ended before that.
    failed = {int(path.name.removeprefix("error")): path.read_text() for path in tmp_path.glob("error*")}
    if how == "raises":
        assert failed[1] == "ValueError: what went wrong"
    else:
        assert failed[0].startswith(("RuntimeError", "DistBackendError")), failed


def test_documented_step(tmp_path):
    """The example of the documentation prints the same on one rank and on two."""
    (snippet,) = re.findall(
        r"^```python\n(.*?)^```", (DOCS / "sequence_parallel.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "train.py").write_text(snippet)
    paths = [str(Path(flash_qla_tl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    printed = []
    for number in (1, 2):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number), "train.py"]
        done = subprocess.run(
            [sys.executable, *launch], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        printed.append(re.findall(r"^step \d: loss \d+\.\d+$", done.stdout, re.MULTILINE))
    assert printed[0] == printed[1] and len(set(printed[0])) == 3
