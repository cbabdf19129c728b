"""Kimi Delta Attention's forward against the floor and against other packages, in one run.

    python benchmark/bench_kda.py --out benchmark/results/h200.jsonl

``kda_fwd`` with everything inside: L2 norm, lower-bound gate, sigmoid of beta; bf16, an initial state, outputs given. Each
implementation passes the correctness gate before it is timed: its first head, in float64 (all heads would not fit). Exits with
1 if ours is wrong, or slower than recorded by more than 5%. Without a GPU, ``--set smoke`` tries the script itself.
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

from flash_qla_tl import chunk_kda, kda_fwd
from flash_qla_tl.testing import cold_copies

MODE = "kda_fwd"
LIMIT = 0.008
LOWER_BOUND = -5.0

Call = Callable[[], tuple[Tensor, Tensor]]


def arguments(shape: shapes.Shape, device: str) -> dict:
    """What an implementation is given. States are [N, HV, V, K]."""
    N, heads = len(shape.seqlens), (shape.tokens, shape.HV)
    q, k = torch.randn(2, 1, shape.tokens, shape.H, shape.K, device=device, dtype=torch.bfloat16)
    args = {"q": q, "k": k, "v": torch.randn(1, *heads, shape.V, device=device, dtype=torch.bfloat16)}
    args["g"] = torch.randn(1, *heads, shape.K, device=device, dtype=torch.bfloat16)
    args["beta"] = torch.randn(1, *heads, device=device, dtype=torch.bfloat16)
    args["A_log"] = torch.rand(shape.HV, device=device)
    args["dt_bias"] = torch.rand(shape.HV, shape.K, device=device)
    args["initial_state"] = torch.randn(N, shape.HV, shape.V, shape.K, device=device)
    args["cu_seqlens"] = None
    if N > 1:
        args["cu_seqlens"] = torch.tensor([0, *shape.seqlens], device=device).cumsum(0)
    return args


def chunk_form(x: dict) -> dict:
    """The arguments by the names of ``chunk_kda``, ours and FLA's."""
    inside = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    return {**x, **dict.fromkeys(inside, True), "lower_bound": LOWER_BOUND, "output_final_state": True}


def exact(x: dict) -> dict[str, Tensor]:
    """The first head in float64, by the torch path, which the tests hold against the recurrence."""
    dims = {"q": 2, "k": 2, "v": 2, "g": 2, "beta": 2, "A_log": 0, "dt_bias": 0, "initial_state": 1}
    one = {name: x[name].narrow(dim, 0, 1).double() for name, dim in dims.items()}
    o, ht = chunk_kda(**chunk_form({**x, **one}), state_v_first=True, backend="torch")
    return {"o": o, "ht": ht}


# Each of these takes the arguments, does what need not be timed, and returns what is.


def outputs(x: dict) -> dict[str, Tensor]:
    return {"out": torch.empty_like(x["v"]), "final_state": torch.empty_like(x["initial_state"])}


def ours(x: dict) -> Call:
    filled = outputs(x)
    args = {**x, "scale": x["q"].shape[-1] ** -0.5, "lower_bound": LOWER_BOUND, **filled}

    def call() -> tuple[Tensor, Tensor]:
        kda_fwd(**args)
        return tuple(filled.values())

    return call


def fla(x: dict) -> Call:
    from fla.ops.kda import chunk_kda as fla_chunk_kda

    args = chunk_form({**x, "initial_state": x["initial_state"].mT.contiguous(), "dt_bias": x["dt_bias"].flatten()})
    args["safe_gate"] = True

    def call() -> tuple[Tensor, Tensor]:
        o, ht = fla_chunk_kda(**args)
        return o, ht.mT

    return call


def flash_kda(x: dict) -> Call:
    import flash_kda

    filled = outputs(x)
    x = dict(x)
    first = [x.pop(name) for name in ("q", "k", "v", "g", "beta")]
    gate = [x.pop("A_log"), x.pop("dt_bias"), LOWER_BOUND]
    args = {**x, "final_state": filled["final_state"]}

    def call() -> tuple[Tensor, Tensor]:
        flash_kda.fwd(*first, first[0].shape[-1] ** -0.5, filled["out"], *gate, **args)
        return tuple(filled.values())

    return call


IMPLEMENTATIONS = {report.OURS: ours, "fla": fla, "flash_kda": flash_kda}


def available(device: str) -> dict[str, Callable]:
    """Ours and the peers that import here; says which do not."""
    found = {report.OURS: ours}
    for name, prepare in IMPLEMENTATIONS.items():
        if name != report.OURS:
            try:
                if device == "cpu":
                    raise ImportError("it needs a GPU")
                importlib.import_module(name)
                found[name] = prepare
            except Exception as error:  # what an import without its needs raises is its own affair
                print(f"{name} is not measured: {error}")
    return found


def measure(shape: shapes.Shape, device: str, implementations: dict) -> tuple:
    """Times and errors by implementation; one that fails is left out, and said why."""
    torch.manual_seed(0)
    args = arguments(shape, device)
    truth = exact(args)
    sets = cold_copies(args, device)
    ms, errors = {}, {}
    for name, prepare in implementations.items():
        try:
            with report.poisoned():
                calls = [prepare(x) for x in sets]
                o, ht = calls[0]()
            found = report.gate({"o": o[:, :, :1], "ht": ht[:, :1]}, truth, LIMIT)
            del o, ht
            errors[name] = max(found.values())
            ms[name] = report.median_ms(calls, device)
        except Exception as error:  # a peer's failure must not cost the others their row
            print(f"{shape}: {name} is not timed: {type(error).__name__}: {error}", flush=True)
    return ms, errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=("kda", "smoke"), default="kda")
    parser.add_argument("--rows", type=int, nargs="+", help="only these rows of the set, from 0")
    parser.add_argument("--out", type=Path, help="a JSONL file to append the rows to")
    parser.add_argument("--plot", type=Path, help="a PNG to write, which needs matplotlib")
    parser.add_argument("--commit", help="to record, where there is no git to ask")
    options = parser.parse_args()

    workloads = shapes.KDA if options.set == "kda" else shapes.KDA_SMOKE
    if options.rows is not None:
        workloads = [workloads[i] for i in options.rows]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    implementations = available(device)

    rows = []
    for shape in workloads:
        ms, errors = measure(shape, device, implementations)
        rows.append(report.make_row(shape, MODE, ms, errors, options.commit))
        print(shape, rows[-1]["ms"], rows[-1]["error"], flush=True)
    return report.finish(rows, options.out, options.plot)


if __name__ == "__main__":
    sys.exit(main())
