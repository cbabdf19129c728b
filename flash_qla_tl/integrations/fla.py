"""The kernels as a backend of flash-linear-attention (FLA), from its version 0.5.2 on.

FLA asks its backends, by priority, whether they take a call, and computes it by itself where none does.
Ours takes what the kernels take. Everything else it refuses, with a reason that FLA logs: a call that
the kernels cannot serve stays FLA's to compute, and a wrong one FLA's to raise its error on. No call
goes to our torch path.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from flash_qla_tl import checks, kda
from flash_qla_tl.gated_delta_rule import chunk_gated_delta_rule
from flash_qla_tl.kda import chunk_kda
from flash_qla_tl.kernels.common import target

_enabled = False


def enable_fla(priority: int = 1) -> None:
    """Let flash-linear-attention run ``chunk_gated_delta_rule`` and ``chunk_kda`` in our kernels.

    Whoever calls these two functions of FLA, its layers and transformers among them, and whether they
    were imported before or after, gets the kernels where they apply and FLA's own path elsewhere. With
    logging at INFO, FLA says which. ``FLA_FLASH_QLA_TL=0`` in the environment turns it off at any time.

    Args:
        priority: backends of lower numbers are asked first; FLA's are FlashQLA and FlashKDA at 3.
            A second call sets it anew.

    Raises:
        ImportError: FLA is missing, or has no place for these backends.
    """
    global _enabled
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fla_gated_delta_rule
        from fla.ops.kda import chunk_kda as fla_kda

        try:
            from fla.backends import BaseBackend, register
        except ImportError:  # before 0.6
            from fla.ops.backends import BaseBackend
            from fla.ops.gated_delta_rule.backends import gdr_registry
            from fla.ops.kda.backends import kda_registry

            register = None
    except ImportError as error:
        raise ImportError(
            f"enable_fla needs flash-linear-attention 0.5.2 or later: pip install flash-linear-attention ({error})"
        ) from error

    class Backend(_Backend, BaseBackend):
        gated_delta_rule = _names(fla_gated_delta_rule)
        kda = _names(fla_kda)

    Backend.priority = priority
    if register is None:
        gdr_registry.register(Backend())
        kda_registry.register(Backend())
    else:
        register("gated_delta_rule")(Backend)
        register(fla_kda)(Backend)
    _enabled = True


def disable_fla() -> None:
    """Undo :func:`enable_fla`; nothing happens where it was not called."""
    global _enabled
    _enabled = False


class _Backend:
    """What FLA asks and calls, for mixing into its BaseBackend.

    Arguments come as the caller passed them. ``gated_delta_rule`` and ``kda`` are their names in FLA's
    order, which differs from ours, and between its versions. FLA takes an exception in a verifier for a
    refusal, its message for the reason.
    """

    backend_type = "flash_qla_tl"
    env_var = "FLA_FLASH_QLA_TL"

    @classmethod
    def is_available(cls) -> bool:
        return _enabled

    def chunk_gated_delta_rule_verifier(self, *args, **kwargs) -> tuple[bool, str | None]:
        return _verdict(_refusal(_named(self.gated_delta_rule, args, kwargs)))

    def chunk_gated_delta_rule(self, *args, **kwargs):
        return chunk_gated_delta_rule(**_named(self.gated_delta_rule, args, kwargs), backend="tilelang")

    def chunk_kda_verifier(self, *args, **kwargs) -> tuple[bool, str | None]:
        return _verdict(_kda_refusal(_named(self.kda, args, kwargs)))

    def chunk_kda(self, *args, **kwargs):
        given = _named(self.kda, args, kwargs)
        for name in _GRAPH:
            given.pop(name, None)
        return chunk_kda(**given, backend="tilelang")


# What FLA knows neither of, or raises an error on.
_OURS = {"auto_cp", "backend", "head_first", "initial_state_indices", "pad_slot_id", "inplace_final_state", "out"}
# They ask for what the kernels always do: launches that do not depend on the contents of cu_seqlens.
_GRAPH = {"max_num_seqs", "use_graph"}
_TAKEN = inspect.signature(chunk_gated_delta_rule).parameters.keys() - _OURS - {"return_intermediate_states"}
_KDA_TAKEN = (inspect.signature(chunk_kda).parameters.keys() | _GRAPH) - _OURS
_CHECKED = inspect.signature(checks.gated_delta_rule).parameters.keys()
_KDA_CHECKED = inspect.signature(checks.kda).parameters.keys()


def _names(function: Callable) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD)


def _named(names: tuple[str, ...], args: tuple, kwargs: dict) -> dict:
    given = dict(zip(names, args, strict=False))
    if len(args) > len(names) or given.keys() & kwargs.keys():
        raise TypeError("the arguments do not fit the function")
    return given | kwargs


def _verdict(refusal: str | None) -> tuple[bool, str | None]:
    return refusal is None, refusal


def _refusal(given: dict) -> str | None:
    """Why the gated delta rule of these arguments is FLA's to compute, or to raise an error on."""
    refusal = _common_refusal(given, _TAKEN)
    if refusal is None:
        _check(checks.gated_delta_rule, _CHECKED, given)
    return refusal


def _kda_refusal(given: dict) -> str | None:
    refusal = _common_refusal(given, _KDA_TAKEN) or kda.refusal(given["q"], given["k"], given["v"])
    if refusal is not None:
        return refusal
    inputs = [x for x in given.values() if torch.is_tensor(x)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return "the kernels give no gradient of Kimi Delta Attention"
    h0, cu_seqlens = given.get("initial_state"), given.get("cu_seqlens")
    # FLA raises on these.
    if h0 is not None and h0.dtype != torch.float32:
        return f"initial_state must have dtype torch.float32, got {h0.dtype}"
    if given.get("max_num_seqs") is not None and (cu_seqlens is None or len(cu_seqlens) - 1 != given["max_num_seqs"]):
        return "cu_seqlens must have max_num_seqs + 1 entries"
    if given.get("return_intermediate_states"):
        if not torch.is_inference_mode_enabled() or given.get("disable_recompute"):
            return "return_intermediate_states must come in inference mode and without disable_recompute"
        # FLA returns as many states as there are chunks.
        if cu_seqlens is not None and given.get("cu_seqlens_cpu") is None:
            return "cu_seqlens_cpu must be a tensor with cu_seqlens and return_intermediate_states, got None"
    _check(checks.kda, _KDA_CHECKED, given)
    return None


def _common_refusal(given: dict, taken: set[str]) -> str | None:
    refusal = target.refusal(given["q"], given["k"], given["v"])
    if refusal is not None:
        return refusal
    if unknown := given.keys() - taken:
        return f"the kernels have no argument {', '.join(sorted(unknown))}"
    if given.get("cp_context") is not None:
        # All ranks must have the same do it, and each is asked for itself.
        return "cp_context must be None: flash_qla_tl's own functions take it"
    if given["g"] is None:
        return "g must be a tensor, got None"
    return None


def _check(check: Callable, names: set, given: dict) -> None:
    given = dict(given)
    transposed = given.pop("transpose_state_layout", None)
    if transposed is not None:
        if given.get("state_v_first"):
            raise ValueError("transpose_state_layout must be None with state_v_first, got both")
        given["state_v_first"] = transposed
    check(**{name: given[name] for name in given.keys() & names})
