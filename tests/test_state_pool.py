"""States in a pool: read by index, written in place, and nothing else touched.

What a call gives with gathered states, scattered by hand, is what it gives with the pool, to the bit: the same kernels (or
the same torch path) run on the same numbers.
"""

import emulated_kda
import emulated_kernels
import pytest
import torch
from test_package import python

from flash_qla_tl import chunk_gated_delta_rule, chunk_kda, kda_fwd
from flash_qla_tl.testing import inputs, kda_inputs

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LENGTHS = [70, 0, 64, 1, 130]
# By sequence, in a pool of 9: one without a slot, one whose slot means none, and one without a token.
SLOTS, NONE, PAD = 9, (1 << 31) - 1, 7
INDICES = [4, 2, -1, 8, PAD]
ACTIVATIONS = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first")

on_gpu = pytest.mark.gpu


@pytest.fixture(params=["cpu", "emulated", pytest.param("cuda", marks=on_gpu)])
def device(request, monkeypatch):
    """The torch path, the kernel path around emulated kernels, and the kernels."""
    if request.param != "emulated":
        return request.param
    emulated_kernels.install(monkeypatch)
    emulated_kda.install(monkeypatch)
    return "cpu"


class Gdn:
    function = staticmethod(chunk_gated_delta_rule)
    inputs = staticmethod(inputs)


class Kda:
    function = staticmethod(chunk_kda)
    inputs = staticmethod(kda_inputs)


operators = pytest.mark.parametrize("operator", [Gdn, Kda])


def make(operator, device, lengths=LENGTHS, slots=SLOTS, dtype=FP32, v_first=True, wide=1, HV=2, **kwargs):
    """Arguments without a state, and a pool whose slots are `wide` times as far apart as they are large."""
    args = operator.inputs(H=1, HV=HV, K=128, lengths=lengths, state_v_first=v_first, device=device, **kwargs)
    buffer = torch.randn(slots, wide, HV, 128, 128, device=device).to(dtype)
    return args, buffer, buffer[:, wide // 2]


def numbers(values, device, dtype=torch.int32):
    return torch.tensor(values, device=device, dtype=dtype)


def by_hand(operator, args, pool, indices, pad=-1, **options):
    """Gathered, called, scattered: o, the states of the sequences, and the pool as it is afterwards."""
    empty = [n == 0 for n in args["cu_seqlens"].diff().tolist()] if "cu_seqlens" in args else [False] * len(indices)
    own = [i if 0 <= i < len(pool) and i != pad else None for i in indices]
    zero = torch.zeros_like(pool[0])
    h0 = torch.stack([zero if i is None else pool[i] for i in own])
    o, ht, *rest = operator.function(**args, initial_state=h0, output_final_state=True, **options)
    after = pool.clone()
    for n, i in enumerate(own):
        if i is not None and not empty[n]:
            after[i] = ht[n].to(pool.dtype)
    return o, ht, after, *rest


@operators
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_in_place(device, operator, dtype, v_first):
    args, buffer, pool = make(operator, device, dtype=dtype, v_first=v_first, wide=3)
    before = buffer.clone()
    o, _, after = by_hand(operator, args, pool, INDICES, PAD)
    options = {"initial_state_indices": numbers(INDICES, device), "pad_slot_id": PAD, "inplace_final_state": True}
    ours, state = operator.function(**args, initial_state=pool, **options)
    assert state is pool and torch.equal(ours, o) and torch.equal(pool, after)
    # Slots that are no sequence's, that of the empty one, and what lies between slots.
    untouched = [i for i in range(SLOTS) if i not in (4, 8)]
    assert torch.equal(buffer[untouched], before[untouched]) and torch.equal(buffer[:, ::2], before[:, ::2])
    assert not torch.equal(pool[4], before[4, 1]) and not torch.equal(pool[8], before[8, 1])


@operators
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("lengths, indices", [(LENGTHS, INDICES), (None, [3, 0])], ids=["packed", "dense"])
def test_only_read(device, operator, lengths, indices, index_dtype):
    """The pool stays as it is, and the states of all sequences come back, in fp32."""
    shape = {} if lengths else {"B": 2, "T": 100}
    args, buffer, pool = make(operator, device, lengths=lengths, dtype=BF16, wide=2, **shape)
    before = buffer.clone()
    o, ht, _ = by_hand(operator, args, pool, indices, PAD)
    strided = numbers(indices, device, index_dtype).repeat_interleave(2)[::2]
    options = {"initial_state": pool, "initial_state_indices": strided, "pad_slot_id": PAD}
    ours, state = operator.function(**args, **options, output_final_state=True)
    assert state.dtype == FP32 and torch.equal(ours, o) and torch.equal(state, ht)
    assert operator.function(**args, **options)[1] is None
    assert torch.equal(buffer, before)


@operators
def test_slots_may_be_shared_where_they_are_read(device, operator):
    args, _, pool = make(operator, device)
    indices = [3, 3, 5, 3, 5]
    o, ht, _ = by_hand(operator, args, pool, indices)
    options = {"initial_state_indices": numbers(indices, device), "output_final_state": True}
    ours, state = operator.function(**args, initial_state=pool, **options)
    assert torch.equal(ours, o) and torch.equal(state, ht)


@operators
def test_an_empty_sequence_leaves_the_slot_it_shares(device, operator):
    """As stale indices do behind the last sequence of a captured batch."""
    args, _, pool = make(operator, device)
    o, _, after = by_hand(operator, args, pool, [4, -1, 2, 6, 8])
    options = {"initial_state_indices": numbers([4, 4, 2, 6, 8], device), "inplace_final_state": True}
    ours, _ = operator.function(**args, initial_state=pool, **options)
    assert torch.equal(ours, o) and torch.equal(pool, after)


@operators
def test_a_not_finite_slot_reaches_nobody_else(device, operator):
    args, _, pool = make(operator, device)
    pool[[0, 1, 3, 5, 6, 7]] = torch.nan
    options = {"initial_state_indices": numbers(INDICES, device), "pad_slot_id": PAD, "inplace_final_state": True}
    o, _ = operator.function(**args, initial_state=pool, **options)
    assert o.isfinite().all() and pool[[2, 4, 8]].isfinite().all() and pool[[0, 1, 3, 5, 6, 7]].isnan().all()


@operators
def test_padding_of_vllm(device, operator):
    """Slot 0 means none, several times over."""
    args, _, pool = make(operator, device)
    o, _, after = by_hand(operator, args, pool, [0, 0, 3, 1, 0], pad=0)
    options = {"initial_state_indices": numbers([0, 0, 3, 1, 0], device), "pad_slot_id": 0, "inplace_final_state": True}
    assert torch.equal(operator.function(**args, initial_state=pool, **options)[0], o) and torch.equal(pool, after)


@operators
def test_steps_of_a_server(device, operator):
    """Prompts in pieces and token by token, in batches that change, are the prompts at once."""
    args, _, pool = make(operator, device, lengths=[64, 64], slots=4)
    o, ht = operator.function(**args, output_final_state=True)
    pool.zero_()
    tokens = {name: args[name] for name in ("q", "k", "v", "g", "beta")}
    rest = {name: x for name, x in args.items() if name not in tokens and name != "cu_seqlens"}
    pieces = {0: [], 1: []}
    # Each step: which tokens of which sequence. Sequence 0 has slot 3, 1 has slot 1.
    steps = [[(0, 0, 40)], [(1, 0, 1), (0, 40, 41)], [(0, 41, 64), (1, 1, 63)], [(1, 63, 64)]]
    for step in steps:
        part = {name: torch.cat([x[:, 64 * n + a : 64 * n + b] for n, a, b in step], 1) for name, x in tokens.items()}
        ends = torch.tensor([0] + [b - a for _, a, b in step]).cumsum(0)
        out, _ = operator.function(
            **part,
            **rest,
            cu_seqlens=ends.to(device),
            initial_state=pool,
            initial_state_indices=numbers([3 - 2 * n for n, *_ in step], device),
            inplace_final_state=True,
        )
        for (n, _, _), i, j in zip(step, ends, ends[1:], strict=False):
            pieces[n].append(out[:, i:j])
    ours = torch.cat([*pieces[0], *pieces[1]], 1)
    assert (ours.float() - o.float()).norm() <= 0.01 * o.float().norm()
    assert (pool[[3, 1]] - ht).norm() <= 0.01 * ht.norm()


@operators
@pytest.mark.parametrize("T", [0, 100])
def test_in_place_without_a_pool(device, operator, T):
    args = operator.inputs(2, T, 1, 2, 128, h0_dtype=BF16, device=device)
    state = args["initial_state"].clone()
    o, ht = operator.function(**args, output_final_state=True)
    ours, same = operator.function(**{**args, "initial_state": state}, inplace_final_state=True)
    assert same is state and torch.equal(ours, o) and torch.equal(state, ht.to(BF16))


@operators
def test_no_token_at_all(device, operator):
    args, _, pool = make(operator, device, lengths=[0, 0, 0])
    before = pool.clone()
    options = {"initial_state": pool, "initial_state_indices": numbers([5, -1, 2], device)}
    ht = operator.function(**args, **options, output_final_state=True)[1]
    assert torch.equal(ht[[0, 2]], before[[5, 2]]) and not ht[1].any()
    operator.function(**args, **options, inplace_final_state=True)
    assert torch.equal(pool, before)


@operators
def test_out(device, operator):
    """Whatever its strides, filled, and nothing beside it."""
    args, _, pool = make(operator, device, T=300)
    o, _ = operator.function(**args)
    wide = torch.full((3, 300, 4, 128), torch.nan, dtype=BF16, device=device)
    odd = torch.full((o.numel() + 1,), torch.nan, dtype=BF16, device=device)
    outs = [torch.full_like(o, torch.nan), wide[1:2, :, 1:3], odd[1:].view(o.shape)]
    for out in outs:
        ours, _ = operator.function(**args, out=out)
        assert ours is out and torch.equal(out, o)
    assert wide[::2].isnan().all() and wide[1, :, ::3].isnan().all() and odd[0].isnan()
    assert not outs[0][:, 265:].any()


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("v_first", [True, False])
def test_states_at_chunk_starts(device, lengths, v_first):
    """Those of the gated delta rule's forward alone, of Kimi Delta Attention tested elsewhere; a state resumes there."""
    shape = {} if lengths else {"B": 2, "T": 130}
    args, _, _ = make(Gdn, device, lengths=lengths, v_first=v_first, **shape)
    o, ht, h = chunk_gated_delta_rule(**args, output_final_state=True, return_intermediate_states=True)
    assert torch.equal(o, chunk_gated_delta_rule(**args)[0])
    N, inner = (2 if lengths is None else 5), (2, 128, 128)
    assert h.dtype == BF16 and h.shape == ((2, 3, *inner) if lengths is None else (1, 265 // 64 + 5, *inner))
    assert ht.shape == (N, *inner)
    # The last chunk of the last sequence from its state on, which h has in 16 bits.
    start, row, place = (128, 1, 2) if lengths is None else (135 + 128, 0, 2 + 1 + 1 + 2)
    last = {name: args[name][row : row + 1, start:] for name in ("q", "k", "v", "g", "beta")}
    state = h[row, place][None].float()
    resumed, _ = chunk_gated_delta_rule(**last, initial_state=state, state_v_first=v_first)
    whole = o[row : row + 1, start:].float()
    assert (resumed.float() - whole).norm() <= 0.02 * whole.norm()
    if lengths is not None:
        exact = chunk_gated_delta_rule(
            **args, cu_seqlens_cpu=args["cu_seqlens"].cpu(), return_intermediate_states=True
        )[2]
        assert exact.shape[1] == 7 and torch.equal(exact, h[:, :7]) and not h[:, 7:].any()


@operators
def test_states_at_chunk_starts_of_a_pool(device, operator):
    args, _, pool = make(operator, device)
    *_, h = by_hand(operator, args, pool, INDICES, PAD, return_intermediate_states=True)
    options = {"initial_state_indices": numbers(INDICES, device), "pad_slot_id": PAD, "inplace_final_state": True}
    before = pool.clone()
    *_, ours = operator.function(**args, initial_state=pool, **options, return_intermediate_states=True)
    assert torch.equal(ours, h) and torch.equal(ours[0, 0], before[4].to(BF16))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_kda_fwd(device, dtype):
    """Its final_state being the pool, or another slice of the same memory, or a tensor for these sequences."""
    args, buffer, pool = make(Kda, device, dtype=dtype, wide=2)
    args["lower_bound"] = -5.0
    o, ht, after = by_hand(Kda, args, pool, INDICES, PAD)
    given = {name: x for name, x in args.items() if name not in ACTIVATIONS}
    given |= {"scale": None, "initial_state_indices": numbers(INDICES, device), "pad_slot_id": PAD}
    before, final_state = buffer.clone(), torch.empty_like(ht)
    assert torch.equal(kda_fwd(**given, initial_state=pool, final_state=final_state), o)
    assert torch.equal(final_state, ht) and torch.equal(buffer, before)
    assert torch.equal(kda_fwd(**given, initial_state=pool), o) and torch.equal(buffer, before)
    for state in (pool, buffer[:, 1]):
        buffer.copy_(before)
        assert torch.equal(kda_fwd(**given, initial_state=pool, final_state=state), o)
        assert torch.equal(pool, after) and torch.equal(buffer[:, 0], before[:, 0])


# What is refused


POOL = torch.zeros(6, 2, 128, 128)
REFUSED = {
    "no pool": (
        ValueError,
        {"initial_state": None},
        "initial_state must be a tensor with initial_state_indices, got None",
    ),
    "nothing to write": (
        ValueError,
        {"initial_state": None, "initial_state_indices": None},
        "initial_state must be a tensor with inplace_final_state=True, got None",
    ),
    "heads": (
        ValueError,
        {"initial_state": torch.zeros(6, 3, 128, 128)},
        "initial_state must have shape [slots, HV, V, K] = [6, 2, 128, 128], got [6, 3, 128, 128]",
    ),
    "no slot": (
        ValueError,
        {"initial_state": POOL[:0]},
        "initial_state must have shape [slots, HV, V, K] = [1, 2, 128, 128], got [0, 2, 128, 128]",
    ),
    "a pool without indices": (
        ValueError,
        {"initial_state_indices": None},
        "initial_state must have shape [N, HV, V, K] = [2, 2, 128, 128], got [6, 2, 128, 128]",
    ),
    "float64 pool": (
        TypeError,
        {"initial_state": POOL.double()},
        "initial_state must have dtype torch.float32, bfloat16 or float16 with initial_state_indices, got torch.float64",
    ),
    "states that are not dense": (
        ValueError,
        {"initial_state": POOL.mT},
        "initial_state must hold each state densely, an even number of elements apart and aligned to two of them, "
        "with initial_state_indices, got strides (32768, 16384, 1, 128)",
    ),
    "slots that are one": (
        ValueError,
        {"initial_state": POOL[:1].expand(6, -1, -1, -1)},
        "initial_state must have an element of memory for each of its own, got strides (0, 16384, 128, 1)",
    ),
    "indices of other sequences": (
        ValueError,
        {"initial_state_indices": torch.tensor([0, 1, 2])},
        "initial_state_indices must have shape [N] = [2], got [3]",
    ),
    "indices of floats": (
        TypeError,
        {"initial_state_indices": torch.zeros(2)},
        "initial_state_indices must have dtype torch.int32 or torch.int64, got torch.float32",
    ),
    "index": (
        ValueError,
        {"initial_state_indices": torch.tensor([-1, 6])},
        "initial_state_indices must be below slots = 6, got 6 at 1",
    ),
    "pad_slot_id": (TypeError, {"pad_slot_id": None}, "pad_slot_id must be an int, got NoneType"),
    "wide pad_slot_id": (ValueError, {"pad_slot_id": 1 << 31}, "pad_slot_id must fit in 32 bits, got 2147483648"),
    "out dtype": (
        TypeError,
        {"out": torch.zeros(1, 128, 2, 128)},
        "out must have dtype torch.bfloat16, got torch.float32",
    ),
    "out rank": (
        ValueError,
        {"out": torch.zeros(128, 2, 128, dtype=BF16)},
        "out must have shape [B, T, HV, V] = [1, 128, 2, 128], got [128, 2, 128]",
    ),
    "out expanded": (
        ValueError,
        {"out": torch.zeros(1, 1, 2, 128, dtype=BF16).expand(-1, 128, -1, -1)},
        "out must have an element of memory for each of its own, got strides (256, 0, 128, 1)",
    ),
}


@operators
@pytest.mark.parametrize("name", REFUSED)
def test_refusals(operator, name):
    error, changes, message = REFUSED[name]
    args, _, pool = make(operator, "cpu", lengths=[3, 4], slots=6)
    given = {"initial_state": pool, "initial_state_indices": torch.tensor([0, 5]), "inplace_final_state": True}
    with pytest.raises(error) as raised:
        operator.function(**{**args, **given, **changes})
    assert str(raised.value) == message


@operators
@pytest.mark.parametrize("name", ["initial_state_indices", "inplace_final_state", "out"])
def test_no_gradient(operator, name):
    args, _, pool = make(operator, "cpu", lengths=[3, 4], slots=2)
    args["v"].requires_grad_()
    given = {
        "initial_state_indices": numbers([0, 1], "cpu"),
        "inplace_final_state": True,
        "out": torch.empty_like(args["v"]),
    }
    args |= {"initial_state": pool, name: given[name]}
    with pytest.raises(ValueError, match=f"^{name} must not be given where an input requires a gradient"):
        operator.function(**args)
    with torch.no_grad():
        operator.function(**args)


def test_chunk_states_have_no_gradient():
    args = inputs(H=1, T=70)
    args["beta"].requires_grad_()
    with pytest.raises(ValueError, match="^return_intermediate_states must not be given where an input requires"):
        chunk_gated_delta_rule(**args, return_intermediate_states=True)


@operators
def test_torch_compile_says_that_it_does_not_take_a_pool(operator):
    torch.compiler.reset()
    args, _, pool = make(operator, "cpu", lengths=[3, 4])
    args |= {"initial_state": pool, "initial_state_indices": numbers([0, 1], "cpu"), "inplace_final_state": True}
    call = torch.compile(lambda: operator.function(**args)[0], fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="torch.compile does not take initial_state_indices"):
        call()


# On the card


@on_gpu
@operators
@pytest.mark.parametrize("HV", [2, 64])
@pytest.mark.parametrize("indices", [[9, 1 << 20, NONE, -(1 << 31), -7], [PAD] * 5], ids=["outside", "padding"])
def test_indices_that_make_no_sense(operator, HV, indices):
    """Nobody looks at them on a GPU: sequences start from zero, and nothing is written."""
    args, buffer, pool = make(operator, "cuda", wide=3, HV=HV)
    before = buffer.clone()
    o, _ = operator.function(**args)
    options = {"initial_state_indices": numbers(indices, "cuda"), "pad_slot_id": PAD, "inplace_final_state": True}
    assert torch.equal(operator.function(**args, initial_state=pool, **options)[0], o)
    assert torch.equal(buffer, before)


@on_gpu
def test_indices_are_checked_on_request():
    code = (
        "import torch\n"
        "from flash_qla_tl import chunk_gated_delta_rule\n"
        "from flash_qla_tl.testing import inputs\n"
        "pool = torch.zeros(4, 1, 128, 128, device='cuda')\n"
        "indices = torch.tensor([4], device='cuda')\n"
        "args = inputs(1, 70, 1, K=128, device='cuda')\n"
        "try: chunk_gated_delta_rule(**args, initial_state=pool, initial_state_indices=indices)\n"
        "except ValueError as error: print(error)\n"
    )
    assert python(code, FLASH_QLA_TL_CHECK="1") == "initial_state_indices must be below slots = 4, got 4 at 0\n"


@on_gpu
@operators
@pytest.mark.parametrize("HV", [2, 64])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_whole_and_split_heads(operator, HV, dtype):
    """One CTA a head, and two that each own half of its state in the slot."""
    args, buffer, pool = make(operator, "cuda", lengths=[100] * 6, slots=12, dtype=dtype, wide=2, HV=HV)
    indices = [11, 3, -1, 0, 7, 5]
    o, _, after = by_hand(operator, args, pool, indices)
    options = {"initial_state_indices": numbers(indices, "cuda"), "inplace_final_state": True}
    assert torch.equal(operator.function(**args, initial_state=pool, **options)[0], o)
    assert torch.equal(pool, after)


@on_gpu
@operators
def test_more_than_two_to_the_31_elements(operator):
    """Of a pool with slots far apart."""
    wide = 1100
    buffer = torch.zeros(2**31 // (wide * 16384) + 2, wide, 1, 128, 128, dtype=BF16, device="cuda")
    pool = buffer[:, wide - 1]
    assert pool.stride(0) * (len(pool) - 1) > 2**31
    args = operator.inputs(1, 100, 1, K=128, h0_dtype=BF16, state_v_first=True, device="cuda")
    h0 = args.pop("initial_state")
    pool[-1] = h0[0]
    o, ht = operator.function(**args, initial_state=h0, output_final_state=True)
    indices = numbers([len(pool) - 1], "cuda")
    ours, _ = operator.function(**args, initial_state=pool, initial_state_indices=indices, inplace_final_state=True)
    assert torch.equal(ours, o) and torch.equal(pool[-1], ht[0].to(BF16)) and not pool[:-1].any()


@on_gpu
@operators
def test_graph_and_no_synchronisation(operator):
    """Captured once; replayed with other boundaries and other indices in the same tensors."""
    lengths = [[100, 0, 63, 1], [1, 130, 0, 33]]
    (args, _, pool), (other, _, _) = (make(operator, "cuda", lengths=x, HV=4) for x in lengths)
    indices = numbers([5, -1, 3, 8], "cuda")
    out, kept = torch.empty_like(args["v"]), pool.clone()
    given = {**args, "initial_state": pool, "initial_state_indices": indices, "inplace_final_state": True, "out": out}
    operator.function(**given)  # compiles
    pool.copy_(kept)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        operator.function(**given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    pool.copy_(kept)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operator.function(**given)
    for source, slots in ((args, [5, -1, 3, 8]), (other, [0, 6, 6, 2])):
        pool.copy_(kept)
        for name, x in source.items():
            if torch.is_tensor(x):
                args[name].copy_(x)
        indices.copy_(numbers(slots, "cuda"))
        graph.replay()
        torch.cuda.synchronize()
        o, _, after = by_hand(operator, source, kept, slots)
        # The empty sequence of the second batch shares a slot, and leaves it.
        assert torch.equal(out, o) and torch.equal(pool, after)
