"""The operators as ``torch.library`` ops, which torch.compile takes as one node each.

Calls come here while they are traced only: an eager call costs less by its own autograd. An op calls the eager function it
stands for, with inputs that require a gradient where those of the traced call do, so that checks of contents, the choice
of a backend, warnings and results are an eager call's. The backward is an op of its own: with kernels that have a gradient
it is given what they keep of the forward (:class:`Training`), and elsewhere it runs the eager function once more.

An op stands for one of two, which do the same: that of calls in torch, which wait for the device, is marked for
torch.compile to leave it out of its CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LIBRARY = torch.library.Library("flash_qla_tl", "DEF")
AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
SEQUENCES = ("cu_seqlens", "cu_seqlens_cpu")
OPTIONS = {
    "scale": "float",
    "output_final_state": "bool",
    "return_intermediate_states": "bool",
    "use_qk_l2norm_in_kernel": "bool",
    "use_gate_in_kernel": "bool",
    "use_beta_sigmoid_in_kernel": "bool",
    "allow_neg_eigval": "bool",
    "state_v_first": "bool",
    "backend": "str",
}
RESULTS = "(Tensor o, Tensor ht, Tensor h, Tensor g_cumsum, Tensor A)"
# torch 2.8 does not know it.
NOT_IN_CUDA_GRAPHS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


class Training(NamedTuple):
    """Kernels with a gradient. What they keep, ``g_cumsum`` (None without a gate) and ``A``, is as eager autograd keeps it."""

    forward: Callable[..., tuple]  # (**given) -> o, ht, g_cumsum, A
    backward: Callable[..., tuple]  # (do, dht, g_cumsum, A, **given) -> a gradient for each of TENSORS, or None


def own(x: Tensor) -> Tensor:
    """x as an op returns it: dense, without autograd, and no part of memory that another result may lie in."""
    x = x.detach().contiguous()
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def define(
    name: str,
    function: Callable,
    refusal: Callable[..., str | None],
    training: Training | None = None,
    **more_options: str,
) -> Callable:
    """Registers the ops of a public function -> a call of them, by keyword, with the function's own results.

    ``refusal``: of ``q, k, v`` and all inputs that may need a gradient, why the kernels do not take them, or None.
    ``more_options``: keywords that this function takes besides ``OPTIONS``, and their types in a schema.
    """
    options = {**OPTIONS, **more_options}
    names = (*TENSORS, *SEQUENCES, *options)
    optional = ("g", *TENSORS[5:], *SEQUENCES)
    arguments = ", ".join(f"Tensor{'?' if x in optional else ''} {x}" for x in (*TENSORS, *SEQUENCES))
    arguments += "".join(f", {kind} {x}" for x, kind in options.items())
    in_kernels = _define(f"{name}_in_kernels", function, names, arguments, training)
    in_torch = _define(f"{name}_in_torch", function, names, arguments, None, NOT_IN_CUDA_GRAPHS)

    def choose(*args: object) -> tuple[Tensor, ...]:
        # Here and not where Dynamo looks, which cannot ask for a device's properties.
        inputs, backend = args[: len(TENSORS)], args[names.index("backend")]
        op = in_torch if backend == "torch" or refusal(*inputs[:3], inputs) is not None else in_kernels
        return op(*args)

    LIBRARY.define(f"{name}({arguments}, bool needs_grad) -> {RESULTS}")
    LIBRARY.impl(name, choose, "CompositeImplicitAutograd")
    op = getattr(torch.ops.flash_qla_tl, name)

    def call(**given: object) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
        needs_grad = torch.is_grad_enabled() and any(given[x] is not None and given[x].requires_grad for x in TENSORS)
        o, ht, h, _, _ = op(*(given[x] for x in names), needs_grad)
        result = o, ht if given["output_final_state"] else None
        return (*result, h) if given["return_intermediate_states"] else result

    return call


def _define(
    name: str,
    function: Callable,
    names: tuple[str, ...],
    arguments: str,
    training: Training | None,
    tags: tuple[torch.Tag, ...] = (),
) -> Callable:
    """One op and its backward."""
    num_tensors = len(TENSORS) + len(SEQUENCES)
    LIBRARY.define(f"{name}({arguments}, bool needs_grad) -> {RESULTS}", tags=tags)
    LIBRARY.define(
        f"{name}_backward(Tensor? do, Tensor? dht, Tensor g_cumsum, Tensor A, {arguments}) -> Tensor[]", tags=tags
    )
    op, op_backward = (getattr(torch.ops.flash_qla_tl, x) for x in (name, f"{name}_backward"))

    def named(args: tuple) -> dict:
        return dict(zip(names, args, strict=True))

    def leaves(given: dict) -> dict[str, Tensor]:
        return {x: given[x].detach().requires_grad_() for x in TENSORS if given[x] is not None}

    def forward(*args: object) -> tuple[Tensor, ...]:
        given, needs_grad = named(args[:-1]), args[-1]
        h = g_cumsum = A = None
        if needs_grad and training:
            o, ht, g_cumsum, A = training.forward(**given)
        else:
            with torch.set_grad_enabled(needs_grad):
                o, ht, *rest = function(**{**given, **(leaves(given) if needs_grad else {})})
            h = rest[0] if rest else None
        return tuple(given["q"].new_empty(0) if x is None else own(x) for x in (o, ht, h, g_cumsum, A))

    def fake(*args: object) -> tuple[Tensor, ...]:
        given, needs_grad = named(args[:-1]), args[-1]
        q, v, cu_seqlens = given["q"], given["v"], given["cu_seqlens"]
        B, T, HV, V = v.shape
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = (HV, V, q.shape[3]) if given["state_v_first"] else (HV, q.shape[3], V)
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        ht, h, g_cumsum, A = (q.new_empty(0) for _ in range(4))
        if given["output_final_state"]:
            ht = q.new_empty(N, *state, dtype=dtype)
        if given["return_intermediate_states"]:
            NT = (T + 63) // 64 if cu_seqlens is None else T // 64 + N
            if given["cu_seqlens_cpu"] is not None:
                NT = torch.library.get_ctx().new_dynamic_size()
            h = q.new_empty(B, NT, *state)
        if needs_grad and training:
            A = q.new_empty(B, T, HV, 64)
            if given["g"] is not None:
                g_cumsum = q.new_empty(B, T, HV, dtype=torch.float32)
        return q.new_empty(v.shape), ht, h, g_cumsum, A

    def backward(do: Tensor | None, dht: Tensor | None, g_cumsum: Tensor, A: Tensor, *args: object) -> list[Tensor]:
        given = named(args)
        if A.ndim == 4:
            grads = training.backward(do, dht, g_cumsum if g_cumsum.ndim == 3 else None, A, **given)
            grads = dict(zip(TENSORS, grads, strict=True))
        else:
            # The dispatcher may leave autograd out of what an op does.
            with torch._C._SetExcludeDispatchKeyGuard(AUTOGRAD, False), torch.enable_grad():
                inputs = leaves(given)
                outputs = function(**{**given, **inputs, "return_intermediate_states": False})
                pairs = [(x, dx) for x, dx in zip(outputs, (do, dht), strict=True) if x is not None and dx is not None]
                outputs, weights = zip(*((x, dx) for x, dx in pairs if x.requires_grad), strict=True)
                found = torch.autograd.grad(outputs, list(inputs.values()), weights, materialize_grads=True)
            grads = dict(zip(inputs, found, strict=True))
        likes = templates(given, g_cumsum)
        return [
            like.new_zeros(like.shape) if grads.get(x) is None else own(grads[x].to(like.dtype))
            for x, like in likes.items()
        ]

    def fake_backward(do: object, dht: object, g_cumsum: Tensor, A: Tensor, *args: object) -> list[Tensor]:
        return [like.new_empty(like.shape) for like in templates(named(args), g_cumsum).values()]

    def templates(given: dict, g_cumsum: Tensor) -> dict[str, Tensor]:
        """Of each gradient a tensor of its shape and dtype; a g that is not kept has that of its sums."""
        nothing = given["q"].new_empty(0)
        likes = {x: nothing if given[x] is None else given[x] for x in TENSORS}
        return {**likes, "g": g_cumsum if given["g"] is None else given["g"]}

    def setup_context(ctx: object, inputs: tuple, output: tuple) -> None:
        _, _, h, g_cumsum, A = output
        saved = dict(zip(names, inputs[:num_tensors], strict=False))
        ctx.dtypes = [None if saved[x] is None else saved[x].dtype for x in TENSORS]
        if A.ndim == 4 and saved["A_log"] is None:
            # A gate that is not activated has no part in the backward but by its sums.
            saved["g"] = None
        ctx.save_for_backward(g_cumsum, A, *saved.values())
        ctx.options = inputs[num_tensors:-1]
        ctx.mark_non_differentiable(h, g_cumsum, A)
        ctx.set_materialize_grads(False)

    def autograd(ctx: object, do: Tensor | None, dht: Tensor | None, *_: None) -> tuple:
        grads = op_backward(do, dht, *ctx.saved_tensors, *ctx.options)
        grads = [None if dtype is None else x.to(dtype) for x, dtype in zip(grads, ctx.dtypes, strict=True)]
        return *grads, None, None, *(None for _ in ctx.options), None

    LIBRARY.impl(name, forward, "CompositeExplicitAutograd")
    LIBRARY.impl(f"{name}_backward", backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash_qla_tl::{name}", fake)
    torch.library.register_fake(f"flash_qla_tl::{name}_backward", fake_backward)
    torch.library.register_autograd(f"flash_qla_tl::{name}", autograd, setup_context=setup_context)

    return op
