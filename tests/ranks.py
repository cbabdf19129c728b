"""A call over several ranks, and the same in one process: what the tests of cp_context compare. Ranks are threads, or workers."""

import os
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from flash_qla_tl import build_cp_context, chunk_gated_delta_rule, chunk_kda, context_parallel
from flash_qla_tl.testing import CAP, GATE_GRADIENT_FLOOR, GRADIENT_FLOOR, inputs, kda_inputs, rel_l2

OPERATORS = {"gdn": (chunk_gated_delta_rule, inputs), "kda": (chunk_kda, kda_inputs)}
TOKENS = ("q", "k", "v", "g", "beta")
WEIGHTS = ("A_log", "dt_bias")
FLOORS = {"o": CAP, "ht": CAP} | dict.fromkeys(("g", "beta", *WEIGHTS), GATE_GRADIENT_FLOOR)


def make(operator, lengths, H=1, HV=2, K=16, V=8, dtype=torch.float64, inside=False, **options):
    """Arguments of the whole, with an initial state of every sequence; ``inside`` are the activations of the gated delta rule."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    options = {"g_dtype": wide, "beta_dtype": wide, "h0_dtype": wide} | options
    if operator == "kda":
        # Decays that leave something of a state after a slice.
        options = {"regime": "faint"} | options
    args = OPERATORS[operator][1](T=sum(lengths), H=H, HV=HV, K=K, V=V, lengths=lengths, dtype=dtype, **options)
    if inside:
        args |= dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)
        args |= {"A_log": torch.rand(HV, dtype=wide) - 5, "dt_bias": torch.rand(HV, dtype=wide)}
        args |= {"q": 3 * args["q"], "beta": 2 * args["beta"]}
    return args | {x: args[x].to(wide) for x in WEIGHTS if x in args}


def bounds(args):
    return args["cu_seqlens"].tolist()


def moved(args, device=None, dtype=None):
    """The arguments elsewhere, or all floats in another dtype."""
    cast = lambda x: x.to(device, dtype if x.is_floating_point() else None)  # noqa: E731
    return {name: cast(x) if torch.is_tensor(x) else x for name, x in args.items()}


def loss(args, o, ht, first=0):
    """Random weights on everything that is there of ``o``, from the token ``first`` on, and on every state."""
    # Of its own, as ranks may be threads.
    random = torch.Generator().manual_seed(1)
    shapes = args["v"].shape, args["initial_state"].shape[1:]
    w_o, w_ht = (torch.randn(x, dtype=torch.float64, generator=random).to(o.device) for x in shapes)
    return (o * w_o[:, first : first + o.shape[1]]).sum() + (ht * w_ht).sum()


def leaves(args):
    names = [x for x in (*TOKENS, "initial_state", *WEIGHTS) if args.get(x) is not None]
    return {x: args[x].detach().clone().requires_grad_() for x in names}


def sliced(args, context, world_size):
    """What a rank has of the arguments."""
    own = {x: args[x].chunk(world_size, 1)[context.rank] for x in TOKENS if args[x] is not None}
    own["initial_state"] = args["initial_state"][context.sequences]
    return {**args, **own, "cu_seqlens": None, "cp_context": context}


@torch.no_grad()
def forward_on_rank(operator, args, context, world_size):
    """What a rank returns without a gradient to make."""
    o, ht = OPERATORS[operator][0](**sliced(args, context, world_size), output_final_state=True)
    return {"o": o, "ht": ht, "sequences": context.sequences}


def on_rank(operator, args, context, world_size):
    """What a rank returns, and the gradients of its part of the loss."""
    own = sliced(args, context, world_size)
    found = leaves(own)
    o, ht = OPERATORS[operator][0](**{**own, **found}, output_final_state=True)
    grads = torch.autograd.grad(loss(args, o, ht, context.rank * o.shape[1]), list(found.values()))
    return {"o": o.detach(), "ht": ht.detach(), "sequences": context.sequences} | dict(zip(found, grads, strict=True))


def whole(operator, args, world_size):
    """The same in one process: o, the states at the ends of all slices, gradients of the sum of the losses."""
    function = OPERATORS[operator][0]
    found = leaves(args)
    o, ht = function(**{**args, **found}, output_final_state=True)
    total, states = loss(args, o, ht[:0]), []
    for rank in range(world_size):
        context = context_parallel.of_rank(bounds(args), rank, world_size, None, "cpu")
        until = args["cu_seqlens"].clamp(max=(rank + 1) * (o.shape[1] // world_size))
        _, ht = function(**{**args, **found, "cu_seqlens": until}, output_final_state=True)
        states.append(ht[context.sequences])
        total = total + loss(args, o[:, :0], states[-1])
    grads = torch.autograd.grad(total, list(found.values()))
    return {"o": o.detach(), "ht": torch.cat(states).detach()} | dict(zip(found, grads, strict=True))


def joined(parts, args):
    """What the ranks found, put together as one process has it."""
    out = {x: torch.cat([part[x] for part in parts], 1) for x in ("o", *TOKENS) if x in parts[0]}
    out["ht"] = torch.cat([part["ht"] for part in parts])
    out |= {x: sum(part[x] for part in parts) for x in WEIGHTS if x in parts[0]}
    if "initial_state" in parts[0]:
        out["initial_state"] = torch.zeros_like(args["initial_state"])
        for part in parts:
            out["initial_state"][part["sequences"]] += part["initial_state"]
    return out


def compare(operator, args, parts, device="cpu"):
    """Against float64 in one process: at most twice as far off as one process in the same dtype, or rounding."""
    world_size, double = len(parts), args["q"].dtype == torch.float64
    found, exact = joined(parts, args), whole(operator, moved(args, dtype=torch.float64), world_size)
    one = exact if double else moved(whole(operator, moved(args, device), world_size), "cpu")
    for name in found:
        x = exact[name]
        limit = 1e-11 if double else max(FLOORS.get(name, GRADIENT_FLOOR), 2 * rel_l2(one[name], x))
        assert rel_l2(found[name], x) <= limit, f"{name}: {rel_l2(found[name], x):.2e} > {limit:.2e}"


def in_threads(world_size, function):
    """``function(rank)`` of every rank, each in a thread -> their results, and the shapes that each rank gathered."""
    barrier, sent, results, errors = threading.Barrier(world_size), [None] * world_size, [None] * world_size, []
    shapes = [[] for _ in range(world_size)]
    mine = threading.local()

    def all_gather(x, group):
        assert x.is_contiguous() and x.dtype in (torch.float32, torch.float64)
        sent[mine.rank] = x
        shapes[mine.rank].append(tuple(x.shape))
        barrier.wait(60)
        everyone = torch.stack(sent)
        barrier.wait(60)
        return everyone

    def body(rank):
        mine.rank = rank
        try:
            results[rank] = function(rank)
        except Exception as error:
            errors.append(error)
            barrier.abort()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_parallel, "all_gather", all_gather)
        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise next((x for x in errors if not isinstance(x, threading.BrokenBarrierError)), errors[0])
    return results, shapes


def worker(rank, world_size, folder, timeout, function, *args):
    """What a spawned process runs: ``function(rank, world_size, *args)`` in a group over gloo; a failure is also written down."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    group = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", **group, timeout=timedelta(seconds=timeout))
    try:
        function(rank, world_size, *args)
    except Exception as error:
        (folder / f"error{rank}").write_text(f"{type(error).__name__}: {error}")
        raise
    finally:
        dist.destroy_process_group()


# What workers do.


def cases(rank, world_size, given, device):
    """Calls over all ranks, one after the other; the first rank holds each against one process."""
    for operator, lengths, options, *how in given:
        torch.manual_seed(0)
        args = make(operator, lengths, **options)
        context = build_cp_context(args["cu_seqlens"], device=device)
        if "fla" in how:
            # Its fields, and what ``sliced`` asks of ours.
            names = ("cu_seqlens", "cu_seqlens_cpu", "pre_num_ranks", "post_num_ranks", "rank", "sequences")
            fields = {name: getattr(context, name) for name in names}
            context = SimpleNamespace(group=dist.group.WORLD, layout="contiguous", **fields)
        call = forward_on_rank if "forward" in how else on_rank
        part = moved(call(operator, moved(args, device), context, world_size), "cpu")
        parts = [None] * world_size if rank == 0 else None
        dist.gather_object(part, parts)
        if rank == 0:
            try:
                compare(operator, args, parts, device)
            except AssertionError as error:
                raise AssertionError(f"{operator} {lengths} {options} {how}: {error}") from error


def one_fails(rank, world_size, how):
    """The first rank waits for the second, which raises an error, or does nothing for long."""
    args = make("gdn", [200])
    if rank == 1:
        if how == "raises":
            raise ValueError("what went wrong")
        time.sleep(6)
    on_rank("gdn", args, build_cp_context(args["cu_seqlens"]), world_size)
