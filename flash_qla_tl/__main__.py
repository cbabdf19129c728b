"""``python -m flash_qla_tl``: the gated delta rule on the device at hand, checked and timed."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

import flash_qla_tl
from flash_qla_tl import reference
from flash_qla_tl.kernels.common import target
from flash_qla_tl.testing import budget, emulated, gradient_budget, inputs, rel_l2

LENGTHS = [190, 3, 319]  # a tail, less than a chunk, and chunks that a last token misses
OUTPUTS = ("o", "final_state")
LEAVES = ("q", "k", "v", "g", "beta", "initial_state")
Outputs = tuple[Tensor, Tensor]


def results(outputs: Outputs, leaves: dict[str, Tensor], weights: Outputs) -> dict[str, Tensor]:
    """Outputs and the gradients of their weighted sum, by the names in the table."""
    weights = [w.to(x.dtype) for x, w in zip(outputs, weights, strict=True)]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), weights, retain_graph=True)
    names = [*OUTPUTS, *(f"d{name}" for name in leaves)]
    return dict(zip(names, (*outputs, *gradients), strict=True))


def milliseconds(fn: Callable) -> float:
    fn()
    threads = torch.get_num_threads()
    timer = Timer("fn()", globals={"fn": fn}, num_threads=threads)
    return timer.blocked_autorange(min_run_time=0.2).median * 1e3


def main() -> int:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args = inputs(H=2, HV=4, K=128, lengths=LENGTHS, h0_dtype=torch.float32, device=device)
    q, k, v, h0 = (args[name] for name in ("q", "k", "v", "initial_state"))
    refusal = target.refusal(q, k, v)
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    print(f"flash_qla_tl {flash_qla_tl.__version__}, torch {torch.__version__}, {name}")
    if refusal is None:
        print("forward and backward: Hopper kernels, compiled on first use")
    else:
        print(f"forward and backward: torch ({refusal})")
    dtype = str(q.dtype).removeprefix("torch.")
    print(f"q, k {list(q.shape)}, v {list(v.shape)} {dtype}, packed sequences of {LENGTHS} tokens\n")

    def with_leaves(dtype: torch.dtype | None = None) -> tuple[dict, dict]:
        leaves = {x: args[x].detach().to(dtype or args[x].dtype).requires_grad_() for x in LEAVES}
        return {**args, **leaves}, leaves

    weights = torch.randn_like(v), torch.randn_like(h0)
    ours_args, ours_leaves = with_leaves()
    forward = partial(flash_qla_tl.chunk_gated_delta_rule, **ours_args, output_final_state=True)
    outputs = forward()
    ours = results(outputs, ours_leaves, weights)
    exact_args, exact_leaves = with_leaves(torch.float64)
    exact = results(reference.gated_delta_rule(**exact_args), exact_leaves, weights)
    emulation_args, emulation_leaves = with_leaves()
    emulation = results(emulated(**emulation_args), emulation_leaves, weights)

    wrong = []
    print(f"{'':14}{'rel. error':>10}{'budget':>10}")
    for name, x in ours.items():
        allowed = budget if name in OUTPUTS else partial(gradient_budget, name.removeprefix("d"))
        error, limit = rel_l2(x, exact[name]), allowed(emulation[name], exact[name])
        print(f"{name:14}{error:10.5f}{limit:10.5f}")
        if not error <= limit:  # NaN is wrong too
            wrong.append(name)
    print(f"\n{'':14}{'ms a call':>10}")
    print(f"{'forward':14}{milliseconds(forward):10.3f}")
    backward = partial(results, outputs, ours_leaves, weights)
    print(f"{'backward':14}{milliseconds(backward):10.3f}")
    if wrong:
        print(f"\nover budget: {', '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
