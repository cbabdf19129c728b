"""One rank's part of a call over several, and the whole of it in one process: what the tests of cp_context compare."""

import threading

import torch

from flash_qla_tl import chunk_gated_delta_rule, chunk_kda, context_parallel
from flash_qla_tl.testing import inputs, kda_inputs, rel_l2

OPERATORS = {"gdn": (chunk_gated_delta_rule, inputs), "kda": (chunk_kda, kda_inputs)}
TOKENS = ("q", "k", "v", "g", "beta")
WEIGHTS = ("A_log", "dt_bias")


def make(operator, lengths, H=1, HV=2, K=16, V=8, dtype=torch.float64, state_v_first=False, **options):
    """Arguments of the whole, an initial state of every sequence and both layers of activations included."""
    floats = {
        x: torch.float64 if dtype == torch.float64 else torch.float32 for x in ("g_dtype", "beta_dtype", "h0_dtype")
    }
    args = OPERATORS[operator][1](
        T=sum(lengths),
        H=H,
        HV=HV,
        K=K,
        V=V,
        lengths=lengths,
        dtype=dtype,
        state_v_first=state_v_first,
        **{**floats, **options},
    )
    for name in WEIGHTS:
        if name in args:
            args[name] = torch.randn_like(args[name]).to(floats["g_dtype"]) / 4
    return args


def bounds(args):
    return args["cu_seqlens"].tolist()


def weights(args):
    """Of the loss: of every entry of o, and of a state."""
    # Of its own, as ranks may be threads.
    random = torch.Generator().manual_seed(1)
    shapes = args["v"].shape, args["initial_state"].shape[1:]
    return [torch.randn(x, dtype=torch.float64, generator=random) for x in shapes]


def loss(o, ht, w_o, w_ht):
    return (o.double() * w_o.to(o.device)).sum() + (ht.double() * w_ht.to(o.device)).sum()


def leaves(args):
    names = [x for x in (*TOKENS, "initial_state", *WEIGHTS) if args.get(x) is not None]
    return {x: args[x].detach().clone().requires_grad_() for x in names}


def on_rank(operator, args, context, world_size, **options):
    """What a rank returns, and the gradients of its part of the loss with respect to its part of the arguments."""
    own = {x: args[x].chunk(world_size, 1)[context.rank] for x in TOKENS if args[x] is not None}
    if args.get("initial_state") is not None:
        own["initial_state"] = args["initial_state"][context.sequences]
    own = {**args, **own, "cu_seqlens": None}
    found = leaves(own)
    o, ht, *_ = OPERATORS[operator][0](**{**own, **found}, output_final_state=True, cp_context=context, **options)
    w_o, w_ht = weights(args)
    total = loss(o, ht, w_o.chunk(world_size, 1)[context.rank], w_ht)
    grads = torch.autograd.grad(total, list(found.values()))
    return {"o": o.detach(), "ht": ht.detach(), "sequences": context.sequences} | dict(zip(found, grads, strict=True))


def whole(operator, args, world_size, **options):
    """The same in one process: o, the states at the ends of all slices, gradients of the sum of the losses."""
    function = OPERATORS[operator][0]
    found = leaves(args)
    w_o, w_ht = weights(args)
    o, _ = function(**{**args, **found}, **options)
    total, states = loss(o, o.new_zeros(1), w_o, w_ht[:0].sum()), []
    cu, T = args["cu_seqlens"], args["q"].shape[1]
    for rank in range(world_size):
        context = context_parallel.of_rank(cu.tolist(), rank, world_size, None, "cpu")
        end = (rank + 1) * T // world_size
        _, ht = function(**{**args, **found, "cu_seqlens": cu.clamp(max=end)}, output_final_state=True, **options)
        states.append(ht[context.sequences])
        total = total + loss(o[:0], states[-1], w_o[:0], w_ht)
    grads = torch.autograd.grad(total, list(found.values()))
    return {"o": o.detach(), "ht": torch.cat(states).detach()} | dict(zip(found, grads, strict=True))


def joined(parts, args):
    """What the ranks found, put together as one process has it."""
    out = {x: torch.cat([part[x] for part in parts], 1) for x in ("o", *TOKENS) if parts[0].get(x) is not None}
    out["ht"] = torch.cat([part["ht"] for part in parts])
    out |= {x: sum(part[x] for part in parts) for x in WEIGHTS if parts[0].get(x) is not None}
    if "initial_state" in parts[0]:
        out["initial_state"] = torch.zeros_like(args["initial_state"])
        for part in parts:
            out["initial_state"][part["sequences"]] += part["initial_state"]
    return out


def compare(found, expected, limit):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].isfinite().all() and rel_l2(found[name], x) <= limit, f"{name}: {rel_l2(found[name], x):.2e}"


def in_threads(monkeypatch, world_size, function):
    """``function(rank)`` of every rank, each in a thread, with an all-gather among them -> results by rank."""
    barrier, gathered, results, errors = threading.Barrier(world_size), [None] * world_size, [None] * world_size, []
    mine = threading.local()
    calls = []

    def all_gather(x, group):
        gathered[mine.rank] = x
        calls.append(x.shape)
        barrier.wait(60)
        everyone = torch.stack(gathered)
        barrier.wait(60)
        return everyone

    def body(rank):
        mine.rank = rank
        try:
            results[rank] = function(rank)
        except Exception as error:
            errors.append(error)
            barrier.abort()

    monkeypatch.setattr(context_parallel, "all_gather", all_gather)
    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((x for x in errors if not isinstance(x, threading.BrokenBarrierError)), errors[0])
    return results, calls
