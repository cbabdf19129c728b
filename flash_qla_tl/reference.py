"""The gated delta rule token by token: the definition that everything else is held against.

Yang et al., Gated Delta Networks (arXiv:2412.06464). Slow, and differentiable throughout.
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
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """What the operator does to its inputs before the recurrence, where it is asked to.

    ``q`` and ``k`` are normalised to unit length (:func:`flash_qla_tl.utils.l2norm`), the log
    decay becomes ``-exp(A_log) * softplus(g + dt_bias)``, the write strength ``sigmoid(beta)``, or
    twice that with ``allow_neg_eigval``. What changes is returned in fp32 (float64 for float64 q).
    """
    dtype = compute_dtype(q)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q.to(dtype)), l2norm(k.to(dtype))
    if use_gate_in_kernel:
        bias = 0 if dt_bias is None else dt_bias.to(dtype)
        g = -A_log.to(dtype).exp() * F.softplus(g.to(dtype) + bias)
    if use_beta_sigmoid_in_kernel:
        beta = beta.to(dtype).sigmoid() * (2 if allow_neg_eigval else 1)
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
    q, k, v, beta = (x.to(dtype) for x in (q, k, v, beta))
    if g is None:
        g = torch.zeros_like(beta)
    # The activations keep to their own precision; what they return is rounded like an input.
    q, k, g, beta = (x.to(dtype) for x in activate(q, k, g.to(dtype), beta, **activations))

    T = q.shape[1]
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
        S = g[:, t, :, None, None].exp() * S
        error = v[:, t] - torch.einsum("nhkv,nhk->nhv", S, k[:, t])
        S = S + torch.einsum("nhk,nhv->nhkv", beta[:, t, :, None] * k[:, t], error)
        o.append(scale * torch.einsum("nhkv,nhk->nhv", S, q[:, t])[:, None])
    o = torch.cat(o, dim=1)

    if cu_seqlens is not None:
        o = pack(o, cu_seqlens)
        o = F.pad(o, (0, 0, 0, 0, 0, T - o.shape[1]))
    return o, S.mT if state_v_first else S
