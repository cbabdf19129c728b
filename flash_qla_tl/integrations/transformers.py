"""The operators in models of Hugging Face transformers, for users without flash-linear-attention.

With it installed, :func:`flash_qla_tl.enable_fla` is enough: transformers then calls FLA, and FLA us.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from flash_qla_tl.gated_delta_rule import chunk_gated_delta_rule
from flash_qla_tl.kda import chunk_kda


def patch(model_or_module: nn.Module | ModuleType) -> None:
    """Let a model of transformers call our operators instead of its own torch functions.

    Covered are models with the gated delta rule (Qwen3-Next, Qwen3.5, OLMo Hybrid, ...) and with Kimi
    Delta Attention (Kimi Linear, ...): training, prefill, and generation with a cache. As everywhere, the
    kernels run where they apply, and torch elsewhere. All models whose classes are in the same Python
    module follow; a second call changes nothing.

    Both keep packed sequences (``cu_seq_lens_q``) apart. The convolution before them does so only with the
    package causal-conv1d and ``seq_idx``, as without us.

    Args:
        model_or_module: a model, or the Python module of its classes, as
            ``transformers.models.qwen3_next.modeling_qwen3_next``. Before transformers 5.16 layers
            hold the functions they call: of a module, layers made later follow.

    Raises:
        TypeError: it is neither.
        ValueError: it has none of the functions that are replaced.
    """
    for owner, name, ours in _places(model_or_module):
        if getattr(owner, name) is not ours:
            _originals.setdefault(owner, {})[name] = getattr(owner, name)
            setattr(owner, name, ours)


def unpatch(model_or_module: nn.Module | ModuleType) -> None:
    """Undo :func:`patch`; argument and errors are the same."""
    for owner, name, ours in _places(model_or_module):
        if getattr(owner, name) is ours:
            setattr(owner, name, _originals[owner].pop(name))


def _gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, Tensor | None]:
    """As transformers calls it; ``others`` are meant for other parts of a model."""
    return chunk_gated_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


def _kimi_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seq_lens_q: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, Tensor | None]:
    """As transformers calls it, which hands on what the model was told of packed sequences as it came."""
    return chunk_kda(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seq_lens_q,
    )


# One token is a short sequence: the recurrent functions are the same operator.
_IN_MODULES = {
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "torch_recurrent_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _kimi_delta_attention,
    "recurrent_kimi_delta_attention": _kimi_delta_attention,
}
# Before transformers 5.16.
_IN_LAYERS = {"chunk_gated_delta_rule": _gated_delta_rule, "recurrent_gated_delta_rule": _gated_delta_rule}

_originals: WeakKeyDictionary[object, dict[str, Callable]] = WeakKeyDictionary()


def _places(model_or_module: nn.Module | ModuleType) -> list[tuple[object, str, Callable]]:
    """Owner, name and replacement of every function that is replaced."""
    if isinstance(model_or_module, ModuleType):
        modules, layers = [model_or_module], []
    elif isinstance(model_or_module, nn.Module):
        layers = list(model_or_module.modules())
        names = dict.fromkeys(type(layer).__module__ for layer in layers)
        modules = [sys.modules[name] for name in names if name in sys.modules]
    else:
        raise TypeError(
            f"model_or_module must be a torch.nn.Module or a Python module, got {type(model_or_module).__name__}"
        )
    owners = [*((x, _IN_MODULES) for x in modules), *((x, _IN_LAYERS) for x in layers)]
    places = [(x, name, ours) for x, names in owners for name, ours in names.items() if hasattr(x, name)]
    if not places:
        name = getattr(model_or_module, "__name__", type(model_or_module).__name__)
        raise ValueError(
            "model_or_module must have the gated delta rule or Kimi Delta Attention as transformers writes them, "
            f"got {name}"
        )
    return places
