"""``python -m flash_qla_tl.profile``: where the time of an operator goes, kernel by kernel, and how far each is from the floor.

On a GPU every kernel with its time, its share, and what it moves and multiplies in it; on the CPU, where the operators run in
torch, torch's operators. Inputs are those of the benchmarks, random, and too many for the L2 cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from flash_qla_tl import testing
from flash_qla_tl.costs import OPS, Workload
from flash_qla_tl.gated_delta_rule import chunk_gated_delta_rule
from flash_qla_tl.kda import chunk_kda
from flash_qla_tl.kernels.common.target import DTYPES
from flash_qla_tl.utils import profile

LEAVES = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
# Torch's operators in a table: the rest takes no time worth a line.
SHOWN = 20


def arguments(op: str, work: Workload, dtype: torch.dtype, norm: bool, gate: bool, device: str) -> dict:
    """Of one call of ``op``'s public function, by keyword. Kimi Delta Attention has everything inside."""
    size = {"lengths": list(work.seqlens), "H": work.H, "HV": work.HV, "K": work.K, "V": work.V, "device": device}
    if op == "kda_fwd":
        types = {"dtype": dtype, "g_dtype": dtype, "beta_dtype": dtype, "h0_dtype": torch.float32}
        return testing.kda_inputs(**size, **types, state_v_first=True)
    args = testing.inputs(**size, dtype=dtype, h0_dtype=torch.float32, normalised=not norm)
    args["use_qk_l2norm_in_kernel"] = norm
    if gate:
        args |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        args |= {"g": torch.randn_like(args["g"]), "beta": torch.randn_like(args["beta"])}
        args |= {name: torch.rand(work.HV, device=device) for name in ("A_log", "dt_bias")}
    return args


def call(op: str, args: dict) -> Callable:
    """What is profiled; the backward's forward is done here."""
    if op == "kda_fwd":
        return partial(chunk_kda, **args, output_final_state=True)
    if op == "gdn_fwd":
        return partial(chunk_gated_delta_rule, **args, output_final_state=True)
    leaves = {name: args[name].requires_grad_() for name in LEAVES if name in args}
    outputs = chunk_gated_delta_rule(**args | leaves, output_final_state=True)
    weights = [torch.randn_like(x) for x in outputs]
    return partial(torch.autograd.grad, outputs, list(leaves.values()), weights, retain_graph=True)


def measure(
    op: str, work: Workload, dtype: str = "bfloat16", norm: bool = False, gate: bool = False, rep: int = 50
) -> dict:
    """The profile of ``op`` on the GPU, or without one on the CPU, as it goes into a file of JSON.

    Args:
        op: "gdn_fwd", "gdn_bwd" or "kda_fwd".
        dtype: of q, k and v.
        norm: the L2 norm of q and k is inside. Always so in Kimi Delta Attention.
        gate: the activation of the gate and the sigmoid of beta are inside. Likewise.
        rep: calls that count; as many before them do not.

    Returns:
        What was run; ``ms`` and ``floor_ms`` of a call; and of each of its ``kernels`` ``name``, ``ms``, and, unless it is one
        of torch's, ``bytes``, ``flop`` and its own ``floor_ms``. Floors are those of an H200, of costs.py.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    args = arguments(op, work, getattr(torch, dtype), norm, gate, device)
    calls = itertools.cycle([call(op, x) for x in testing.cold_copies(args, device)])
    times = profile(lambda: next(calls)(), wait=rep, warmup=rep, rep=rep)
    total = times.pop("total")
    costs = work.kernels(norm, gate)
    kernels = []
    for name, ms in times.items():
        cost = next((cost for beginning, cost in costs.items() if name.startswith(beginning)), None)
        counts = {} if cost is None else {"bytes": cost.bytes, "flop": cost.flop, "floor_ms": cost.floor_ms}
        kernels.append({"name": name, "ms": ms, **counts})
    return {
        "op": op,
        "seqlens": list(work.seqlens),
        **{name: getattr(work, name) for name in ("H", "HV", "K", "V")},
        "dtype": dtype,
        "norm": norm,
        "gate": gate,
        "device": torch.cuda.get_device_name() if device == "cuda" else f"cpu, {platform.machine()}",
        "torch": torch.__version__,
        "ms": total,
        "floor_ms": work.floor(op).floor_ms,
        "kernels": kernels,
    }


def title(found: dict) -> str:
    runs = [(length, len(list(run))) for length, run in itertools.groupby(found["seqlens"])]
    lengths = "+".join(f"{n}x{length}" for length, n in runs)
    return f"{found['op']} {lengths} ({found['H']},{found['HV']}) K={found['K']} V={found['V']} {found['dtype']}"


def table(found: dict) -> str:
    """A line a kernel, and on a GPU what it moves and multiplies; floors in ms, and times as multiples of them."""
    kernels, header = found["kernels"], ["", "ms", "share", "TB/s", "TFLOP/s", "floor", "x floor"]
    if not any("bytes" in kernel for kernel in kernels):  # torch's operators
        header = header[:3]
        kernels = sorted(kernels, key=lambda kernel: -kernel["ms"])
        kernels, rest = kernels[:SHOWN], sum(kernel["ms"] for kernel in kernels[SHOWN:])
        kernels += [{"name": "others", "ms": rest}] if rest else []
    rows = [header]
    for kernel in [*kernels, {**found, "name": "total"}]:
        ms, floor = kernel["ms"], kernel.get("floor_ms")
        row = [kernel["name"], f"{ms:.4f}", f"{ms / found['ms']:.1%}"]
        row += [
            f"{kernel[x] / ms / 1e9:.{digits}f}" if x in kernel else "" for x, digits in (("bytes", 2), ("flop", 0))
        ]
        row += ["", ""] if floor is None else [f"{floor:.4f}", f"{ms / floor:.2f}"]
        rows.append(row[: len(header)])
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [[row[0].ljust(first), *map(str.rjust, row[1:], widths)] for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def plot(found: dict, path: Path) -> None:
    """A bar a kernel, its own floor as a line across it."""
    from matplotlib.figure import Figure

    kernels = sorted(found["kernels"], key=lambda kernel: kernel["ms"])[-SHOWN:]
    figure = Figure(figsize=(8, 1.2 + 0.35 * len(kernels)), layout="constrained")
    axes = figure.subplots()
    axes.barh([kernel["name"] for kernel in kernels], [kernel["ms"] for kernel in kernels], color="tab:red")
    floors = [(i, kernel["floor_ms"]) for i, kernel in enumerate(kernels) if "floor_ms" in kernel]
    if floors:
        rows, ms = zip(*floors, strict=True)
        axes.scatter(ms, rows, marker="|", s=300, color="black", zorder=2, label="floor of an H200")
        axes.legend(loc="lower right")
    axes.set(xlabel="ms a call", title=f"{title(found)}\n{found['device']}, {found['ms']:.3f} ms")
    figure.savefig(path, dpi=120)


def _numbers(text: str) -> list[int]:
    """8192,300 or 8x1024 -> the numbers."""
    if not re.fullmatch(r"([1-9]\d*x)?[1-9]\d*(,([1-9]\d*x)?[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"expected numbers as in 8192,300 or 8x1024, got {text!r}")
    parts = (part.rpartition("x") for part in text.split(","))
    return [int(number) for times, _, number in parts for _ in range(int(times or 1))]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flash_qla_tl.profile", description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=OPS, default="gdn_fwd")
    parser.add_argument("--seqlens", type=_numbers, default=[8192], help="of packed sequences: 8192,300 or 8x1024")
    parser.add_argument("--heads", type=_numbers, default=[16, 32], help="H,HV, or one number for both")
    parser.add_argument("--head-dim", type=_numbers, default=[128], help="K,V, or one number for both")
    parser.add_argument("--dtype", choices=(*DTYPES, "float32"), default="bfloat16", help="of q, k and v")
    parser.add_argument("--norm", action="store_true", help="the L2 norm of q and k inside; in kda_fwd always")
    parser.add_argument("--gate", action="store_true", help="gate and sigmoid of beta inside; in kda_fwd always")
    parser.add_argument("--rep", type=int, help="calls that count; default: 50, on the CPU 2")
    parser.add_argument("--json", type=Path, help="a file to write")
    parser.add_argument("--png", type=Path, help="a file to write, which needs matplotlib")
    options = parser.parse_args()
    for name in ("heads", "head_dim"):
        if len(getattr(options, name)) > 2:
            parser.error(f"--{name.replace('_', '-')} takes one number or two, got {getattr(options, name)}")
    if options.png:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            parser.error('--png needs matplotlib: pip install "flash_qla_tl[plot]"')
    (H, *HV), (K, *V) = options.heads, options.head_dim
    work = Workload(options.seqlens, H, *(HV or [H]), K, *(V or [K]))
    rep = options.rep
    if rep is None:
        rep = 50 if torch.cuda.is_available() else 2
    try:
        found = measure(options.op, work, options.dtype, options.norm, options.gate, rep)
    except ValueError as error:
        parser.error(str(error))
    print(f"{title(found)}, {found['device']}\n\n{table(found)}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if options.png:
        plot(found, options.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
