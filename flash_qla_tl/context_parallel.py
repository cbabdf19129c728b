"""Sequence parallelism: packed sequences cut into slices of as many tokens, one a rank of a process group.

Only the first sequence of a slice can come from the rank before, and only the last go on to the next. What the
tokens of a slice do to the state that passes through it is affine (affine.py). So every rank makes the map of its own
tokens, one all-gather hands the maps around, a rank folds those of the ranks before it into the state that reaches it,
and then runs as one process would. The backward does the same in reverse. docs/sequence_parallel.md has the contract.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_qla_tl import checks
from flash_qla_tl.affine import Call, OnKernels, affine_pair, affine_pair_bwd
from flash_qla_tl.dispatch import k_first
from flash_qla_tl.utils.norm import compute_dtype


@dataclass(frozen=True, eq=False)
class CPContext:
    """Where the sequences lie on this rank and the others; :func:`build_cp_context` makes it.

    A piece is what lies here of one sequence. Names are those of FLA's ``FLACPContext`` where that has one.
    """

    group: dist.ProcessGroup | None
    rank: int
    cu_seqlens: Tensor  # [N+1] int32, of the N pieces, none empty
    cu_seqlens_cpu: Tensor
    pre_num_ranks: int  # ranks that the first piece's sequence lies on before this one
    post_num_ranks: int  # ranks that the last piece's sequence lies on after this one
    # Of all sequences, the most ranks that one goes on to: without any there is nothing to exchange, and where that is one
    # rank no state passes through another.
    most_num_ranks: int
    sequences: list[int] | None = None  # of each piece the number of its sequence; None where it came without

    @property
    def passes_through(self) -> bool:
        """Whether a state comes from the rank before and goes on to the next."""
        return self.pre_num_ranks > 0 and self.post_num_ranks > 0 and len(self.cu_seqlens_cpu) == 2


def build_cp_context(
    cu_seqlens_global: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    cu_seqlens_cpu: Tensor | None = None,
    layout: str = "contiguous",
    device: torch.device | str | None = None,
) -> CPContext:
    """What ``cp_context`` of the operators is, for this rank of ``group``; built once for a batch.

    Every rank builds its own, from the same ``cu_seqlens_global``. Rank r then holds the tokens from ``r T / W`` to
    ``(r+1) T / W`` of the packed sequences, W being the ranks.

    Args:
        cu_seqlens_global: ``[N+1]`` int32 or int64: cumulative lengths of all sequences from 0. Read on the host, for
            which one on a GPU is waited for.
        group: of torch.distributed; None means its default group.
        cu_seqlens_cpu: the same values on the CPU, for callers that have them.
        layout: "contiguous".
        device: of the inputs; None means that of ``cu_seqlens_global``.

    Returns:
        The context, with the rank's own ``cu_seqlens`` and the numbers of its ``sequences``. An empty sequence is on no rank.

    Raises:
        TypeError, ValueError: an argument does not fit, ``cu_seqlens_global[-1]`` is no multiple of W, or this process
            is not in ``group``.
    """
    if layout != "contiguous":
        raise ValueError(f"layout must be 'contiguous', got {layout!r}")
    checks.cu_seqlens_global(cu_seqlens_global, cu_seqlens_cpu)
    bounds = (cu_seqlens_global if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group must have this process in it")
    device = cu_seqlens_global.device if device is None else torch.device(device)
    return of_rank(bounds, rank, dist.get_world_size(group), group, device)


def of_rank(
    bounds: list[int], rank: int, world_size: int, group: dist.ProcessGroup | None, device: torch.device | str
) -> CPContext:
    """The context of one rank; ``bounds`` are the values of ``cu_seqlens_global``."""
    total = bounds[-1]
    size, rest = divmod(total, world_size)
    if size == 0 or rest:
        raise ValueError(
            f"cu_seqlens_global must end at a multiple of the {world_size} ranks of group, at least that, got {total}"
        )
    start, end = rank * size, (rank + 1) * size
    sequences = {i: (bos, eos) for i, (bos, eos) in enumerate(pairwise(bounds)) if bos < eos}
    pieces = {i: (bos, eos) for i, (bos, eos) in sequences.items() if bos < end and start < eos}
    begins, ends = zip(*pieces.values(), strict=True)
    cu_seqlens = torch.tensor([0, *(min(eos, end) - start for eos in ends)], dtype=torch.int32)
    return CPContext(
        group,
        rank,
        cu_seqlens.to(device),
        cu_seqlens,
        pre_num_ranks=rank - begins[0] // size,
        post_num_ranks=(ends[-1] - 1) // size - rank,
        most_num_ranks=max((eos - 1) // size - bos // size for bos, eos in sequences.values()),
        sequences=list(pieces),
    )


def accept(
    cp_context: object | None, q: object, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None
) -> CPContext | None:
    """The ``cp_context`` of a call, FLA's included, as one of ours.

    Raises:
        TypeError: it is no context.
        ValueError: it is one of another layout or device, or ``cu_seqlens`` are not its own.
    """
    if cp_context is None:
        return None
    fields = ("group", "cu_seqlens", "cu_seqlens_cpu", "pre_num_ranks", "post_num_ranks")
    if not all(hasattr(cp_context, name) for name in fields):
        raise TypeError(f"cp_context must be what build_cp_context returns, got {type(cp_context).__name__}")
    for name, x in (("cu_seqlens", cu_seqlens), ("cu_seqlens_cpu", cu_seqlens_cpu)):
        if x is not None and x is not getattr(cp_context, name):
            raise ValueError(f"{name} must be None with cp_context, which has that of this rank")
    context = cp_context if isinstance(cp_context, CPContext) else _of_another(cp_context)
    if isinstance(q, Tensor) and context.cu_seqlens.device != q.device:
        raise ValueError(
            f"cp_context must have its cu_seqlens on device {q.device} as q is, got {context.cu_seqlens.device}: "
            "build_cp_context has an argument device"
        )
    return context


def _of_another(cp_context: object) -> CPContext:
    """FLA's ``FLACPContext`` and what has its fields."""
    if (layout := getattr(cp_context, "layout", "contiguous")) != "contiguous":
        raise ValueError(
            f"cp_context must have the layout 'contiguous', one slice of the tokens a rank, got {layout!r}"
        )
    if getattr(cp_context, "pre_num_ranks_dev", None) is not None:
        raise ValueError("cp_context must have its counts of ranks on the host, pre_num_ranks_dev None, got a tensor")
    cu_seqlens, group = cp_context.cu_seqlens, cp_context.group
    if cu_seqlens is None or len(cu_seqlens) < 2:
        raise ValueError("cp_context must have cu_seqlens of at least one sequence")
    cu_seqlens_cpu = cu_seqlens.cpu() if cp_context.cu_seqlens_cpu is None else cp_context.cu_seqlens_cpu
    if group is None:
        # FLA's way to turn it off.
        return CPContext(None, 0, cu_seqlens, cu_seqlens_cpu, 0, 0, 0)
    # It knows nothing of the sequences that this rank has no part of.
    most = dist.get_world_size(group) - 1
    ranks = cp_context.pre_num_ranks, cp_context.post_num_ranks
    return CPContext(group, dist.get_rank(group), cu_seqlens, cu_seqlens_cpu, *ranks, most)


def run(context: CPContext, *args: object, **kwargs: object) -> tuple:
    """An operator on this rank's slice; see :func:`_run`. Under torch.compile it is left to run eagerly."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg="with a cp_context the operator runs eagerly: torch.compile(fullgraph=False)")
        return torch.compiler.disable(_run)(context, *args, **kwargs)
    return _run(context, *args, **kwargs)


def _run(
    context: CPContext,
    function: Callable,
    arguments: dict[str, object],
    *,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    kernels: OnKernels | None = None,
    **others: object,
) -> tuple:
    """``function``, a public operator, of checked arguments, with the state that the ranks before hand on.

    ``kernels`` make the maps, where the operator has some for these tensors; else the operator itself does. ``others``
    are options that have no part in what happens to a state. Returns what ``function`` does.
    """
    tokens = int(context.cu_seqlens_cpu[-1])
    if (T := arguments["q"].shape[1]) != tokens:
        raise ValueError(f"q must have T = {tokens}, the tokens of this rank in cp_context, got T = {T}")
    others |= {"cu_seqlens": context.cu_seqlens, "cu_seqlens_cpu": context.cu_seqlens_cpu}
    call = Call(function, arguments, kernels)
    h0, M = k_first(initial_state, state_v_first), None
    if context.most_num_ranks:
        h0, M = _receive(context, call, h0)
    differentiable = context.most_num_ranks > 0 and torch.is_grad_enabled()
    o, ht, *rest = call(
        initial_state=k_first(h0, state_v_first),
        # The gradient of the next rank comes in through the final state.
        output_final_state=output_final_state or differentiable,
        state_v_first=state_v_first,
        **others,
    )
    if differentiable and o.requires_grad:
        ht = k_first(ht, state_v_first)
        # Tensors by themselves, for autograd to keep.
        tensors = call.tensors()
        o, ht = _HandOn.apply(context, call.having(dict.fromkeys(tensors)), list(tensors), o, ht, M, *tensors.values())
        ht = k_first(ht, state_v_first)
    return o, ht if output_final_state else None, *rest


def _receive(context: CPContext, call: Call, h0: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The initial states of the pieces, the first from the ranks before; and ``M`` where a state passes through."""
    k, v = call.arguments["k"], call.arguments["v"]
    shape, dtype = (v.shape[2], k.shape[3], v.shape[3]), compute_dtype(k)
    N = M = None
    if context.post_num_ranks:
        start, end = context.cu_seqlens_cpu[-2:].tolist()
        # Where the sequence begins here, what it begins with is known and is part of N.
        begin = None if h0 is None or context.passes_through else h0[-1:].detach()
        N, M = affine_pair(call.part(start, end), begin, context.passes_through)
    state = _exchange(context, N, M, v.new_zeros(shape, dtype=dtype), reverse=False)
    if state is None:
        return h0, M
    others = state.new_zeros(len(context.cu_seqlens_cpu) - 2, *shape) if h0 is None else h0[1:].to(dtype)
    return torch.cat((state[None], others)), M


class _HandOn(torch.autograd.Function):
    """Nothing in the forward. In the backward the gradient of the last state, which the ranks after this one have made."""

    @staticmethod
    def forward(ctx, context, call, names, o, ht, M, *tensors):
        ctx.context, ctx.call, ctx.names = context, call, names
        ctx.save_for_backward(M, *tensors)
        return o.view_as(o), ht.view_as(ht)

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dht):
        M, *tensors = ctx.saved_tensors
        context = ctx.context
        D = None
        if context.pre_num_ranks:
            call = ctx.call.having(dict(zip(ctx.names, tensors, strict=True)))
            end = int(context.cu_seqlens_cpu[1])
            D = affine_pair_bwd(call.part(0, end), do[:, :end], dht[0])
        incoming = _exchange(context, D, None if M is None else M.mT, dht[-1], reverse=True)
        if incoming is not None:
            dht = torch.cat((dht[:-1], (dht[-1] + incoming)[None]))
        return None, None, None, do, dht, None, *(None for _ in tensors)


@torch.no_grad()
def _exchange(context: CPContext, N: Tensor | None, M: Tensor | None, like: Tensor, reverse: bool) -> Tensor | None:
    """What the ranks before this one, or with ``reverse`` those after it, make of a state that none of them was given.

    The one collective of a pass: every rank takes part, with zeros where it has nothing to add. ``like`` is a state, None
    is returned where none reaches this rank.
    """
    HV, K, V = like.shape
    # Without a rank that a state passes through nobody needs an M.
    pair = like.new_zeros(HV, K, V + K if context.most_num_ranks > 1 else V)
    if N is not None:
        pair[..., :V] = N
    if M is not None:
        pair[..., V:] = M
    pairs = all_gather(pair, context.group)
    if reverse:
        ranks = range(context.rank + context.post_num_ranks, context.rank, -1)
    else:
        ranks = range(context.rank - context.pre_num_ranks, context.rank)
    return fold([pairs[i] for i in ranks], V) if ranks else None


def all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """``x`` of every rank, ``[W, ...]``."""
    gathered = x.new_empty(dist.get_world_size(group), *x.shape)
    # Before torch 2.13 under another name. One after the other along the first axis is the output that every backend takes.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered.flatten(0, 1), x, group=group)
    return gathered


def fold(pairs: list[Tensor], V: int) -> Tensor:
    """The state ``[HV, K, V]`` behind the maps ``pairs``, each ``[HV, K, V+K]``: ``S <- M S + N``, the first from zero."""
    state = pairs[0][..., :V]
    # Autocast would run the products in 16 bits.
    with torch.autocast(state.device.type, enabled=False):
        for pair in pairs[1:]:
            state = torch.baddbmm(pair[..., :V], pair[..., V:], state)
    return state
