"""The operators as ``torch.library`` ops, which torch.compile takes as one node each.

Calls come here while they are traced only: an eager call costs less by its own autograd. An op calls the eager function it
stands for, so that checks of contents, the choice of a backend and warnings happen when the compiled code runs; with a
gradient where the traced code needs one, for the eager function then may run other code. The backward is an op of its own, which runs
the eager function once more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LIBRARY = torch.library.Library("flash_qla_tl", "DEF")
TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
OPTIONS = {
    "scale": "float",
    "output_final_state": "bool",
    "use_qk_l2norm_in_kernel": "bool",
    "use_gate_in_kernel": "bool",
    "use_beta_sigmoid_in_kernel": "bool",
    "allow_neg_eigval": "bool",
    "state_v_first": "bool",
    "backend": "str",
}


def define(name: str, function: Callable, **more_options: str) -> Callable:
    """Registers the op of a public function -> a call of it, by keyword, with the function's own results.

    ``more_options``: keywords that this function takes besides ``OPTIONS``, and their types in a schema.
    """
    options = {**OPTIONS, **more_options}
    tensors = ", ".join(f"Tensor? {x}" if x in ("g", *TENSORS[5:]) else f"Tensor {x}" for x in TENSORS)
    options["needs_grad"] = "bool"
    arguments = f"{tensors}, Tensor? cu_seqlens, " + ", ".join(f"{kind} {x}" for x, kind in options.items())
    names = (*TENSORS, "cu_seqlens", *options)
    LIBRARY.define(f"{name}({arguments}) -> (Tensor, Tensor)")
    LIBRARY.define(f"{name}_backward(Tensor do, Tensor dht, {arguments}) -> Tensor[]")
    op, op_backward = (getattr(torch.ops.flash_qla_tl, x) for x in (name, f"{name}_backward"))

    def run(given: dict, needs_grad: bool) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor | None]]:
        """-> the tensors that were given, leaves of a graph if one is needed, and the function's results."""
        with torch.set_grad_enabled(needs_grad):
            leaves = {x: given[x].detach().requires_grad_(needs_grad) for x in TENSORS if given[x] is not None}
            return leaves, function(**{**given, **leaves})

    def forward(*args: object) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, args, strict=True))
        _, (o, ht) = run(given, given.pop("needs_grad"))
        # Of its own: an op may not return an input, which the state before no token at all is.
        return o.detach().contiguous(), given["q"].new_empty(0) if ht is None else ht.detach().clone()

    def fake(*args: object) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, args, strict=True))
        q, v, cu_seqlens = given["q"], given["v"], given["cu_seqlens"]
        if not given["output_final_state"]:
            return q.new_empty(v.shape), q.new_empty(0)
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = (v.shape[3], q.shape[3]) if given["state_v_first"] else (q.shape[3], v.shape[3])
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return q.new_empty(v.shape), q.new_empty(N, v.shape[2], *state, dtype=dtype)

    def backward(do: Tensor, dht: Tensor, *args: object) -> list[Tensor]:
        given = dict(zip(names, args, strict=True))
        leaves, outputs = run(given, given.pop("needs_grad"))
        pairs = [(x, dx) for x, dx in zip(outputs, (do, dht), strict=True) if x is not None and x.requires_grad]
        outputs, weights = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, list(leaves.values()), weights, allow_unused=True)
        grads = dict(zip(leaves, found, strict=True))
        empty = given["q"].new_empty(0)
        zeros = {x: torch.zeros_like(given[x]) for x, grad in grads.items() if grad is None}
        return [({**grads, **zeros}[x]).contiguous() if x in grads else empty.clone() for x in TENSORS]

    def fake_backward(do: Tensor, dht: Tensor, *args: object) -> list[Tensor]:
        given = dict(zip(names, args, strict=True))
        return [given["q"].new_empty(0) if given[x] is None else given[x].new_empty(given[x].shape) for x in TENSORS]

    def setup_context(ctx: object, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs[: len(TENSORS) + 1])
        ctx.options = inputs[len(TENSORS) + 1 :]

    def autograd(ctx: object, do: Tensor, dht: Tensor) -> tuple:
        saved = ctx.saved_tensors
        grads = op_backward(do, dht, *saved, *ctx.options)
        grads = [None if x is None else grad for x, grad in zip(saved[:-1], grads, strict=True)]
        return *grads, None, *(None for _ in ctx.options)

    LIBRARY.impl(name, forward, "CompositeExplicitAutograd")
    LIBRARY.impl(f"{name}_backward", backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash_qla_tl::{name}", fake)
    torch.library.register_fake(f"flash_qla_tl::{name}_backward", fake_backward)
    torch.library.register_autograd(f"flash_qla_tl::{name}", autograd, setup_context=setup_context)

    def call(**given: object) -> tuple[Tensor, Tensor | None]:
        wanted = (given[x] for x in TENSORS)
        given["needs_grad"] = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in wanted)
        o, ht = op(*(given[x] for x in names))
        return o, ht if given["output_final_state"] else None

    return call
