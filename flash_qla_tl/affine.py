"""What a run of tokens does to a state: an affine map, whichever they are.

Both operators are linear in the state, column by column of V. So the state after some tokens is ``M S + N``, of the
state ``S`` before them: ``N`` is where they lead from zero, ``M`` where they lead with values of zero from the identity. Of
the gradient the reverse holds, with the transpose: ``dS = M^T dS' + D``, ``D`` being what comes of ``do`` alone.
docs/sequence_parallel.md has the derivation. States are ``[HV, K, V]`` here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

TOKENS = ("q", "k", "v", "g", "beta")


class OnKernels(NamedTuple):
    """What makes the parts of an affine map without a whole call, in an operator's kernels."""

    chunk: int
    # Of the arguments of a call, with tokens of whole chunks: N and M.
    state_map: Callable
    # Of do, dht and the arguments: D.
    gradient: Callable


@dataclass(frozen=True)
class Call:
    """A call of a public operator but for its states, which are ``[N, HV, K, V]``."""

    function: Callable
    arguments: dict[str, object]
    kernels: OnKernels | None = None

    def part(self, start: int, end: int) -> Call:
        """The same of some of the tokens."""
        cut = {name: self.arguments[name][:, start:end] for name in TOKENS if self.arguments[name] is not None}
        return self.having(cut)

    def having(self, others: dict[str, object]) -> Call:
        return Call(self.function, {**self.arguments, **others}, self.kernels)

    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.arguments.items() if isinstance(x, Tensor)}

    def __call__(self, **given: object) -> tuple:
        return self.function(**self.arguments, **given)


@torch.no_grad()
def affine_pair(call: Call, h0: Tensor | None, with_transfer: bool) -> tuple[Tensor, Tensor | None]:
    """``N`` ``[HV, K, V]`` of the one sequence of ``call``, from ``h0`` instead of zero if given; ``M`` ``[HV, K, K]`` or None."""
    v, K, T = call.arguments["v"], call.arguments["k"].shape[3], call.arguments["k"].shape[1]
    N, M = h0, None
    whole = T // call.kernels.chunk * call.kernels.chunk if call.kernels else 0
    if whole:
        # Autocast would run products in 16 bits.
        with torch.autocast(v.device.type, enabled=False):
            N, M = call.kernels.state_map(**call.part(0, whole).arguments)
            if h0 is not None:
                N = torch.baddbmm(N, M, h0[0].to(N.dtype))
        N, M = N[None], M[None]
        call = call.part(whole, T)
    if whole < T:
        _, N = call(initial_state=N, output_final_state=True)
        if with_transfer:
            # The columns of M are those of a state with K columns.
            zeros = call.arguments["v"].new_zeros(1, T - whole, v.shape[2], K)
            identity = torch.eye(K, dtype=N.dtype, device=N.device).expand(1, v.shape[2], K, K)
            _, M = call.having({"v": zeros})(initial_state=identity if M is None else M, output_final_state=True)
    return N[0], M[0] if with_transfer else None


def affine_pair_bwd(call: Call, do: Tensor, dht: Tensor) -> Tensor:
    """``D`` ``[HV, K, V]``, the gradient with respect to the state before the tokens; ``M`` is that of the forward.

    ``do`` ``[1, T, HV, V]`` and ``dht`` ``[HV, K, V]`` are gradients with respect to what ``call`` returns.
    """
    if call.kernels is not None:
        return call.kernels.gradient(do, dht, **call.arguments)
    call = call.having({name: x.detach() for name, x in call.tensors().items()})
    with torch.enable_grad():
        h0 = torch.zeros_like(dht[None]).requires_grad_()
        outputs = call(initial_state=h0, output_final_state=True)
    return torch.autograd.grad(outputs, h0, (do, dht[None]))[0][0]
