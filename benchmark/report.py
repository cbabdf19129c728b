"""Gate, time, tabulate, record and plot. As a script: tables and a plot of recorded rows.

python benchmark/report.py benchmark/results/h200.jsonl --mode fwd --plot docs/gated_delta_rule_fwd.png
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch
from shapes import Shape
from torch import Tensor

from flash_qla_tl.testing import rel_l2

# FLA as itself, without the other packages that it hands calls to where they are installed.
os.environ |= {"FLA_FLASH_QLA": "0", "FLA_TILELANG": "0"}

OURS = "ours"
RESULTS = Path(__file__).parent / "results"
TOLERATED = 1.05
PACKAGES = ("torch", "triton", "tilelang", "fla-core", "flash-qla", "flashinfer-python")
TIMED_MS = 400  # device time a measurement may take, warm-up not counted


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN, whoever calls it, so that an output nobody wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def gate(outputs: dict[str, Tensor], exact: dict[str, Tensor], limit: float) -> dict[str, float]:
    """Relative errors by name.

    Raises:
        ArithmeticError: one is over ``limit``, or NaN; nothing wrong is worth timing.
    """
    errors = {name: rel_l2(x, exact[name]) for name, x in outputs.items()}
    wrong = {name: error for name, error in errors.items() if not error <= limit}
    if wrong:
        raise ArithmeticError(", ".join(f"{name} is off by {error:.2e}" for name, error in wrong.items()))
    return errors


def median_ms(calls: list[Callable], device: str) -> float:
    """Median time of a call, over rounds through ``calls``, which differ only in their inputs.

    On a GPU a round is a CUDA graph where one can be captured, and otherwise launched call by call, which counts the
    gaps between launches too.
    """
    for call in calls:
        call()
    if device == "cpu":
        return _median_on_cpu(calls)
    torch.cuda.synchronize()
    one_round = _captured(calls) or (lambda: [call() for call in calls])
    times = [_elapsed_ms(one_round)]
    rounds = max(3, min(50, int(TIMED_MS / times[0])))
    times = [_elapsed_ms(one_round) for _ in range(rounds)]
    return statistics.median(times) / len(calls)


def _captured(calls: list[Callable]) -> Callable | None:
    """The replay of a round, or None, and said why, where a call does what no graph can hold."""
    try:
        # A wait for the device is found here: a capture that it breaks off would leave its traces.
        torch.cuda.set_sync_debug_mode("error")
        try:
            calls[0]()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # What a call returns is dropped at once, so the next call may write where it did.
            for call in calls:
                call()
    except Exception as error:  # some packages assert that nobody captures them
        print(f"launched call by call: {type(error).__name__}: {error}", flush=True)
        return None
    return graph.replay


def _elapsed_ms(fn: Callable) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _median_on_cpu(calls: list[Callable]) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for call in calls:
            call()
        times.append((time.perf_counter() - start) * 1e3 / len(calls))
    return statistics.median(times)


def make_row(
    shape: Shape,
    mode: str,
    ms: dict[str, float],
    errors: dict[str, float],
    commit: str | None = None,
    mib: dict[str, list[float]] | None = None,
) -> dict:
    """One line of a results file: what was measured, and everything needed to measure it again.

    ``mib``: of a training step, what is kept for the backward and the peak.
    """
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "mode": mode,
        "seqlens": list(shape.seqlens),
        "H": shape.H,
        "HV": shape.HV,
        "K": shape.K,
        "V": shape.V,
        "packed": shape.packed,
        "floor_ms": round(shape.floor_ms(mode), 4),
        "ms": {name: round(x, 5) for name, x in ms.items()},
        "error": {name: float(f"{x:.3g}") for name, x in errors.items()},
        **({"mib": mib} if mib else {}),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cuda": torch.version.cuda,
        "versions": versions,
        "commit": commit or current_commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
    }


def current_commit() -> str:
    """Of the checkout this file lies in, marked where the checkout differs from it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    run = lambda *args: subprocess.run(  # noqa: E731
        [*git, *args], capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        dirty = "+" if run("status", "--porcelain", "--untracked-files=no") else ""
        return run("rev-parse", "--short", "HEAD") + dirty
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def shape_of(row: dict) -> Shape:
    sizes = {name: row[name] for name in ("K", "V", "packed") if name in row}
    return Shape(tuple(row["seqlens"]), row["H"], row["HV"], **sizes)


def key(row: dict) -> tuple:
    return row["mode"], shape_of(row)


def read(path: Path) -> list[dict]:
    """The rows of a results file, the last one of each workload."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return list({key(row): row for row in rows}.values())


def append(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def results_file(gpu: str, published: bool = False) -> Path:
    """Where the rows of a GPU are recorded: h200.jsonl for "NVIDIA H200"; those of the set "published": h200_published.jsonl."""
    name = gpu.lower().removeprefix("nvidia ").replace(" ", "_")
    return RESULTS / f"{name}{'_published' if published else ''}.jsonl"


def with_recorded_peers(rows: list[dict], results: Path) -> list[dict]:
    """The rows with what other packages took, as recorded beside a results file in peers_*.json."""
    path = results.with_name(f"peers_{results.stem}.json")
    recorded = {key(x): x["ms"] for x in json.loads(path.read_text())["rows"]} if path.exists() else {}
    return [{**row, "recorded_ms": recorded.get(key(row), {})} for row in rows]


def regressions(rows: list[dict], recorded: list[dict]) -> list[str]:
    """Which rows are slower than recorded on the same GPU, by more than what is tolerated."""
    before = {(row["gpu"], key(row)): row["ms"].get(OURS) for row in recorded}
    found = []
    for row in rows:
        old, new = before.get((row["gpu"], key(row))), row["ms"].get(OURS)
        if old and new and new > TOLERATED * old:
            found.append(f"{row['mode']} {shape_of(row)}: {new:.4f} ms, recorded {old:.4f} ms")
    return found


def finish(rows: list[dict], out: Path | None, plotted: Path | None, published: bool = False) -> int:
    """What a benchmark does with its rows at the end; -> its exit code."""
    recorded = results_file(rows[0]["gpu"], published)
    regressed = regressions(rows, read(recorded))
    if out:
        append(out, rows)
    rows = with_recorded_peers(rows, recorded)
    print(f"\n{table(rows)}")
    if plotted:
        plot(rows, plotted)
    for line in regressed:
        print(f"regressed: {line}")
    complete = all(OURS in row["ms"] for row in rows)
    return int(bool(regressed) or not complete)


def peers(row: dict) -> dict[str, float]:
    """Every other implementation's time, those recorded earlier with a mark."""
    measured = {name: ms for name, ms in row["ms"].items() if name != OURS}
    return {**measured, **{f"{name}*": ms for name, ms in row.get("recorded_ms", {}).items()}}


def table(rows: list[dict]) -> str:
    """Aligned text: floor, ours, how far that is from the floor, each peer, the best over ours."""
    names = list({name: None for row in rows for name in peers(row)})
    memory = list({name: None for row in rows for name in row.get("mib", {})})
    lines = [["ms", "floor", OURS, "x floor", *names, "best/ours", *(f"MiB {name}" for name in memory)]]
    ratios = []
    for row in rows:
        ours, others = row["ms"].get(OURS), peers(row)
        cells = [str(shape_of(row)), f"{row['floor_ms']:.3f}"]
        cells += [f"{ours:.4f}", f"{ours / row['floor_ms']:.2f}"] if ours else ["-", "-"]
        cells += [f"{others[name]:.4f}" if name in others else "-" for name in names]
        if ours and others:
            ratios.append(min(others.values()) / ours)
            cells.append(f"{ratios[-1]:.2f}")
        else:
            cells.append("-")
        mib = row.get("mib", {})
        cells += ["{:.0f} / {:.0f}".format(*mib[name]) if name in mib else "-" for name in memory]
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines]
    if any(name.endswith("*") for name in names):
        text.append("* measured earlier, see benchmark/results")
    if memory:
        text.append("MiB: kept for the backward, beside inputs and outputs / at the peak, beside inputs")
    if ratios:
        text.append(f"geometric mean of best/ours: {statistics.geometric_mean(ratios):.3f}")
    return "\n".join(text)


def plot(rows: list[dict], path: Path) -> None:
    """Time against the floor, both logarithmic: ours, each peer, and the floor itself as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5.5), layout="constrained")
    axes = figure.subplots()
    floors = [row["floor_ms"] for row in rows]
    ends = [min(floors), max(floors)]
    axes.plot(ends, ends, color="black", linewidth=1, label="floor")
    everyone = [{OURS: row["ms"][OURS], **peers(row)} for row in rows]
    for name in {name: None for times in everyone for name in times}:
        points = [(f, x[name]) for f, x in zip(floors, everyone, strict=True) if name in x]
        mine = name == OURS
        axes.scatter(
            *zip(*points, strict=True),
            label=name,
            marker="o" if mine else "x",
            color="tab:red" if mine else None,
            zorder=3 if mine else 2,
        )
    axes.set(xscale="log", yscale="log", xlabel="floor, ms", ylabel="ms a call")
    operator = "Kimi Delta Attention" if rows[0]["mode"] == "kda_fwd" else "gated delta rule"
    axes.set_title(f"{operator}, {rows[0]['mode']}, {rows[0]['gpu']}")
    # Labels at powers of ten; those between them would overlap.
    axes.xaxis.set_minor_formatter("")
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tables and a plot of recorded rows.")
    parser.add_argument("results", type=Path)
    parser.add_argument("--mode", choices=("fwd", "bwd", "step", "kda_fwd"), default="fwd")
    parser.add_argument("--plot", type=Path, help="a PNG to write")
    args = parser.parse_args()
    rows = [row for row in read(args.results) if row["mode"] == args.mode]
    rows = with_recorded_peers(rows, args.results)
    if not rows:
        parser.error(f"{args.results} has no row of mode {args.mode}")
    print(table(rows))
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
