"""A stand-in for the kernels of Kimi Delta Attention on the CPU, behind the very function that the package calls."""

import sys
from types import SimpleNamespace

import torch
from emulated_kernels import refusal

from flash_qla_tl.dispatch import k_first
from flash_qla_tl.kernels.common import target
from flash_qla_tl.kernels.common.state_pool import read_slots, same_memory, write_slots
from flash_qla_tl.reference import activate
from flash_qla_tl.torch_chunked import states_by_chunk
from flash_qla_tl.torch_kda import chunked_kda

MODULE = "flash_qla_tl.kernels.kda.fwd"


def install(monkeypatch, forward=None):
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(forward=forward or emulated_forward))
    monkeypatch.setattr(target, "refusal", refusal)


def installed():
    return isinstance(sys.modules.get(MODULE), SimpleNamespace)


@torch.no_grad()
def emulated_forward(
    q,
    k,
    v,
    g,
    beta,
    scale,
    *,
    h0=None,
    h0_indices=None,
    pad_slot_id=-1,
    ht=None,
    o=None,
    cu_seqlens=None,
    state_v_first=False,
    output_h=False,
    num_chunks=None,
    longest=None,
    **activations,
):
    dtype = q.dtype
    q, k, g, beta = activate(q, k, g, beta, cu_seqlens=cu_seqlens, **activations)
    rounded = lambda x: x.to(dtype).float()  # noqa: E731
    start = k_first(read_slots(h0, h0_indices, pad_slot_id), state_v_first)
    out = chunked_kda(q, k, v, g, beta, scale, start, cu_seqlens, operand=rounded)
    if ht is not None:
        indices = h0_indices if same_memory(ht, h0) else None
        write_slots(ht, indices, pad_slot_id, k_first(out.ht, state_v_first), cu_seqlens)
    h = states_by_chunk(out.h, out.chunks, cu_seqlens, num_chunks, state_v_first).to(dtype) if output_h else None
    return out.o.to(dtype) if o is None else o.copy_(out.o), h
