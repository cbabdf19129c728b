"""The profile of a call: what is timed, how repeats are told apart, and what the command makes of it."""

import json
import sys

import pytest
import torch

from flash_qla_tl import get_workspace_size
from flash_qla_tl import profile as command
from flash_qla_tl.costs import OPS, Workload
from flash_qla_tl.utils import profile
from flash_qla_tl.utils.profile import _by_launch


def matmuls(a, b):
    return (a @ b) @ b


def test_operators_on_the_cpu():
    a = torch.randn(96, 96)
    times = profile(matmuls, (a, a), wait=1, warmup=1, rep=3)
    assert times["aten::mm"] > 0
    # Neither the profiler's own steps nor the Python time between operators.
    assert not any("ProfilerStep" in name for name in times)
    total = times.pop("total")
    assert total == pytest.approx(sum(times.values()))


@pytest.mark.parametrize("inputs", [(3, 4), [3, 4], {"a": 3, "b": 4}])
def test_inputs_and_number_of_calls(inputs):
    calls = []
    profile(lambda a, b: calls.append((a, b)), inputs, wait=2, warmup=3, rep=4)
    assert calls == [(3, 4)] * 9


def test_time_is_that_of_one_call():
    a = torch.randn(256, 256)
    once = profile(lambda: a @ a, wait=2, warmup=2, rep=5)["aten::mm"]
    ten = profile(lambda: [a @ a for _ in range(10)], wait=2, warmup=2, rep=5)["aten::mm"]
    # A loaded machine is noisy: far from 10, and farther from 1.
    assert ten > 2 * once


def test_repeats_within_a_call():
    # Two calls: "a" twice in each, "b" once, "c" three times in all.
    launches = [("a", 1), ("b", 10), ("a", 2), ("c", 5), ("a", 3), ("b", 20), ("a", 4), ("c", 5)]
    launches.append(("c", 5))
    assert _by_launch(launches, 2) == {"a#1": 4, "a#2": 6, "b": 30, "c": 15}


@pytest.mark.parametrize("counts", [(-1, 0, 1), (0, -1, 1), (0, 0, 0)])
def test_counts_are_checked(counts):
    with pytest.raises(ValueError, match="wait, warmup and rep must be at least 0, 0 and 1"):
        profile(lambda: None, (), *counts)


@pytest.mark.gpu
def test_kernels_on_the_gpu():
    a = torch.randn(2048, 2048, device="cuda")
    times = profile(matmuls, (a, a), wait=5, warmup=5, rep=10)
    # Both products run the same kernel, at least 2 * 2 * 2048**3 FLOP at no more than 1 PFLOP/s.
    assert any(name.endswith("#1") for name in times) and any(n.endswith("#2") for n in times)
    assert not any(name.startswith("aten::") for name in times)
    assert 0.03 < times["total"] < 10


def run_command(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["profile", *args])
    return command.main()


@pytest.mark.parametrize("op", OPS)
def test_command_on_the_cpu(op, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "profile.json"
    args = ["--op", op, "--seqlens", "2x70,3", "--heads", "1,2", "--head-dim", "16", "--norm", "--gate", "--rep", "1"]
    assert run_command(monkeypatch, *args, "--json", str(path)) == 0
    first, _, header, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{op} 2x70+1x3 (1,2) K=16 V=16 bfloat16, cpu")
    assert header.split() == ["ms", "share"] and any("aten::" in row for row in rows)
    name, ms, share = rows[-1].split()
    found = json.loads(path.read_text())
    assert name == "total" and share == "100.0%" and float(ms) == pytest.approx(found["ms"], abs=1e-4)
    assert found["ms"] == pytest.approx(sum(kernel["ms"] for kernel in found["kernels"]))
    assert found["seqlens"] == [70, 70, 3] and found["norm"] and found["gate"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--heads", "1,2,3"], "--heads takes one number or two"),
        (["--heads", "2,3"], "HV"),
        (["--rep", "0"], "rep must be at least 0, 0 and 1, got 0, 0 and 0"),
        (["--seqlens", "8192,0"], "expected numbers as in 8192,300 or 8x1024, got '8192,0'"),
        (["--seqlens", "long"], "expected numbers as in 8192,300 or 8x1024, got 'long'"),
    ],
)
def test_command_refuses(args, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit:
        run_command(monkeypatch, *args)
    assert exit.value.code == 2 and message in capsys.readouterr().err


FOUND = {
    "op": "gdn_fwd",
    "seqlens": [8192],
    "H": 16,
    "HV": 32,
    "K": 128,
    "V": 128,
    "dtype": "bfloat16",
    "device": "a GPU",
    "ms": 0.2,
    "floor_ms": 0.05,
    "kernels": [
        {"name": "gdn_chunk_fwd_kernel", "ms": 0.15, "bytes": 3 * 10**8, "flop": 3 * 10**10, "floor_ms": 0.1},
        {"name": "fill", "ms": 0.05},
    ],
}


def test_table():
    header, *rows = (line.split() for line in command.table(FOUND).splitlines())
    assert header == ["ms", "share", "TB/s", "TFLOP/s", "floor", "x", "floor"]
    assert rows[0] == ["gdn_chunk_fwd_kernel", "0.1500", "75.0%", "2.00", "200", "0.1000", "1.50"]
    assert rows[1:] == [["fill", "0.0500", "25.0%"], ["total", "0.2000", "100.0%", "0.0500", "4.00"]]


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    command.plot(FOUND, tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")


def test_kernels_do_the_work_of_their_operator():
    """They multiply no less, and move no less, than the operator has to; a forward without shared heads just as much."""
    kernels_of = {
        "gdn_fwd": ("gdn_chunk_intra", "gdn_chunk_fwd"),
        "gdn_bwd": ("gdn_chunk_states", "gdn_chunk_bwd"),
        "kda_fwd": ("kda_prepare", "kda_state_loop"),
    }
    work = Workload([8192, 100], 8, 8)
    costs = work.kernels()
    for op, names in kernels_of.items():
        flop, moved = (sum(getattr(costs[name], x) for name in names) for x in ("flop", "bytes"))
        assert moved > work.floor(op).bytes
        if op == "gdn_bwd":
            # P, T and the states are made again.
            assert work.floor(op).flop < flop < 1.2 * work.floor(op).flop
        else:
            assert flop == work.floor(op).flop


def test_kda_kernels_move_the_workspace():
    """One writes it, the other reads it: what a chunk more adds to both is twice its part, and its inputs and outputs."""
    one, two = (Workload([64 * n], 1, 1).kernels() for n in (1, 2))
    moved = sum(two[name].bytes - one[name].bytes for name in ("kda_prepare", "kda_state_loop"))
    chunk = get_workspace_size(128, 1) - get_workspace_size(64, 1)
    inputs = 64 * (4 * 128 + 128 + 1) * 2  # q k v o, g beta
    assert moved == 2 * chunk + inputs


def test_activations_cost_what_is_inside():
    norm, gate, both = (Workload([100], 1, 2).kernels(*x) for x in ((True, False), (False, True), (True, True)))
    for name in ("gdn_activations_fwd", "gdn_activations_bwd"):
        assert norm[name].bytes + gate[name].bytes == both[name].bytes and gate[name].bytes > 0


def test_unknown_operator():
    with pytest.raises(ValueError, match="op must be one of gdn_fwd, gdn_bwd, kda_fwd, got 'fwd'"):
        Workload([64], 1, 1).floor("fwd")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "flags", "launches"),
    [
        ("gdn_fwd", [], ["gdn_chunk_intra", "gdn_chunk_fwd"]),
        ("gdn_fwd", ["--norm", "--gate"], ["gdn_chunk_intra", "gdn_chunk_fwd"]),
        ("gdn_bwd", [], ["gdn_chunk_states", "gdn_chunk_bwd"]),
        (
            "gdn_bwd",
            ["--norm", "--gate"],
            ["gdn_activations_fwd", "gdn_chunk_states", "gdn_chunk_bwd", "gdn_activations_bwd"],
        ),
        ("kda_fwd", [], ["kda_prepare", "kda_state_loop"]),
    ],
)
def test_command_on_the_gpu(op, flags, launches, monkeypatch, capsys, tmp_path):
    """Every kernel has its counts, and none is faster than the card."""
    path = tmp_path / "profile.json"
    args = ["--op", op, "--seqlens", "8192", "--heads", "16,32", *flags, "--rep", "20", "--json", str(path)]
    assert run_command(monkeypatch, *args) == 0
    print(capsys.readouterr().out)
    ours = [kernel for kernel in json.loads(path.read_text())["kernels"] if "bytes" in kernel]
    assert len(ours) == len(launches)
    for kernel, beginning in zip(ours, launches, strict=True):
        assert kernel["name"].startswith(beginning)
        assert kernel["ms"] > 0.9 * kernel["floor_ms"]
