"""A stand-in for the kernels on the CPU, behind the very function that the package calls.

It lets everything between the public functions and a kernel (which arguments arrive, what autograd
saves and returns) be tested where no kernel runs.
"""

import sys
from types import SimpleNamespace

import torch

from flash_qla_tl.kernels.common import target
from flash_qla_tl.kernels.common.state_pool import read_slots, write_slots
from flash_qla_tl.reference import activate
from flash_qla_tl.torch_chunked import chunked, chunked_bwd

MODULE = "flash_qla_tl.kernels.gated_delta_rule."


def install(monkeypatch):
    monkeypatch.setitem(sys.modules, f"{MODULE}chunk_fwd", SimpleNamespace(chunk_fwd=chunk_fwd))
    monkeypatch.setitem(sys.modules, f"{MODULE}chunk_bwd", SimpleNamespace(chunk_bwd=chunk_bwd))
    affine = SimpleNamespace(state_map=state_map, gradient=gradient)
    monkeypatch.setitem(sys.modules, f"{MODULE}affine", affine)
    activations = SimpleNamespace(activations_fwd=activations_fwd, activations_bwd=activations_bwd)
    monkeypatch.setitem(sys.modules, f"{MODULE}activations", activations)
    monkeypatch.setattr(target, "refusal", refusal)


def refusal(q, k, v):
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"the kernels need 16 bits, got {q.dtype}"
    if not all(x in (64, 128) for x in (q.shape[-1], v.shape[-1])):
        return f"the kernels need head dims of 64 or 128, got K={q.shape[-1]}, V={v.shape[-1]}"
    return None


@torch.no_grad()
def chunk_fwd(
    q,
    k,
    v,
    g,
    beta,
    scale,
    *,
    h0=None,
    cu_seqlens=None,
    h0_indices=None,
    pad_slot_id=-1,
    inplace_final_state=False,
    output_final_state=False,
    state_v_first=False,
    o=None,
    output_A=False,
    output_h=False,
    num_chunks=None,
    longest=None,
    auto_cp=True,
    use_qk_l2norm=False,
    A_log=None,
    dt_bias=None,
    use_beta_sigmoid=False,
    allow_neg_eigval=False,
):
    dtype = q.dtype
    layout = (lambda x: x.mT) if state_v_first else (lambda x: x)
    q, k, g, beta = activate(
        q,
        k,
        g,
        beta,
        use_qk_l2norm_in_kernel=use_qk_l2norm,
        use_gate_in_kernel=A_log is not None,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
    )
    start = read_slots(h0, h0_indices, pad_slot_id)
    rounded = lambda x: x.to(dtype).float()  # noqa: E731
    out = chunked(q, k, v, g, beta, scale, None if h0 is None else layout(start), cu_seqlens, operand=rounded)
    ht = layout(out.ht) if output_final_state else None
    if inplace_final_state:
        ht = h0
        write_slots(h0, h0_indices, pad_slot_id, layout(out.ht), cu_seqlens)
    h = None
    if output_h:
        h = layout(out.h[out.chunks.by_sequence]).to(dtype)
        if cu_seqlens is None:
            h = h.unflatten(0, (q.shape[0], -(-q.shape[1] // 64)))
        else:
            slots = num_chunks or q.shape[1] // 64 + len(cu_seqlens) - 1
            h = torch.cat((h, h.new_zeros(slots - len(h), *h.shape[1:])))[None]
    return SimpleNamespace(
        o=out.o.to(dtype) if o is None else o.copy_(out.o),
        ht=ht,
        A=out.chunks.join(out.A).to(dtype) if output_A else None,
        g_cumsum=out.chunks.join(out.g_cumsum) if output_A else None,
        h=h,
    )


def chunk_bwd(
    q,
    k,
    v,
    g_cumsum,
    beta,
    A,
    do,
    *,
    dht=None,
    scale,
    h0=None,
    cu_seqlens=None,
    state_v_first=False,
    num_chunks=None,
    longest=None,
    auto_cp=True,
):
    layout = (lambda x: None if x is None else x.mT) if state_v_first else (lambda x: x)
    rounded = lambda x: x.to(q.dtype).float()  # noqa: E731
    *grads, dh0 = chunked_bwd(q, k, v, g_cumsum, beta, do, layout(dht), scale, layout(h0), cu_seqlens, operand=rounded)
    return *grads, layout(dh0)


def _activate(q, k, g, beta, cu_seqlens, use_qk_l2norm, A_log, dt_bias, beta_range):
    return activate(
        q,
        k,
        g,
        beta,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm,
        use_gate_in_kernel=A_log is not None,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=beta_range != 0,
        allow_neg_eigval=beta_range == 2,
    )


@torch.no_grad()
def activations_fwd(q, k, beta, *, cu_seqlens, use_qk_l2norm, beta_range):
    dtype = q.dtype
    q, k, _, beta = _activate(q, k, None, beta, cu_seqlens, use_qk_l2norm, None, None, beta_range)
    return q.to(dtype), k.to(dtype), beta.float()


def activations_bwd(
    q, k, g, beta, dq, dk, dg, db, *, cu_seqlens, use_qk_l2norm, A_log, dt_bias, beta_range, sums=True
):  # fmt: skip
    inputs = q, k, g if A_log is not None else None, beta, A_log, dt_bias
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    weights = dq, dk, dg, db
    with torch.enable_grad():
        raw = leaves[:4]
        active = _activate(*raw, cu_seqlens, use_qk_l2norm, *leaves[4:], beta_range)
    found = dict(enumerate((*weights, None, None)))
    changed = [i for i in range(4) if active[i] is not raw[i]]
    wanted = [i for i in range(6) if leaves[i] is not None and (i in changed or i > 3 and sums)]
    outputs = [active[i] for i in changed]
    grads = torch.autograd.grad(
        outputs, [leaves[i] for i in wanted], [weights[i].to(x.dtype) for i, x in zip(changed, outputs, strict=True)]
    )
    found.update(zip(wanted, grads, strict=True))
    return tuple(found.values())


@torch.no_grad()
def state_map(q, k, v, g, beta, *, use_qk_l2norm, A_log, dt_bias, beta_range):
    assert len(q) == 1 and q.shape[1] % 64 == 0
    dtype = q.dtype
    q, k, g, beta = _activate(q, k, g, beta, None, use_qk_l2norm, A_log, dt_bias, beta_range)
    rounded = lambda x: x.to(dtype).float()  # noqa: E731
    K, HV = k.shape[3], v.shape[2]
    N = chunked(q, k, v, g, beta, 1.0, operand=rounded).ht
    M = chunked(q, k, v.new_zeros(*v.shape[:3], K), g, beta, 1.0, torch.eye(K).expand(1, HV, K, K), operand=rounded).ht
    return N[0], M[0]


def gradient(q, k, v, g, beta, do, dht, scale, *, A_log, dt_bias):
    dtype = q.dtype
    q, k, g, beta = _activate(q, k, g, beta, None, False, A_log, dt_bias, 0.0)
    rounded = lambda x: x.to(dtype).float()  # noqa: E731
    out = chunked(q, k, v, g, beta, scale, operand=rounded)
    g_cumsum = out.chunks.join(out.g_cumsum)
    h0 = torch.zeros_like(dht)[None]
    return chunked_bwd(q, k, v, g_cumsum, beta, do, dht[None], scale, h0, None, operand=rounded)[-1][0]
