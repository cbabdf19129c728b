"""FlashQLA's interface on our functions: what code written for flash-qla 0.1.3 does with it."""

import inspect

import pytest
import torch

import flash_qla_tl
from flash_qla_tl import reference
from flash_qla_tl.compat import flash_qla
from flash_qla_tl.compat.flash_qla.utils import (
    fill_last_chunk_of_g,
    l2norm,
    l2norm_bwd,
    l2norm_fwd,
    pack,
    pad_and_reshape,
    prepare_chunk_offsets,
    prepare_varlen_metadata,
    unpack,
)
from flash_qla_tl.testing import inputs, rel_l2

FP32, FP64 = torch.float32, torch.float64

# Of flash-qla 0.1.3: callers pass these by position.
PARAMETERS = {
    "chunk_gated_delta_rule": "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens "
    "head_first state_v_first auto_cp enable_fwd_cp_cache cp_context force_intra_cp",
    "chunk_gated_delta_rule_fwd": "q k v g beta scale initial_state cu_seqlens output_final_state output_h auto_cp "
    "state_v_first enable_fwd_cp_cache cp_context is_train",
    "chunk_gated_delta_rule_bwd": "q k v g beta A do dht scale initial_state cu_seqlens state_v_first auto_cp cp_cache "
    "cp_context",
}
# And these of its helpers.
HELPERS = {
    "fill_last_chunk_of_g": "g num_tokens cu_seqlens chunk_size reverse",
    "l2norm": "x eps",
    "l2norm_bwd": "y rstd dy eps dim",
    "l2norm_fwd": "x eps dim",
    "pack": "x cu_seqlens",
    "pad_and_reshape": "x dim chunk_size",
    "prepare_chunk_indices": "cu_seqlens chunk_size",
    "prepare_chunk_offsets": "cu_seqlens chunk_size",
    "prepare_varlen_metadata": "cu_seqlens cu_seqlens_cpu",
    "unpack": "x cu_seqlens",
}


@pytest.mark.parametrize("owner, names", [(flash_qla, PARAMETERS), (flash_qla.utils, HELPERS)], ids=["ops", "utils"])
def test_parameters(owner, names):
    for name, expected in names.items():
        parameters = inspect.signature(getattr(owner, name)).parameters.values()
        assert " ".join(x.name for x in parameters) == expected, name
        assert all(x.kind is x.POSITIONAL_OR_KEYWORD for x in parameters), name
    assert set(names) <= set(owner.__all__)


def test_version():
    assert flash_qla.__version__ == "0.1.3"


def case(packed, state_v_first=False, dtype=FP64):
    lengths = [70, 0, 63, 64] if packed else None
    args = inputs(2, 100, 2, 4, 16, 32, lengths=lengths, dtype=dtype, h0_dtype=FP32, state_v_first=state_v_first)
    names = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")
    return [args.get(name) for name in names]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("state_v_first", [False, True], ids=["kv", "vk"])
def test_all_by_position(packed, state_v_first):
    """Forward and backward as FlashQLA's own tests call them, against autograd through the recurrence."""
    q, k, v, g, beta, h0, cu = case(packed, state_v_first)
    scale, auto_cp = 0.3, False
    leaves = [x.double().requires_grad_() for x in (q, k, v, beta, g, h0)]
    q_, k_, v_, beta_, g_, h0_ = leaves
    o_, ht_ = reference.gated_delta_rule(q_, k_, v_, g_, beta_, scale, h0_, cu_seqlens=cu, state_v_first=state_v_first)
    do, dht = torch.randn_like(o_), torch.randn_like(ht_)
    exact = torch.autograd.grad((o_, ht_), leaves, (do, dht))

    out = flash_qla.chunk_gated_delta_rule_fwd(
        q, k, v, g, beta, scale, h0, cu, True, True, auto_cp, state_v_first, True, None, True
    )
    assert type(out) is tuple and len(out) == 6
    g_cumsum, A, o, h, ht, cp_cache = out
    assert rel_l2(o, o_) < 1e-6 and rel_l2(ht, ht_) < 1e-6 and cp_cache is None

    grads = flash_qla.chunk_gated_delta_rule_bwd(
        q, k, v, g_cumsum, beta, A, do, dht, scale, h0, cu, state_v_first, auto_cp, cp_cache, None
    )
    assert len(grads) == 6
    for name, x, y in zip(("q", "k", "v", "b", "g", "h0"), grads, exact, strict=True):
        assert rel_l2(x, y) < 1e-6, name

    o, ht = flash_qla.chunk_gated_delta_rule(
        q, k, v, g, beta, scale, h0, True, False, cu, False, state_v_first, auto_cp, True, None, True
    )
    assert rel_l2(o, o_) < 1e-6 and rel_l2(ht, ht_) < 1e-6


# Sizes of FlashQLA's own tests, shorter: equal heads, heads of a group, packed sequences, and rows behind the last of them.
SIZES = {
    "equal heads": dict(B=2, T=130, H=2),
    "grouped": dict(B=1, T=200, H=1, HV=4),
    "packed": dict(H=1, HV=2, lengths=[64, 1, 0, 100, 63]),
    "padding": dict(H=1, HV=2, lengths=[73, 42, 94], T=256),
}


def strong(size, with_state, state_v_first, device):
    """bf16, head dims of 128, and heads from no decay to 21 powers of e a token."""
    h0_dtype = FP32 if with_state else None
    args = inputs(**SIZES[size], K=128, normalised=False, h0_dtype=h0_dtype, state_v_first=state_v_first, device=device)
    HV = args["v"].shape[2]
    rate = 16 * torch.rand(HV, device=device)
    rate[0], rate[-1] = 0, 16
    args["g"] = -rate * torch.nn.functional.softplus(0.5 * torch.randn_like(args["g"]) + 1)
    args["q"], args["k"] = (flash_qla.utils.l2norm(args[x]) for x in "qk")
    return [args.get(x) for x in ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")]


def rows(x, cu):
    """[N, T_max, ...] of packed tokens."""
    return x if cu is None else unpack(x, cu)


def truth(q, k, v, g, beta, scale, h0, cu, state_v_first):
    """o, states at chunk starts and final states in float64, sequence by sequence and chunk by chunk."""
    o, h, ht = [], [], []
    bounds = [(b, 0, q.shape[1]) for b in range(len(q))]
    if cu is not None:
        bounds = [(0, *x) for x in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)]
    for n, (b, bos, eos) in enumerate(bounds):
        K, V, HV = q.shape[3], v.shape[3], v.shape[2]
        sizes = (1, HV, V, K) if state_v_first else (1, HV, K, V)
        state = torch.zeros(sizes, dtype=FP64, device=q.device) if h0 is None else h0[n : n + 1]
        for t in range(bos, eos, 64):
            h.append(state)
            piece = [x[b : b + 1, t : min(t + 64, eos)] for x in (q, k, v, g, beta)]
            out, state = reference.gated_delta_rule(*piece, scale, state, state_v_first=state_v_first)
            o.append(out)
        ht.append(state)
    h, ht = torch.cat(h), torch.cat(ht)
    if cu is None:
        return torch.cat(o, 1).view(v.shape), h.unflatten(0, (len(q), -1)), ht
    o = torch.cat(o, 1)
    return torch.nn.functional.pad(o, (0, 0, 0, 0, 0, v.shape[1] - o.shape[1])), h[None], ht


@pytest.mark.parametrize("state_v_first", [False, True], ids=["kv", "vk"])
@pytest.mark.parametrize("with_state", [False, True], ids=["no state", "state"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_as_its_own_tests_go(device, size, with_state, state_v_first):
    """Every result of both halves within 2% of float64, and nothing behind the last sequence."""
    q, k, v, g, beta, h0, cu = strong(size, with_state, state_v_first, device)
    scale, T = 128**-0.5, v.shape[1]
    leaves = [None if x is None else x.double().requires_grad_() for x in (q, k, v, beta, g, h0)]
    q_, k_, v_, beta_, g_, h0_ = leaves
    o_, h_, ht_ = truth(q_, k_, v_, g_, beta_, scale, h0_, cu, state_v_first)
    do, dht = torch.randn_like(o_).to(v.dtype), torch.randn_like(ht_).float()
    exact = torch.autograd.grad((o_, ht_), [x for x in leaves if x is not None], (do.double(), dht.double()))

    for fwd_cp, bwd_cp in ((True, True), (False, True), (True, False)):
        g_cumsum, A, o, h, ht, cp_cache = flash_qla.chunk_gated_delta_rule_fwd(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=h0,
            cu_seqlens=cu,
            output_final_state=True,
            output_h=True,
            auto_cp=fwd_cp,
            state_v_first=state_v_first,
            enable_fwd_cp_cache=fwd_cp,
        )
        assert h.shape == h_.shape
        assert all(rel_l2(x, y) < 0.02 for x, y in ((o, o_), (h, h_), (ht, ht_)))
        dq, dk, dv, db, dg, dh0 = flash_qla.chunk_gated_delta_rule_bwd(
            q, k, v, g_cumsum, beta, A, do, dht, scale, h0, cu, state_v_first, bwd_cp, cp_cache=cp_cache
        )
        assert (dh0 is None) == (h0 is None)
        found = [x for x in (dq, dk, dv, db, dg, dh0) if x is not None]
        assert all(rel_l2(x, y) < 0.02 for x, y in zip(found, exact, strict=True))
        end = T if cu is None else int(cu[-1])
        assert not any(x[:, end:].any() for x in (o, dq, dk, dv, db, dg))

    # The gates of chunks as its reference makes them, from the helpers alone.
    chunks = pad_and_reshape(rows(g, cu), 1).cumsum(2)
    filled = fill_last_chunk_of_g(chunks.clone(), T, cu)
    expected = filled.flatten(1, 2)[:, : rows(g, cu).shape[1]]
    ours = rows(g_cumsum, cu)
    inside = rows(torch.ones_like(g, dtype=torch.bool), cu)
    assert torch.allclose(ours[inside], expected[inside], rtol=1e-4, atol=1e-4)


def test_states_of_packed_sequences_are_as_many_as_chunks():
    q, k, v, g, beta, h0, cu = case(packed=True)
    h = flash_qla.chunk_gated_delta_rule_fwd(q, k, v, g, beta, None, h0, cu, output_h=True)[3]
    offsets, count = prepare_chunk_offsets(cu, 64)
    assert h.shape == (1, count, 4, 16, 32) and count == 4
    for n in (0, 2, 3):
        assert torch.equal(h[0, offsets[n]], h0[n].to(h.dtype))
    assert len(flash_qla_tl.chunk_gated_delta_rule_fwd(q, k, v, g, beta, None, h0, cu, output_h=True).h[0]) > count


def test_defaults():
    """Which differ between the halves and the whole."""
    q, k, v, g, beta, _, _ = case(packed=False)
    g_cumsum, A, o, h, ht, cp_cache = flash_qla.chunk_gated_delta_rule_fwd(q, k, v, g, beta)
    assert h is None and ht is not None and cp_cache is None
    whole, no_state = flash_qla.chunk_gated_delta_rule(q, k, v, g, beta)
    assert torch.equal(whole, o) and no_state is None
    assert flash_qla.chunk_gated_delta_rule_bwd(q, k, v, g_cumsum, beta, A, o)[5] is None


def test_l2norm_inside_and_gradients():
    q, k, v, g, beta, h0, _ = case(packed=False, dtype=FP32)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta, h0)]
    for x in leaves[:2]:
        x.data.mul_(3)
    o, ht = flash_qla.chunk_gated_delta_rule(
        *leaves[:5], initial_state=leaves[5], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    found = torch.autograd.grad((o, ht), leaves, (torch.ones_like(o), torch.ones_like(ht)))
    o, ht = reference.gated_delta_rule(*leaves[:5], None, leaves[5], use_qk_l2norm_in_kernel=True)
    exact = torch.autograd.grad((o, ht), leaves, (torch.ones_like(o), torch.ones_like(ht)))
    assert all(rel_l2(x, y) < 1e-4 for x, y in zip(found, exact, strict=True))


def test_what_does_not_apply():
    q, k, v, g, beta, h0, cu = case(packed=True)
    g_cumsum, A, o, *_ = flash_qla.chunk_gated_delta_rule_fwd(q, k, v, g, beta, None, h0, cu)
    with pytest.raises(TypeError, match="cp_context must be what build_cp_context returns"):
        flash_qla.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu, cp_context=object())
    with pytest.raises(NotImplementedError, match="cp_context must be None"):
        flash_qla.chunk_gated_delta_rule_fwd(q, k, v, g, beta, cu_seqlens=cu, cp_context=object())
    with pytest.raises(NotImplementedError, match="cp_context must be None"):
        flash_qla.chunk_gated_delta_rule_bwd(q, k, v, g_cumsum, beta, A, o, cu_seqlens=cu, cp_context=object())
    with pytest.raises(ValueError, match="cp_cache must be None, .* got dict"):
        flash_qla.chunk_gated_delta_rule_bwd(q, k, v, g_cumsum, beta, A, o, cu_seqlens=cu, cp_cache={})
    with pytest.raises(ValueError, match="head_first must be False"):
        flash_qla.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu, head_first=True)
    with pytest.raises(TypeError, match="use_gate_in_kernel"):
        flash_qla.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu, use_gate_in_kernel=True)


def test_l2norm_halves():
    x = torch.randn(2, 3, 8, dtype=FP64, requires_grad=True)
    y, rstd = l2norm_fwd(x)
    assert torch.equal(y, l2norm(x)) and rstd.shape == (2, 3)
    dy = torch.randn_like(y)
    (exact,) = torch.autograd.grad(y, x, dy)
    assert torch.allclose(l2norm_bwd(y, rstd, dy), exact)
    y, rstd = l2norm_fwd(torch.zeros(1, 4, dtype=torch.bfloat16), dim=1)
    assert y.dtype == torch.bfloat16 and rstd.dtype == FP32 and not y.any()
    with pytest.raises(ValueError, match="dim must be the last axis, -1 or 2, got 0"):
        l2norm_fwd(x, dim=0)


def test_chunks_of_padded_sequences():
    """The way FlashQLA's reference comes to gates summed within padded chunks."""
    cu = torch.tensor([0, 5, 5, 13])
    g = torch.randn(1, 13, 2, dtype=FP64)
    chunks = pad_and_reshape(unpack(g, cu), 1, 4)
    assert chunks.shape == (3, 2, 4, 2) and not chunks[0, 1, 1:].any()
    filled = fill_last_chunk_of_g(chunks.cumsum(2), 13, cu, 4)
    expected = torch.tensor([1, 1, 1, 1]).view(4, 1) * g[0, 4]
    assert torch.equal(filled[0, 1], expected)
    assert torch.equal(filled[2], chunks[2].cumsum(1))
    # The gradient of what was filled goes back to where it came from.
    flat = torch.ones(3, 2, 4, 2)
    assert fill_last_chunk_of_g(flat, 13, cu, 4, reverse=True) is flat
    assert flat[0, 1, 0].tolist() == [2, 2] and flat.sum() == 3 * 2 * 4 * 2 + 2
    dense = fill_last_chunk_of_g(pad_and_reshape(g, 1, 4).cumsum(2), 13, None, 4)
    assert torch.equal(dense[0, 3], g[0, 12].expand(4, 2))
    assert torch.equal(pack(unpack(g, cu), cu), g)
    assert pad_and_reshape(g[:, :0], 1, 4).shape == (1, 0, 4, 2)
    assert prepare_varlen_metadata(cu, cu) is cu
