"""The gated delta rule against the floor and against other packages, in one run.

    python benchmark/bench_gated_delta_rule.py --mode fwd --out benchmark/results/h200.jsonl

Each implementation passes the correctness gate before it is timed. Exits with 1 if ours is wrong,
or slower than recorded by more than 5%. Without a GPU, ``--set smoke`` tries the script itself.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import report
import shapes
import torch
from torch import Tensor

from flash_qla_tl import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from flash_qla_tl.testing import cold_copies

GRADIENTS = ("dq", "dk", "dv", "db", "dg", "dh0")
LEAVES = ("q", "k", "v", "beta", "g", "initial_state")
OUTPUTS = {"fwd": ("o", "ht"), "bwd": GRADIENTS, "step": ("o", "ht", *GRADIENTS)}
# The largest relative error of a result that is timed.
LIMITS = {"fwd": 0.008, "bwd": 0.02, "step": 0.02}

Call = Callable[[], tuple[Tensor, ...]]


def arguments(shape: shapes.Shape, mode: str, device: str) -> dict:
    """What an implementation is given; those of the backward include do and dht."""
    args = {"cu_seqlens": None, **shape.inputs(device)}
    if mode != "fwd":
        args["do"] = torch.randn_like(args["v"])
        args["dht"] = torch.randn_like(args["initial_state"])
    return args


# Each of these takes the arguments, does what need not be timed, and returns what is.


def ours_fwd(x: dict) -> Call:
    return lambda: chunk_gated_delta_rule(**x, output_final_state=True)


def ours_bwd(x: dict) -> Call:
    x = dict(x)
    do, dht = x.pop("do"), x.pop("dht")
    fwd = chunk_gated_delta_rule_fwd(**x)
    x |= {"g": fwd.g_cumsum, "A": fwd.A, "do": do, "dht": dht}
    return lambda: chunk_gated_delta_rule_bwd(**x)


def fla_fwd(x: dict) -> Call:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return lambda: chunk_gated_delta_rule(**x, output_final_state=True)


def fla_bwd(x: dict) -> Call:
    from fla.ops.gated_delta_rule import chunk

    x = {**x, "scale": x["q"].shape[-1] ** -0.5}
    do, dht = x.pop("do"), x.pop("dht")
    g, _, A, *_ = chunk.chunk_gated_delta_rule_fwd(**x, output_final_state=True)
    x |= {"g": g, "A": A, "do": do, "dht": dht}
    return lambda: chunk.chunk_gated_delta_rule_bwd(**x)[: len(GRADIENTS)]


def flash_qla_fwd(x: dict) -> Call:
    import flash_qla

    return lambda: flash_qla.chunk_gated_delta_rule(**x, output_final_state=True)


def flash_qla_bwd(x: dict) -> Call:
    import flash_qla

    x = {**x, "scale": x["q"].shape[-1] ** -0.5}
    do, dht = x.pop("do"), x.pop("dht")
    g, A, *_, cache = flash_qla.chunk_gated_delta_rule_fwd(**x, enable_fwd_cp_cache=True)
    x |= {"g": g, "A": A, "do": do, "dht": dht, "cp_cache": cache}
    return lambda: flash_qla.chunk_gated_delta_rule_bwd(**x)


def flashinfer_fwd(x: dict) -> Call:
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    # Its g is the decay itself, its states are [V, K], and everything is packed.
    B, T = x["q"].shape[:2]
    cu_seqlens = x["cu_seqlens"]
    if cu_seqlens is None:
        cu_seqlens = torch.arange(B + 1, device=x["q"].device) * T
    q, k, v, g, beta = (x[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta"))
    h0 = x["initial_state"].mT.contiguous()
    args = {"q": q, "k": k, "v": v, "g": g.exp(), "beta": beta, "initial_state": h0}
    args |= {"cu_seqlens": cu_seqlens.long(), "output_final_state": True}

    def call() -> tuple[Tensor, Tensor]:
        o, ht = chunk_gated_delta_rule(**args, output_state=torch.empty_like(h0))
        return o.unflatten(0, (B, T)), ht.mT

    return call


def fla() -> Callable:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule


def flash_qla() -> Callable:
    import flash_qla

    return flash_qla.chunk_gated_delta_rule


# The public functions of a training step.
FUNCTIONS = {report.OURS: lambda: chunk_gated_delta_rule, "fla": fla, "flash_qla": flash_qla}


def halves(name: str, x: dict) -> tuple[Call, Callable]:
    """The forward of a training step, and what makes the gradients of its results."""
    x, function = dict(x), FUNCTIONS[name]()
    weights = x.pop("do"), x.pop("dht")
    leaves = [x[leaf].requires_grad_() for leaf in LEAVES]
    return lambda: function(**x, output_final_state=True)[:2], lambda out: torch.autograd.grad(out, leaves, weights)


def step(name: str) -> Callable[[dict], Call]:
    def prepare(x: dict) -> Call:
        forward, backward = halves(name, x)

        def call() -> tuple[Tensor, ...]:
            outputs = forward()
            return *outputs, *backward(outputs)

        return call

    return prepare


def memory_mib(name: str, x: dict) -> tuple[float, float]:
    """Of a training step: kept between forward and backward beside inputs and outputs, and the peak beside inputs."""
    forward, backward = halves(name, x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = forward()
    held = torch.cuda.memory_allocated() - before - sum(out.nbytes for out in outputs)
    gradients = backward(outputs)
    torch.cuda.synchronize()
    del gradients
    return held / 2**20, (torch.cuda.max_memory_allocated() - before) / 2**20


IMPLEMENTATIONS = {
    "fwd": {report.OURS: ours_fwd, "fla": fla_fwd, "flash_qla": flash_qla_fwd, "flashinfer": flashinfer_fwd},
    "bwd": {report.OURS: ours_bwd, "fla": fla_bwd, "flash_qla": flash_qla_bwd},
    "step": {name: step(name) for name in FUNCTIONS},
}


def available(mode: str, device: str, skip_flashinfer: bool) -> dict[str, Callable]:
    """Ours and the peers that import here; says which do not."""
    found = {}
    for name, prepare in IMPLEMENTATIONS[mode].items():
        if name == "flashinfer" and skip_flashinfer:
            continue
        if name != report.OURS:
            try:
                if device == "cpu":
                    raise ImportError("it needs a GPU")
                importlib.import_module(name)
            except Exception as error:  # what an import without its needs raises is its own affair
                print(f"{name} is not measured: {error}")
                continue
        found[name] = prepare
    return found


def exact(x: dict, mode: str) -> dict[str, Tensor]:
    """The results in float64, by the torch path, which the tests hold against the recurrence."""
    x = {
        name: tensor.double() if torch.is_tensor(tensor) and tensor.is_floating_point() else tensor
        for name, tensor in x.items()
    }
    if mode == "bwd":
        return dict(zip(GRADIENTS, ours_bwd(x)(), strict=True))
    if mode == "step":
        return dict(zip(OUTPUTS[mode], step(report.OURS)(x)(), strict=True))
    o, ht = chunk_gated_delta_rule(**x, output_final_state=True, backend="torch")
    return {"o": o, "ht": ht}


def measure(shape: shapes.Shape, mode: str, device: str, implementations: dict) -> tuple[dict, dict, dict]:
    """Times, errors and, of a training step on a GPU, MiB by implementation; one that fails is left out, and said why."""
    torch.manual_seed(0)
    args = arguments(shape, mode, device)
    truth = exact(args, mode)
    sets = cold_copies(args, device)
    ms, errors, mib = {}, {}, {}
    for name, prepare in implementations.items():
        try:
            calls = [prepare(x) for x in sets]
            with report.poisoned():
                outputs = calls[0]()
            found = report.gate(dict(zip(OUTPUTS[mode], outputs, strict=True)), truth, LIMITS[mode])
            del outputs
            errors[name] = max(found.values())
            if mode == "step" and device == "cuda":
                mib[name] = [round(x, 1) for x in memory_mib(name, sets[0])]
            ms[name] = report.median_ms(calls, device)
        except Exception as error:  # a peer's failure must not cost the others their row
            print(f"{shape}: {name} is not timed: {type(error).__name__}: {error}", flush=True)
    return ms, errors, mib


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=tuple(OUTPUTS), default="fwd")
    parser.add_argument("--set", choices=shapes.SETS, help="default: prefill with fwd, else training")
    parser.add_argument("--num-heads", type=int, default=32, help="HV where a set names no heads")
    parser.add_argument("--rows", type=int, nargs="+", help="only these rows of the set, from 0")
    parser.add_argument("--skip-fi", action="store_true", help="do not measure FlashInfer")
    parser.add_argument("--out", type=Path, help="a JSONL file to append the rows to")
    parser.add_argument("--plot", type=Path, help="a PNG to write, which needs matplotlib")
    parser.add_argument("--commit", help="to record, where there is no git to ask")
    options = parser.parse_args()

    mode = options.mode
    workloads = shapes.shapes(options.set or ("prefill" if mode == "fwd" else "training"), options.num_heads)
    if options.rows is not None:
        workloads = [workloads[i] for i in options.rows]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    implementations = available(mode, device, options.skip_fi)

    rows = []
    for shape in workloads:
        ms, errors, mib = measure(shape, mode, device, implementations)
        rows.append(report.make_row(shape, mode, ms, errors, options.commit, mib))
        print(shape, rows[-1]["ms"], rows[-1]["error"], flush=True)
    return report.finish(rows, options.out, options.plot, options.set == "published")


if __name__ == "__main__":
    sys.exit(main())
