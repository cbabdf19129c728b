"""``python -m flash_qla_tl.warmup``: compiles the kernels before a call needs them.

Into TileLang's cache on disk, ``TILELANG_CACHE_DIR``, from which other processes, containers and machines then load
them: what a kernel is compiled for is spelled out, and no fact of the compiling machine is in the cache's keys. A GPU is
not needed, nvcc and a C++ compiler are.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flash_qla_tl.costs import OPS
from flash_qla_tl.kernels.common.target import DTYPES, HEAD_DIMS, TARGET, ReadOnlyCache, compiled

ARCH = TARGET["arch"]


@dataclass(frozen=True)
class Variant:
    """One kernel as it is compiled: a builder and what it is given."""

    ops: tuple[str, ...]  # whose calls it serves
    kernel: str
    build: Callable
    args: tuple
    dtype: str
    head_dims: tuple[int, ...]

    @property
    def name(self) -> str:
        return " ".join((self.kernel, *map(str, self.args)))


class Result(NamedTuple):
    seconds: float
    outcome: str  # "compiled", "cached", or else the error


def variants() -> list[Variant]:
    """Every variant that a call can reach, the slowest to compile first."""
    from flash_qla_tl.kernels.common import segment_starts
    from flash_qla_tl.kernels.gated_delta_rule import (
        activations,
        chunk_bwd,
        chunk_fwd,
        chunk_intra,
        chunk_states,
        segment_states,
    )
    from flash_qla_tl.kernels.kda import prepare, state_loop
    from flash_qla_tl.kernels.kda import segment_states as kda_segment_states

    gdn, bwd, kda = ("gdn_fwd",), ("gdn_bwd",), ("kda_fwd",)
    found = []
    for kernel, module in (("chunk_bwd", chunk_bwd), ("chunk_states", chunk_states)):
        found += [Variant(bwd, kernel, module.build, (c,), c.dtype, (c.K, c.V)) for c in module.configs()]
    found += [Variant(gdn, "chunk_fwd", chunk_fwd.build, (c,), c.dtype, (c.K,)) for c in chunk_fwd.configs()]
    for kernel, module in (("kda_prepare", prepare), ("kda_state_loop", state_loop)):
        found += [Variant(kda, kernel, module.build, (c,), c.dtype, (128,)) for c in module.configs()]
    for dtype in DTYPES:
        found += [Variant(kda, "kda_segment_states", kda_segment_states.build, (dtype,), dtype, (128,))]
        for kernel, build in (("activations_fwd", activations.build_fwd), ("activations_bwd", activations.build_bwd)):
            found += [Variant(bwd, kernel, build, (dtype,), dtype, ())]
        for K in HEAD_DIMS:
            starts = (*gdn, *kda) if K == 128 else gdn
            found += [
                Variant(ops, kernel, build, (K, dtype), dtype, (K,))
                for ops, kernel, build in (
                    (gdn, "chunk_intra", chunk_intra.build),
                    (gdn, "segment_states", segment_states.build),
                    (starts, "segment_starts", segment_starts.build),
                )
            ]
    return found


def chosen(
    ops: Iterable[str] = OPS, dtypes: Iterable[str] = DTYPES, head_dims: Iterable[int] = HEAD_DIMS
) -> list[Variant]:
    """The variants of these operators, dtypes and head dims. A backward comes with the forward it follows."""
    ops = {*ops, "gdn_fwd"} if "gdn_bwd" in ops else set(ops)
    return [
        v for v in variants() if ops.intersection(v.ops) and v.dtype in dtypes and set(v.head_dims) <= set(head_dims)
    ]


def warm_up(names: list[str], jobs: int) -> Iterable[tuple[str, Result]]:
    """Compiles the variants of these names, ``jobs`` processes at once -> each as it is done."""
    # Lowering is Python, hence processes; fresh ones, for a fork of a process with threads may hang.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _quiet) as pool:
        tasks = {pool.submit(_compile, name): name for name in names}
        for task in as_completed(tasks):
            died = task.exception()
            yield tasks[task], task.result() if died is None else Result(0.0, str(died))


def _quiet() -> None:
    """A process that compiles takes no memory of a GPU, and leaves the progress bar alone."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")


def _compile(name: str) -> Result:
    variant = next(v for v in variants() if v.name == name)
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            # What cannot be kept is compiled in vain.
            warnings.simplefilter("error", ReadOnlyCache)
            kernel = compiled(variant.build, *variant.args)
        # A kernel from the cache comes without what the compiler made on the way.
        outcome = "cached" if kernel.artifact is None else "compiled"
    except Exception as error:  # as text: not all of TileLang's survive the way to another process
        outcome = f"{type(error).__name__}: {error}"
    return Result(time.perf_counter() - start, outcome)


def _arch_of_this_gpu() -> str:
    if not torch.cuda.is_available():
        raise ValueError(f"there is no GPU here whose architecture would be meant: name it, --arch {ARCH}")
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        found = ".".join(map(str, capability))
        raise ValueError(
            f"the kernels need a GPU of compute capability 9.0, this one has {found}; for another, --arch {ARCH}"
        )
    return ARCH


def main() -> int:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="python -m flash_qla_tl.warmup", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", choices=(ARCH,), help="default: that of this machine's GPU")
    parser.add_argument("--op", nargs="+", choices=OPS, default=OPS, help="default: all; gdn_bwd includes gdn_fwd")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES, help="of q, k and v; default: all")
    parser.add_argument(
        "--head-dim",
        nargs="+",
        type=int,
        choices=HEAD_DIMS,
        default=HEAD_DIMS,
        help="that K and V may have; default: all",
    )
    parser.add_argument("--jobs", type=int, default=min(cores, 16), help="processes; default: one a core, at most 16")
    parser.add_argument("--list", action="store_true", help="print the variants' names, and compile nothing")
    options = parser.parse_args()
    names = [v.name for v in chosen(options.op, options.dtype, options.head_dim)]
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    if not names:
        parser.error(f"{' and '.join(options.op)} have no kernel for head dims of {options.head_dim}")
    if options.list:
        print(*names, sep="\n")
        return 0
    try:
        arch = options.arch or _arch_of_this_gpu()
    except ValueError as error:
        parser.error(str(error))

    from tilelang.env import env
    from tqdm import tqdm

    if not env.is_cache_enabled():
        parser.error("there is no cache to fill: TILELANG_DISABLE_CACHE is set")
    start = time.perf_counter()
    results = dict(tqdm(warm_up(names, options.jobs), total=len(names), desc=arch, unit="kernel"))
    outcomes = {name: result.outcome for name, result in results.items()}
    errors = {error for error in outcomes.values() if error not in ("compiled", "cached")}
    width = max(map(len, names))
    for name in names:
        outcome = "failed" if outcomes[name] in errors else outcomes[name]
        print(f"{name:{width}}{results[name].seconds:8.1f} s  {outcome}")
    counts = [list(outcomes.values()).count(x) for x in ("compiled", "cached")]
    print(
        f"{len(names)} variants for {arch} in {time.perf_counter() - start:.0f} s: {counts[0]} compiled, "
        f"{counts[1]} cached, {len(names) - sum(counts)} failed; in {env.TILELANG_CACHE_DIR}"
    )
    for error in errors:
        print(f"\n{error}", file=sys.stderr)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
