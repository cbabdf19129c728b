"""vLLM's prefill in the kernels: a plug-in of its entry point group ``vllm.general_plugins``.

Written for vLLM 0.33. The gated delta rule is an op that vLLM lets others replace, Kimi Delta Attention a function that its
layers import whenever they run. Both are called with states that vLLM has gathered, and it scatters what they return.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from flash_qla_tl import kda
from flash_qla_tl.gated_delta_rule import chunk_gated_delta_rule
from flash_qla_tl.integrations.serving import say_once, wanted
from flash_qla_tl.kernels.common import target

OP = "ChunkGatedDeltaRule"


def register() -> None:
    """What vLLM calls in each of its processes; with ``FLASH_QLA_TL_SERVING=1`` it changes the two functions, else nothing.

    Calls that the kernels do not take stay vLLM's, and the log says why, once for each reason. A vLLM that has not
    what is replaced keeps its own kernels, and the log says so.
    """
    if not wanted() or find_spec("vllm") is None:
        return
    try:
        from vllm.model_executor.custom_op import op_registry_oot
        from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import ChunkGatedDeltaRule
    except ImportError as error:
        say_once(f"vLLM keeps its gated delta rule: {error}")
    else:
        # The plug-in of somebody else comes first.
        if OP not in op_registry_oot:
            ChunkGatedDeltaRule.register_oot(name=OP)(gated_delta_rule_op(ChunkGatedDeltaRule))
    try:
        from vllm.models.kimi_k3.nvidia.ops.third_party import kda as module
    except ImportError as error:
        say_once(f"vLLM keeps its Kimi Delta Attention: {error}")
    else:
        replace_kda(module)


def gated_delta_rule_op(op: type) -> type:
    """A class like vLLM's op of the gated delta rule, with its prefill in the kernels."""

    class KernelChunkGatedDeltaRule(op):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._forward_of_vllm = self._forward_method
            self._forward_method = self.forward_kernels

        def forward_kernels(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            g: Tensor,
            beta: Tensor,
            initial_state: Tensor,
            output_final_state: bool,
            cu_seqlens: Tensor | None = None,
            chunk_indices: Tensor | None = None,
            chunk_offsets: Tensor | None = None,
            use_qk_l2norm_in_kernel: bool = True,
            core_attn_out: Tensor | None = None,
            **others: object,
        ) -> tuple[Tensor, Tensor | None]:
            given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
            given |= {"output_final_state": output_final_state, "cu_seqlens": cu_seqlens}
            given |= {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
            reason = target.refusal(q, k, v)
            if reason is not None:
                say_once(f"vLLM runs the gated delta rule in its own kernels: {reason}")
                given |= {"chunk_indices": chunk_indices, "chunk_offsets": chunk_offsets}
                return self._forward_of_vllm(**given, core_attn_out=core_attn_out, **others)
            # It may have room for more tokens.
            out = None if core_attn_out is None else core_attn_out.view(-1)[: v.numel()].view(v.shape)
            with torch.no_grad():
                return chunk_gated_delta_rule(**given, state_v_first=True, out=out, backend="tilelang")

    return KernelChunkGatedDeltaRule


def replace_kda(module: ModuleType) -> None:
    """Put ours for the ``chunk_kda_with_fused_gate`` of vLLM's module; a second call changes nothing."""
    original = module.chunk_kda_with_fused_gate
    if not hasattr(original, "function_of_vllm"):
        module.chunk_kda_with_fused_gate = _with_fused_gate(original)


def _with_fused_gate(original: Callable) -> Callable:
    def chunk_kda_with_fused_gate(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        raw_g: Tensor,
        raw_beta: Tensor,
        A_log: Tensor,
        g_bias: Tensor | None,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        lower_bound: float | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        out: Tensor | None = None,
        **others: object,
    ) -> tuple[Tensor, Tensor | None]:
        given = {"scale": scale, "initial_state": initial_state, "output_final_state": output_final_state}
        given |= {"lower_bound": lower_bound, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        given |= {"cu_seqlens": cu_seqlens, "out": out}
        reason = kda.refusal(q, k, v)
        if reason is not None:
            say_once(f"vLLM runs Kimi Delta Attention in its own kernels: {reason}")
            return original(q, k, v, raw_g, raw_beta, A_log, g_bias, **given, **others)
        with torch.no_grad():
            return kda.chunk_kda(
                q,
                k,
                v,
                raw_g,
                raw_beta,
                **given,
                use_gate_in_kernel=True,
                A_log=A_log.reshape(-1),
                dt_bias=None if g_bias is None else g_bias.reshape(-1),
                use_beta_sigmoid_in_kernel=True,
                state_v_first=True,
                backend="tilelang",
            )

    chunk_kda_with_fused_gate.function_of_vllm = original
    return chunk_kda_with_fused_gate
