"""SGLang's prefill in the kernels: a plug-in of its entry point group ``sglang.srt.plugins``.

Written for SGLang 0.5.23. Its backends of linear attention hold a kernel object for each phase. Ours take the place of the
one for prefill, and read and write SGLang's pool of states where it is; decoding and verification stay as they are.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from flash_qla_tl import kda
from flash_qla_tl.gated_delta_rule import chunk_gated_delta_rule
from flash_qla_tl.integrations.serving import say_once, wanted
from flash_qla_tl.kernels.common import target
from flash_qla_tl.kernels.common.tensors import FLOAT_TYPE, holds_states
from flash_qla_tl.utils.index import prepare_chunk_offsets

LINEAR = "sglang.srt.layers.attention.linear"


def register() -> None:
    """What SGLang calls in each of its processes; with ``FLASH_QLA_TL_SERVING=1`` it registers two hooks, else nothing.

    Calls that the kernels do not take go to SGLang's Triton kernels, and the log says why, once for each reason.
    """
    if not wanted() or find_spec("sglang") is None:
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        say_once(f"SGLang keeps its own kernels: {error}")
        return
    HookRegistry.register(f"{LINEAR}.gdn_backend.GDNKernelDispatcher.__init__", use_for_gdn, HookType.AFTER)
    HookRegistry.register(f"{LINEAR}.kda_backend.KDAKernelDispatcher.__init__", use_for_kda, HookType.AFTER)


def use_for_gdn(result: None, dispatcher: object, *args: object, **kwargs: object) -> None:
    """After SGLang has chosen its kernels for the gated delta rule: the hook."""
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

    dispatcher.extend_kernel = gdn_kernel(TritonGDNKernel)()


def use_for_kda(result: None, dispatcher: object, *args: object, **kwargs: object) -> None:
    """The same for Kimi Delta Attention."""
    from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel

    dispatcher.extend_kernel = kda_kernel(TritonKDAKernel)()


def gdn_kernel(triton: type) -> type:
    """A class like SGLang's Triton kernels of the gated delta rule, with its prefill in ours."""

    class KernelGDN(triton):
        # States at chunk starts are then made for batches alone whose prefixes are kept.
        supports_track_state_snapshot = True

        @torch.no_grad()
        def extend(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            g: Tensor,
            beta: Tensor,
            *,
            ssm_states: Tensor,
            cache_indices: Tensor,
            query_start_loc: Tensor,
            inplace_update: bool = True,
            output: Tensor | None = None,
            track_state: Tensor | None = None,
            track_chunk_idx: Tensor | None = None,
            **others: object,
        ) -> tuple[Tensor, None, Tensor | None]:
            reason = _refusal(target.refusal(q, k, v), ssm_states)
            h = None
            if reason is not None:
                say_once(f"SGLang runs the gated delta rule in its own kernels: {reason}")
                pool = {"ssm_states": ssm_states, "cache_indices": cache_indices, "query_start_loc": query_start_loc}
                o, _, h = super().extend(q, k, v, g, beta, **pool, inplace_update=inplace_update, **others)
            else:
                o, _, *states = chunk_gated_delta_rule(
                    q,
                    k,
                    v,
                    g,
                    beta,
                    initial_state=ssm_states,
                    initial_state_indices=cache_indices,
                    inplace_final_state=inplace_update,
                    cu_seqlens=query_start_loc,
                    use_qk_l2norm_in_kernel=True,
                    state_v_first=True,
                    return_intermediate_states=track_state is not None,
                    out=output if output is not None and output.shape == v.shape else None,
                    backend="tilelang",
                )
                h = states[0] if states else None
            if track_state is not None:
                # Of each sequence the state at the start of one chunk; of a sequence without one (-1) any will do.
                first = prepare_chunk_offsets(query_start_loc, 64)[:-1]
                rows = (first + track_chunk_idx.clamp(min=0)).clamp(max=h.shape[1] - 1)
                track_state.copy_(h[0].index_select(0, rows))
            return o, None, h

    return KernelGDN


def kda_kernel(triton: type) -> type:
    """The same of Kimi Delta Attention."""

    class KernelKDA(triton):
        @torch.no_grad()
        def extend(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            g: Tensor,
            beta: Tensor,
            *,
            ssm_states: Tensor,
            cache_indices: Tensor,
            query_start_loc: Tensor,
            A_log: Tensor | None = None,
            dt_bias: Tensor | None = None,
            lower_bound: float | None = None,
            beta_is_raw: bool = False,
            return_intermediate_states: bool = False,
            is_spec_decode: bool = False,
            track_state: Tensor | None = None,
            **others: object,
        ) -> Tensor | tuple[Tensor, Tensor]:
            reason = _refusal(kda.refusal(q, k, v), ssm_states)
            if reason is None and track_state is not None:
                reason = "the batch has a prefix to keep in fp32"
            if reason is None and is_spec_decode:
                reason = "the tokens are a draft, whose states may not be kept"
            if reason is not None:
                say_once(f"SGLang runs Kimi Delta Attention in its own kernels: {reason}")
                pool = {"ssm_states": ssm_states, "cache_indices": cache_indices, "query_start_loc": query_start_loc}
                gate = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound, "beta_is_raw": beta_is_raw}
                more = {"is_spec_decode": is_spec_decode, "track_state": track_state}
                return super().extend(
                    q,
                    k,
                    v,
                    g,
                    beta,
                    **pool,
                    **gate,
                    **more,
                    return_intermediate_states=return_intermediate_states,
                    **others,
                )
            o, _, *h = kda.chunk_kda(
                q,
                k,
                v,
                g,
                beta,
                initial_state=ssm_states,
                initial_state_indices=cache_indices,
                inplace_final_state=True,
                cu_seqlens=query_start_loc,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=A_log is not None,
                A_log=None if A_log is None else A_log.reshape(-1),
                dt_bias=None if dt_bias is None else dt_bias.reshape(-1),
                lower_bound=lower_bound,
                use_beta_sigmoid_in_kernel=beta_is_raw,
                return_intermediate_states=return_intermediate_states,
                state_v_first=True,
                backend="tilelang",
            )
            return (o, *h) if return_intermediate_states else o

    return KernelKDA


def _refusal(refusal: str | None, ssm_states: Tensor) -> str | None:
    if refusal is None and ssm_states.dtype not in FLOAT_TYPE:
        return f"the kernels need states of fp32, bf16 or fp16, got {ssm_states.dtype}"
    if refusal is None and not holds_states(ssm_states):
        return f"the kernels need each state dense, got strides {ssm_states.stride()}"
    return refusal
