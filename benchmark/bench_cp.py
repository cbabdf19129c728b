"""Sequences over several ranks: time and bytes on the wire against tokens and ranks, and a model of more ranks.

    python benchmark/bench_cp.py --ranks 1 2 4 8 --tokens 8192 32768 --out benchmark/results/cp_h200.jsonl
    python benchmark/bench_cp.py --model

One sequence of ``tokens`` a rank, over all ranks: every rank but the first and the last then has a state passing through. Ranks
are processes with a GPU each over NCCL; with fewer GPUs they share what there is, or the CPU, over gloo, which says
nothing of NCCL's times. ``--operator kda`` has the forward alone. o, and dv with a backward, are held against one process before
anything is timed. Exits with 1 if they are off.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import report
import torch
import torch.distributed as dist

from flash_qla_tl import build_cp_context, chunk_gated_delta_rule, chunk_kda
from flash_qla_tl.context_parallel import CPContext, all_gather
from flash_qla_tl.testing import inputs, kda_inputs, rel_l2

OPERATORS = {"gdn": (chunk_gated_delta_rule, inputs), "kda": (chunk_kda, kda_inputs)}
LIMIT = 0.015
COLUMNS = "operator", "mode", "ranks", "tokens a rank", "backend", "ms", "exchange ms", "MiB received"

# The model. Times of one H200 at 32768 tokens, (16, 32) heads, K = V = 128: docs/benchmarks.md. What is assumed: the rates that
# NCCL's all-gather takes in at a rank, over NVLink and over one network card of 400 Gb/s a GPU, what a step of its ring costs, and
# the launch of a product of the fold.
LOCAL_MS = {"forward": 0.805, "backward": 2.067}
MODEL_TOKENS, MODEL_HV, MODEL_D = 32768, 32, 128
NVLINK, NETWORK = 350e6, 45e6  # bytes a ms
STEP_MS, FOLD_MS = 0.006, 0.01
GPUS_A_NODE = 8


def pair_bytes(HV: int, K: int, V: int, most_num_ranks: int) -> int:
    """What a rank sends in a pass: ``N``, and ``M`` where some state passes through a rank, in fp32."""
    return 4 * HV * K * (V + (K if most_num_ranks > 1 else 0)) if most_num_ranks else 0


def model(ranks: int, tokens: int, mode: str) -> dict[str, float]:
    """Milliseconds of the parts of a pass over one sequence on the rank that waits longest; ``tokens`` a rank."""
    local = {name: ms * tokens / MODEL_TOKENS for name, ms in LOCAL_MS.items()}
    through = ranks > 2
    # As long as the pair is made by the operator itself: N by a forward, M by another; D by a forward and a backward.
    pair = local["forward"] * (1 + through) if mode == "forward" else sum(local.values())
    received = (ranks - 1) * pair_bytes(MODEL_HV, MODEL_D, MODEL_D, ranks - 1)
    rate = NVLINK
    if ranks > GPUS_A_NODE:
        # What enters a node comes over all of its network cards, and is handed around within it.
        rate = min(NVLINK, NETWORK * GPUS_A_NODE * ranks / (ranks - GPUS_A_NODE))
    exchange = received / rate + (ranks - 1) * STEP_MS
    return {
        "local": local[mode],
        "pair": pair if ranks > 1 else 0.0,
        "all-gather": exchange,
        "fold": max(ranks - 2, 0) * FOLD_MS,
    }


def print_model() -> None:
    print("A model, not a measurement: one sequence over all ranks, 32 value heads, K = V = 128, H200; ms")
    lines = [("pass", "ranks", "tokens a rank", "local", "pair", "all-gather", "fold", "all", "MiB received")]
    for mode in LOCAL_MS:
        for ranks in (8, 64):
            for tokens in (8192, 32768, 131072):
                parts = model(ranks, tokens, mode)
                received = (ranks - 1) * pair_bytes(MODEL_HV, MODEL_D, MODEL_D, ranks - 1) / 2**20
                numbers = [f"{x:.2f}" for x in (*parts.values(), sum(parts.values()))]
                lines.append((mode, str(ranks), str(tokens), *numbers, f"{received:.0f}"))
    print_table(lines)


def print_table(lines: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.rjust, line, widths)), flush=True)


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def slowest_ms(call: Callable[[], object], device: str, rounds: int) -> float:
    """Median over the rounds, of the rank that takes longest; ranks begin together."""
    times = []
    for i in range(rounds + 2):
        settle(device)
        dist.barrier()
        start = time.perf_counter()
        call()
        settle(device)
        if i >= 2:
            times.append((time.perf_counter() - start) * 1e3)
    slowest = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def step(operator: str, args: dict, backward: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o, and dv of its sum of squares."""
    args = {**args, "v": args["v"].detach().requires_grad_(backward)}
    with torch.set_grad_enabled(backward):
        o, _ = OPERATORS[operator][0](**args)
    dv = torch.autograd.grad(o.float().square().sum(), args["v"])[0] if backward else None
    return o.detach(), dv


def gate(operator: str, args: dict, own: dict, backward: bool, rank: int) -> None:
    """This rank's o and dv against those of one process.

    Raises:
        ArithmeticError: one is off.
    """
    for name, x, whole in zip(("o", "dv"), step(operator, own, backward), step(operator, args, backward), strict=True):
        if x is not None:
            error = rel_l2(x, whole.chunk(dist.get_world_size(), 1)[rank])
            if not error <= LIMIT:
                raise ArithmeticError(f"{name} of rank {rank} is off by {error:.2e}")


def measure(rank: int, operator: str, tokens: int, options: argparse.Namespace, device: str) -> list[dict]:
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    H, HV, D = options.heads[0], options.heads[1], options.head_dim
    args = OPERATORS[operator][1](H=H, HV=HV, K=D, V=D, lengths=[tokens * ranks], T=tokens * ranks, device=device)
    context = build_cp_context(args["cu_seqlens"])
    cut = {x: args[x].chunk(ranks, 1)[rank].contiguous() for x in ("q", "k", "v", "g", "beta")}
    own = {**args, **cut, "cu_seqlens": None, "cp_context": context}
    sent = pair_bytes(HV, D, D, context.most_num_ranks)
    exchange_ms = slowest_ms(lambda: exchange(context, sent, device), device, options.rounds) if sent else 0.0
    rows = []
    for mode in ("forward",) if operator == "kda" else ("forward", "training"):
        backward = mode == "training"
        gate(operator, args, own, backward, rank)
        ms = slowest_ms(lambda backward=backward: step(operator, own, backward), device, options.rounds)
        received = (ranks - 1) * sent * (1 + backward)
        row = (operator, mode, ranks, tokens, dist.get_backend(), ms, exchange_ms * (1 + backward), received / 2**20)
        rows.append(dict(zip(COLUMNS, row, strict=True)) | {"heads": [H, HV], "head_dim": D})
    return rows


def exchange(context: CPContext, sent: int, device: str) -> None:
    """The all-gather of a pass, of as many bytes."""
    all_gather(torch.zeros(1, sent // 4, device=device), context.group)


def worker(rank: int, ranks: int, folder: Path, options: argparse.Namespace) -> None:
    gpus = torch.cuda.device_count()
    device = "cuda" if gpus else "cpu"
    if gpus:
        torch.cuda.set_device(rank % gpus)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if gpus >= ranks else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    rows = [row for tokens in options.tokens for row in measure(rank, options.operator, tokens, options, device)]
    if rank == 0:
        torch.save(rows, folder / "rows")
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="a rank")
    parser.add_argument("--heads", type=int, nargs=2, default=[16, 32], metavar=("H", "HV"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--operator", choices=OPERATORS, default="gdn")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="a JSONL file to append the rows to")
    parser.add_argument("--model", action="store_true", help="print the model of 8 and 64 GPUs, and measure nothing")
    options = parser.parse_args()
    if options.model:
        print_model()
        return 0

    rows = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            try:
                torch.multiprocessing.spawn(worker, (ranks, folder, options), nprocs=ranks)
            except (
                torch.multiprocessing.ProcessRaisedException,
                torch.multiprocessing.ProcessExitedException,
            ) as error:
                print(f"{ranks} ranks are not timed: {error}")
                return 1
            rows += torch.load(folder / "rows")
    commit, gpu = report.current_commit(), torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if options.out:
        report.append(options.out, [{**row, "gpu": gpu, "torch": torch.__version__, "commit": commit} for row in rows])
    cells = [[f"{x:.3f}" if isinstance(x, float) else str(x) for x in map(row.get, COLUMNS)] for row in rows]
    print_table([COLUMNS, *map(tuple, cells)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
