"""What a run of tokens does to a state: an affine map, whichever they are.

Both operators are linear in the state, column by column of V. So the state after some tokens is ``M S + N``, of the
state ``S`` before them: ``N`` is where they lead from zero, ``M`` where they lead with values of zero from the identity. Of
the gradient the reverse holds, with the transpose: ``dS = M^T dS' + D``, ``D`` being what comes of ``do`` alone.
docs/sequence_parallel.md has the derivation. States are ``[HV, K, V]`` here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TOKENS = ("q", "k", "v", "g", "beta")


@dataclass(frozen=True)
class Call:
    """A call of a public operator but for its states, which are ``[N, HV, K, V]``."""

    function: Callable
    arguments: dict[str, object]

    def part(self, start: int, end: int) -> Call:
        """The same of some of the tokens."""
        cut = {name: self.arguments[name][:, start:end] for name in TOKENS if self.arguments[name] is not None}
        return self.having(cut)

    def having(self, others: dict[str, object]) -> Call:
        return Call(self.function, {**self.arguments, **others})

    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.arguments.items() if isinstance(x, Tensor)}

    def __call__(self, **given: object) -> tuple:
        return self.function(**self.arguments, **given)


@torch.no_grad()
def affine_pair(call: Call, h0: Tensor | None, with_transfer: bool) -> tuple[Tensor, Tensor | None]:
    """``N`` ``[HV, K, V]`` of the one sequence of ``call``, from ``h0`` instead of zero if given; ``M`` ``[HV, K, K]`` or None."""
    _, N = call(initial_state=h0, output_final_state=True)
    if not with_transfer:
        return N[0], None
    v, K = call.arguments["v"], call.arguments["k"].shape[3]
    # The columns of M are those of a state with K columns.
    zeros = v.new_zeros(*v.shape[:3], K)
    identity = torch.eye(K, dtype=N.dtype, device=N.device).expand(1, v.shape[2], K, K)
    _, M = call.having({"v": zeros})(initial_state=identity, output_final_state=True)
    return N[0], M[0]


def affine_pair_bwd(call: Call, do: Tensor, dht: Tensor) -> Tensor:
    """``D`` ``[HV, K, V]``, the gradient with respect to the state before the tokens; ``M`` is that of the forward.

    ``do`` ``[1, T, HV, V]`` and ``dht`` ``[HV, K, V]`` are gradients with respect to what ``call`` returns.
    """
    call = call.having({name: x.detach() for name, x in call.tensors().items()})
    with torch.enable_grad():
        h0 = torch.zeros_like(dht[None]).requires_grad_()
        outputs = call(initial_state=h0, output_final_state=True)
    return torch.autograd.grad(outputs, h0, (do, dht[None]))[0][0]
