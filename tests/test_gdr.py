"""The gated delta rule over sets of shapes: accuracy against a reference and FLA, speed over FLA.

    python tests/test_gdr.py --set varlen --num-heads 32

Under pytest: a small case on the CPU, and with a Hopper GPU the shortest cases of the sets.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

# pytest adds this folder by pyproject.toml.
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmark"))

import report
from shapes import SETS, Shape, shapes

from flash_qla_tl import chunk_gated_delta_rule, reference
from flash_qla_tl.testing import CAP, rel_l2

LEAVES = ("q", "k", "v", "g", "beta", "initial_state")
NAMES = ("o", "ht", "dq", "dk", "dv", "dg", "db", "dh0")
# The torch path in float64 stands for the recurrence on longer sequences; the tests hold the two
# together, and the recurrence takes a kernel launch or ten for each token.
RECURRENT_TOKENS = 512


def results(
    rule: Callable, args: dict, backward: bool, dtype: torch.dtype | None = None
) -> tuple[dict[str, Tensor], Callable | None]:
    """Outputs, and with ``backward`` the gradients of a fixed functional of them, by name.

    Also the call that computes the gradients anew.
    """
    leaves = {name: args[name].to(dtype or args[name].dtype) for name in LEAVES}
    if backward:
        leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    outputs = rule(**{**args, **leaves})
    if not backward:
        return dict(zip(NAMES, outputs, strict=False)), None
    # Random, and the same for every implementation.
    generator = torch.Generator(outputs[0].device).manual_seed(0)
    weights = [torch.empty(x.shape, device=x.device).normal_(generator=generator) for x in outputs]
    weights = [w.to(args["v"].dtype).to(x.dtype) for w, x in zip(weights, outputs, strict=True)]
    gradients = functools.partial(torch.autograd.grad, outputs, list(leaves.values()), weights, retain_graph=True)
    return dict(zip(NAMES, [*outputs, *gradients()], strict=True)), gradients


def case(
    shape: Shape,
    device: str,
    *,
    backward: bool,
    auto_cp: bool,
    reference_dtype: torch.dtype = torch.float64,
    fla: Callable | None = None,
    timed: bool = False,
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Errors by implementation and name, and FLA's time over ours for "fwd" and "bwd"."""
    torch.manual_seed(0)
    args = shape.inputs(device)
    if max(shape.seqlens) <= RECURRENT_TOKENS:
        rule = reference.gated_delta_rule
    else:
        rule = functools.partial(chunk_gated_delta_rule, output_final_state=True, backend="torch")
    exact, _ = results(rule, args, backward, reference_dtype)

    rules = {report.OURS: functools.partial(chunk_gated_delta_rule, output_final_state=True, auto_cp=auto_cp)}
    if fla is not None:
        rules["fla"] = functools.partial(fla, output_final_state=True)
    errors, times = {}, {}
    for name, rule in rules.items():
        try:
            found, gradients = results(rule, args, backward)
        except Exception as error:  # FLA's backward is refused by some versions of Triton
            if name == report.OURS:
                raise
            print(f"{shape}: {name} is left out: {type(error).__name__}: {error}")
            continue
        errors[name] = {x: rel_l2(tensor, exact[x]) for x, tensor in found.items()}
        if timed:
            calls = {"fwd": functools.partial(rule, **args)}
            if backward:
                calls["bwd"] = gradients
            times[name] = {x: report.median_ms([call], device) for x, call in calls.items()}
    speedups = {}
    if "fla" in times:
        speedups = {x: times["fla"][x] / ms for x, ms in times[report.OURS].items()}
    return errors, speedups


def import_fla() -> Callable | None:
    """FLA's rule where it runs; it needs Triton and a GPU."""
    if not torch.cuda.is_available():
        return None
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fla
    except ImportError:
        return None
    return fla


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=SETS, default="develop")
    parser.add_argument("--num-heads", type=int, default=32, help="HV where a set names no heads")
    parser.add_argument("--ref-dtype", choices=("float32", "float64"), default="float64", help="of the reference")
    parser.add_argument("--no-cp", action="store_true", help="never split a sequence")
    parser.add_argument("--skip-bwd", action="store_true", help="the forward only")
    parser.add_argument("--hide-acc", action="store_true", help="do not print accuracy")
    parser.add_argument("--max-tokens", type=int, help="leave out cases with more tokens")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    fla = import_fla()
    if fla is None:
        print("FLA does not run here: no comparison with it")
    wrong = False
    for shape in shapes(options.set, options.num_heads):
        if options.max_tokens is not None and shape.tokens > options.max_tokens:
            print(f"{shape}: left out, more than {options.max_tokens} tokens")
            continue
        errors, speedups = case(
            shape,
            device,
            backward=not options.skip_bwd,
            auto_cp=not options.no_cp,
            reference_dtype=getattr(torch, options.ref_dtype),
            fla=fla,
            timed=fla is not None,
        )
        faster = ", ".join(f"{name} {x:.2f}x as fast as FLA" for name, x in speedups.items())
        print(f"{shape}{': ' if faster else ''}{faster}", flush=True)
        if not options.hide_acc:
            for name, found in errors.items():
                print(f"  {name:4}", *(f"{x} {error:.1e}" for x, error in found.items()))
        wrong |= not all(error <= CAP for error in errors[report.OURS].values())
    if wrong:
        print(f"ours is off by more than {CAP} somewhere")
    return int(wrong)


SMALL = [
    Shape((100, 3, 64), 1, 2, 64, 64),  # packed: a tail, less than a chunk, a whole one
    Shape((65, 65), 2, 2, 64, 32, packed=False),  # dense: a chunk of one token, K other than V
]


@pytest.mark.parametrize("backward", [False, True], ids=["fwd", "fwd_bwd"])
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_small(shape, backward):
    errors, speedups = case(shape, "cpu", backward=backward, auto_cp=True)
    assert set(errors[report.OURS]) == set(NAMES if backward else NAMES[:2]) and not speedups
    assert all(error <= CAP for error in errors[report.OURS].values())


@pytest.mark.parametrize("runs", [True, False])
def test_beside_another(runs, capsys):
    """Errors and times of both; one that fails costs ours nothing."""

    def other(**given):
        if not runs:
            raise RuntimeError("not with this compiler")
        return chunk_gated_delta_rule(**given)

    errors, speedups = case(SMALL[0], "cpu", backward=True, auto_cp=True, fla=other, timed=True)
    if runs:
        assert errors["fla"] == errors[report.OURS] and set(speedups) == {"fwd", "bwd"}
    else:
        assert list(errors) == [report.OURS] and not speedups
        assert "fla is left out: RuntimeError: not with this compiler" in capsys.readouterr().out


def test_references_agree():
    """Either side of the length at which another reference takes over."""
    args = Shape((70, 60), 1, 2, 64, 64).inputs("cpu")
    rule = functools.partial(chunk_gated_delta_rule, output_final_state=True, backend="torch")
    chunked, _ = results(rule, args, True, torch.float64)
    recurrent, _ = results(reference.gated_delta_rule, args, True, torch.float64)
    assert all(rel_l2(chunked[name], recurrent[name]) < 1e-12 for name in NAMES)


def test_script(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["", "--set", "smoke", "--skip-bwd", "--max-tokens", "195"])
    assert main() == 0
    out = capsys.readouterr().out
    assert "1x130+1x70 (2,4): left out, more than 195 tokens" in out
    assert "2x96 (1,1) dense\n  ours o 1." in out


@pytest.mark.gpu
@pytest.mark.parametrize("auto_cp", [True, False], ids=["cp", "no_cp"])
@pytest.mark.parametrize(
    "shape",
    [
        *shapes("varlen", 12)[:1],  # sequences shorter than a chunk
        *shapes("varlen", 12)[-1:],  # packed at random places
        *shapes("profile", 12)[:1],  # long enough to split
        *shapes("product", 12)[:1],  # many lengths
    ],
    ids=str,
)
def test_sets_on_the_gpu(shape, auto_cp):
    # Their backward in float64 takes longest: the long ones are tried without.
    errors, _ = case(shape, "cuda", backward=shape.tokens <= 1024, auto_cp=auto_cp)
    assert all(error <= CAP for error in errors[report.OURS].values())


@pytest.mark.gpu
def test_computes_what_fla_computes():
    """Another implementation that is right, on one shape: it compiles and tunes anew for each."""
    fla = import_fla()
    if fla is None:
        pytest.skip("fla-core is not installed")
    errors, _ = case(shapes("varlen", 12)[0], "cuda", backward=False, auto_cp=True, fla=fla)
    assert all(error <= 0.02 for error in errors["fla"].values())


if __name__ == "__main__":
    sys.exit(main())
