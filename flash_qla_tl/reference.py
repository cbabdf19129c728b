"""The operators token by token: the definitions that everything else is held against.

The gated delta rule of Yang et al., Gated Delta Networks (arXiv:2412.06464), and Kimi Delta
Attention of Kimi Linear (arXiv:2510.26692). Slow, and differentiable throughout.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_qla_tl.utils.index import pack, unpack
from flash_qla_tl.utils.norm import compute_dtype, l2norm


def activate(
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """What the operators do to their inputs before the recurrence, where they are asked to.

    ``q`` and ``k`` are normalised to unit length (:func:`flash_qla_tl.utils.l2norm`), the log
    decay becomes ``-exp(A_log) * softplus(g + dt_bias)``, or with a ``lower_bound``
    ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``, the write strength ``sigmoid(beta)``, or
    twice that with ``allow_neg_eigval``. What changes is returned in fp32 (float64 for float64 q).

    ``g`` is ``[B, T, HV]`` or ``[B, T, HV, K]``; ``dt_bias`` is shaped like a token of it, or flat.
    Rows past ``cu_seqlens[-1]`` count as zeros.
    """
    dtype = compute_dtype(q)

    def read(x):
        x = x.to(dtype)
        if cu_seqlens is None:
            return x
        # What stands in the padding may be NaN, which not even a gradient of 0 would pass by.
        padding = torch.arange(x.shape[1], device=x.device) >= cu_seqlens[-1]
        return x.masked_fill(padding.view(-1, *(1 for _ in x.shape[2:])), 0)

    if use_qk_l2norm_in_kernel:
        q, k = l2norm(read(q)), l2norm(read(k))
    if use_gate_in_kernel:
        g = read(g)
        if dt_bias is not None:
            g = g + dt_bias.to(dtype).reshape(g.shape[2:])
        # Every head has its own factor, the same for all of its channels.
        rate = 1 if A_log is None else A_log.to(dtype).exp().view(-1, *(1 for _ in g.shape[3:]))
        g = -rate * F.softplus(g) if lower_bound is None else lower_bound * (rate * g).sigmoid()
    if use_beta_sigmoid_in_kernel:
        beta = read(beta).sigmoid() * (2 if allow_neg_eigval else 1)
    return q, k, g, beta


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    dtype: torch.dtype | None = None,
    **activations: object,
) -> tuple[Tensor, Tensor]:
    """The recurrence, for each sequence and value head, over its tokens::

        S = exp(g) * S
        S = S + beta * k (v - S^T k)^T
        o = scale * S^T q

    Args:
        q, k, v, g, beta, scale, initial_state, cu_seqlens, state_v_first: as for
            :func:`flash_qla_tl.chunk_gated_delta_rule`.
        dtype: the float dtype everything is computed in; None means that of ``q``.
        **activations: the keywords of :func:`activate`.

    Returns:
        ``o`` ``[B, T, HV, V]`` and the final state, both in ``dtype``; rows of ``o`` past
        ``cu_seqlens[-1]`` are zero.
    """
    dtype = dtype or q.dtype
    if g is None:
        g = torch.zeros_like(beta)
    q, k, v, g, beta = _prepare(q, k, v, g, beta, cu_seqlens, dtype, activations)
    return _recurrence(q, k, v, g[..., None], beta, scale, initial_state, cu_seqlens, state_v_first)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    dtype: torch.dtype | None = None,
    **activations: object,
) -> tuple[Tensor, Tensor]:
    """The same with a decay for every channel of the key: ``S = diag(exp(g)) S`` comes first.

    Arguments as for :func:`flash_qla_tl.chunk_kda`, results as of :func:`gated_delta_rule`.
    """
    q, k, v, g, beta = _prepare(q, k, v, g, beta, cu_seqlens, dtype or q.dtype, activations)
    return _recurrence(q, k, v, g, beta, scale, initial_state, cu_seqlens, state_v_first)


def _prepare(q, k, v, g, beta, cu_seqlens, dtype, activations):
    # The activations keep to their own precision; what they return is rounded like an input.
    q, k, g, beta = activate(*(x.to(dtype) for x in (q, k, g, beta)), cu_seqlens=cu_seqlens, **activations)
    return tuple(x.to(dtype) for x in (q, k, v, g, beta))


def _recurrence(q, k, v, g, beta, scale, initial_state, cu_seqlens, state_v_first):
    """``g`` is ``[B, T, HV, K]``, or ``[B, T, HV, 1]`` where all channels fade alike."""
    dtype, T = q.dtype, q.shape[1]
    if cu_seqlens is not None:
        # Padding is all zeros, and a token of zeros leaves the state as it is.
        q, k, v, g, beta = (unpack(x, cu_seqlens) for x in (q, k, v, g, beta))
    N, steps, HV, V = v.shape
    K = q.shape[3]
    if scale is None:
        scale = K**-0.5
    q, k = (x.repeat_interleave(HV // x.shape[2], dim=2) for x in (q, k))

    if initial_state is None:
        S = torch.zeros(N, HV, K, V, dtype=dtype, device=q.device)
    else:
        S = (initial_state.mT if state_v_first else initial_state).to(dtype)
    o = [v[:, :0]]
    for t in range(steps):
        S = g[:, t, ..., None].exp() * S
        error = v[:, t] - torch.einsum("nhkv,nhk->nhv", S, k[:, t])
        S = S + torch.einsum("nhk,nhv->nhkv", beta[:, t, :, None] * k[:, t], error)
        o.append(scale * torch.einsum("nhkv,nhk->nhv", S, q[:, t])[:, None])
    o = torch.cat(o, dim=1)

    if cu_seqlens is not None:
        o = pack(o, cu_seqlens)
        o = F.pad(o, (0, 0, 0, 0, 0, T - o.shape[1]))
    return o, S.mT if state_v_first else S
