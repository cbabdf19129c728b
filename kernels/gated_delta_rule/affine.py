"""What a run of whole chunks does to a state, S' = M S + N, and to the gradient behind it: by the kernels that walk segments."""

import torch

from flash_qla_tl.kernels.common.target import CHUNK, num_sms, on_device
from flash_qla_tl.kernels.common.tensors import readable, tma_ready
from flash_qla_tl.kernels.gated_delta_rule.chunk_bwd import state_gradient
from flash_qla_tl.kernels.gated_delta_rule.chunk_intra import chunk_intra
from flash_qla_tl.kernels.gated_delta_rule.segment_states import affine_map


def state_map(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    *,
    use_qk_l2norm: bool,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    beta_range: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> N [HV, K, V] and M [HV, K, K] in fp32 of a row (B = 1) of whole chunks. Two launches."""
    q, k, v = tma_ready(q), tma_ready(k), tma_ready(v)
    assert q.shape[0] == 1 and q.shape[1] % CHUNK == 0
    if A_log is not None:
        A_log = A_log.float().contiguous()
        dt_bias = torch.zeros_like(A_log) if dt_bias is None else dt_bias.float().contiguous()
    with on_device(q.device.index):
        TPs, factors = chunk_intra(
            q,
            k,
            readable(g),
            readable(beta),
            1.0,
            v,  # which dense input does not write
            slots=q.shape[1] // CHUNK,
            cu_seqlens=None,
            A=None,
            g_cumsum=None,
            use_qk_l2norm=use_qk_l2norm,
            A_log=A_log,
            dt_bias=dt_bias,
            beta_range=beta_range,
        )
        N, M = affine_map(k, v, TPs, factors, num_sms(q.device.index))
    return N.mT, M.mT


def gradient(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    do: torch.Tensor,
    dht: torch.Tensor,
    scale: float,
    *,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
) -> torch.Tensor:
    """-> [HV, K, V] fp32, with respect to the state before a row of tokens; do and dht [HV, K, V] are those of what they make.

    q, k and beta as the recurrence takes them. Two launches, five where the row is split into segments.
    """
    q, k, v = tma_ready(q), tma_ready(k), tma_ready(v)
    B, num_tokens = q.shape[:2]
    HV = v.shape[2]
    if A_log is not None:
        A_log = A_log.float().contiguous()
        dt_bias = torch.zeros_like(A_log) if dt_bias is None else dt_bias.float().contiguous()
    A = q.new_empty((B, num_tokens, HV, CHUNK))
    g_cumsum = q.new_empty((B, num_tokens, HV), dtype=torch.float32)
    with on_device(q.device.index):
        chunk_intra(
            q,
            k,
            readable(g),
            readable(beta),
            scale,
            v,  # which dense input does not write
            slots=-(-num_tokens // CHUNK),
            cu_seqlens=None,
            A=A,
            g_cumsum=g_cumsum,
            use_qk_l2norm=False,
            A_log=A_log,
            dt_bias=dt_bias,
            beta_range=0.0,
        )
    return state_gradient(q, k, v, g_cumsum, beta, A, do, dht[None], scale)[0]
