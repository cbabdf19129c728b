"""The benchmark where it needs no GPU: workloads, floors, rows, tables, regressions, a smoke run."""

import itertools
import json
import sys
from pathlib import Path

import bench_cp
import bench_gated_delta_rule as bench
import bench_kda
import pytest
import report
import torch
from shapes import KDA, PREFILL, SETS, SMOKE, TRAINING, Shape, random_lengths, shapes

from flash_qla_tl import chunk_gated_delta_rule

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", SETS)
def test_sets_hold_valid_shapes(name):
    for shape in shapes(name, num_heads=8):
        assert shape.HV % shape.H == 0 and min(shape.seqlens) > 0
        assert shape.packed or len(set(shape.seqlens)) == 1
    assert len(set(map(str, shapes(name)))) == len(shapes(name))


def test_unknown_set():
    with pytest.raises(ValueError, match="set must be one of prefill, .* got 'nosuch'"):
        shapes("nosuch")


def test_num_heads_is_for_sets_that_name_none():
    assert {(s.H, s.HV) for s in shapes("profile", 12)} == {(6, 12)}
    assert shapes("develop", 12) == shapes("develop", 32)


def test_served_packings_are_whole():
    assert {shape.tokens for shape in shapes("product")} == {16384}


def test_random_lengths():
    lengths = random_lengths(1000, 7)
    assert len(lengths) == 7 and sum(lengths) == 1000 and min(lengths) > 0
    assert lengths == random_lengths(1000, 7)


@pytest.mark.parametrize(
    ("shape", "mode", "floor"),
    [
        (Shape((32768,), 16, 64), "fwd", 32768 * 10.49e6 / 790e9),  # products
        (Shape((8192,), 16, 32), "bwd", 4096 * 31.5e6 / 790e9),
        # Chunks are whole: 63 sequences of one token multiply as much as 63 chunks.
        (Shape((1,) * 1000, 12, 12), "fwd", None),
        (Shape((64,) * 1000, 12, 12, packed=False), "fwd", None),
    ],
)
def test_floor(shape, mode, floor):
    if floor is None:
        # Short sequences: the states' traffic, 2 x 64 KB a head, is most of it.
        states = 2 * len(shape.seqlens) * shape.HV * 65536 / 4.25e9
        assert states < shape.floor_ms(mode) < 1.6 * states
    else:
        assert shape.floor_ms(mode) == pytest.approx(floor, rel=2e-3)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (Shape((32768,), 2, 8), "1x32768 (2,8)"),
        (Shape((28672, 4096), 16, 64), "1x28672+1x4096 (16,64)"),
        (Shape((96, 96), 1, 1, packed=False), "2x96 (1,1) dense"),
        (Shape((1, 2, 3, 4), 1, 1), "4 of 10 (1,1)"),
    ],
)
def test_shapes_have_names(shape, name):
    assert str(shape) == name


def row(shape=PREFILL[0], mode="fwd", gpu="NVIDIA H200", **ms):
    return {**report.make_row(shape, mode, ms, {name: 0.003 for name in ms}, "abc1234"), "gpu": gpu}


def test_rows_survive_a_file(tmp_path):
    path = tmp_path / "results" / "h200.jsonl"
    report.append(path, [row(ours=1.0), row(PREFILL[1], ours=0.3)])
    report.append(path, [row(ours=0.9, fla=3.0)])
    rows = report.read(path)
    assert [r["ms"] for r in rows] == [{"ours": 0.9, "fla": 3.0}, {"ours": 0.3}]
    assert report.shape_of(rows[0]) == PREFILL[0]
    assert rows[0]["commit"] == "abc1234" and rows[0]["versions"]["torch"]
    assert report.read(tmp_path / "none.jsonl") == []


def test_regressions_are_of_the_same_gpu_mode_and_shape():
    recorded = [row(ours=1.0), row(mode="bwd", ours=3.0), row(gpu="NVIDIA H100", ours=2.0)]
    assert report.regressions([row(ours=1.049)], recorded) == []
    assert report.regressions([row(PREFILL[1], ours=9.0)], recorded) == []
    assert report.regressions([row(gpu="NVIDIA H100", ours=2.05)], recorded) == []
    assert report.regressions([row(mode="bwd", ours=3.2), row(ours=1.06)], recorded) == [
        "bwd 1x32768 (16,64): 3.2000 ms, recorded 3.0000 ms",
        "fwd 1x32768 (16,64): 1.0600 ms, recorded 1.0000 ms",
    ]


def test_recorded_peers_cover_the_recorded_workloads():
    rows = [row(shape, "fwd", ours=1.0) for shape in PREFILL]
    rows += [row(shape, "bwd", ours=1.0) for shape in TRAINING]
    results = report.results_file("NVIDIA H200")
    for found in report.with_recorded_peers(rows, results):
        assert "flash_qla_0_1_3" in found["recorded_ms"]
    for found in report.with_recorded_peers([row(shape, "kda_fwd", ours=1.0) for shape in KDA], results):
        assert found["recorded_ms"]
    published = report.results_file("NVIDIA H200", published=True)
    for found in report.with_recorded_peers([row(shape, ours=1.0) for shape in shapes("published")], published):
        assert len(found["recorded_ms"]) == 3
    assert report.with_recorded_peers([row(ours=1.0)], report.results_file("cpu"))[0]["recorded_ms"] == {}


def test_table():
    rows = report.with_recorded_peers(
        [row(ours=0.5, fla=2.0), row(Shape((64,), 1, 1), fla=0.1)], report.results_file("NVIDIA H200")
    )
    lines = report.table(rows).splitlines()
    header, first, second = (line.split() for line in lines[:3])
    assert header[:6] == ["ms", "floor", "ours", "x", "floor", "fla"]
    assert first[:6] == ["1x32768", "(16,64)", "0.435", "0.5000", "1.15", "2.0000"]
    assert first[-1] == "2.74"  # the best is flashinfer_0_6_18's 1.3702
    assert second[:5] == ["1x64", "(1,1)", "0.000", "-", "-"]
    assert lines[-1] == "geometric mean of best/ours: 2.740"
    # Columns of numbers end where their names end.
    assert lines[0].index("ours") + len("ours") == lines[1].index("0.5000") + len("0.5000")


def test_table_of_memory():
    """Kept and peak of every package that was measured, behind the times."""
    shape = TRAINING[0]
    rows = [
        {**row(shape, "step", ours=0.7, fla=2.0), "mib": {"ours": [33.0, 483.4]}},
        row(TRAINING[1], "step", ours=2.9),
    ]
    header, first, second, note, _ = report.table(rows).splitlines()
    assert header.split()[-3:] == ["best/ours", "MiB", "ours"]
    assert first.split()[-4:] == ["2.86", "33", "/", "483"] and second.split()[-2:] == ["-", "-"]
    assert note.startswith("MiB: kept for the backward")
    recorded = report.make_row(shape, "step", {"ours": 0.7}, {"ours": 0.006}, "abc", {"ours": [33.0, 483.4]})
    assert recorded["mib"] == {"ours": [33.0, 483.4]} and recorded["floor_ms"] == pytest.approx(0.218, abs=1e-3)


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plots" / "fwd.png"
    rows = [row(ours=0.5, fla=2.0), row(PREFILL[5], ours=0.05)]
    report.plot(report.with_recorded_peers(rows, report.results_file("NVIDIA H200")), path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_gate():
    exact = {"o": torch.ones(4), "ht": torch.ones(4)}
    close = {"o": exact["o"] * 1.001, "ht": exact["ht"]}
    assert report.gate(close, exact, 0.008)["o"] == pytest.approx(0.001, rel=1e-3)
    for wrong in (1.01, torch.nan):
        with pytest.raises(ArithmeticError, match="^ht is off by"):
            report.gate({**close, "ht": exact["ht"] * wrong}, exact, 0.008)


def test_poison():
    with report.poisoned():
        assert torch.empty(3).isnan().all() and torch.ones(2).new_empty(3).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_gate_comes_before_the_time():
    """A wrong implementation has an error message and no time; the others keep theirs."""

    def unwritten(x):
        return lambda: (torch.empty_like(x["v"]), torch.empty_like(x["initial_state"]))

    def raises(x):
        raise RuntimeError("no such kernel")

    implementations = {"unwritten": unwritten, "raises": raises, "ours": bench.ours_fwd}
    ms, errors, _ = bench.measure(shapes("smoke")[0], "fwd", "cpu", implementations)
    assert list(ms) == ["ours"] and list(errors) == ["ours"] and ms["ours"] > 0


def test_a_backward_that_is_refused(monkeypatch, capsys):
    """As FLA's is by some versions of Triton: its column stays empty, the rest of the row does not."""

    class Refused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            raise RuntimeError("not with this compiler")

    def function(**x):
        o, ht = chunk_gated_delta_rule(**x)
        return Refused.apply(o), ht

    monkeypatch.setitem(bench.FUNCTIONS, "fla", lambda: function)
    ms, errors, mib = bench.measure(SMOKE[0], "step", "cpu", {name: bench.step(name) for name in ("fla", "ours")})
    assert list(ms) == list(errors) == ["ours"] and mib == {}
    assert "fla is not timed: RuntimeError: not with this compiler" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [False, True])
def test_calls_that_wait_are_launched_one_by_one(waits, capsys):
    x = torch.randn(1 << 20, device="cuda")
    calls = [lambda: x.sum().item() if waits else x.sum()] * 3
    assert 0 < report.median_ms(calls, "cuda") < 10
    assert ("launched call by call: " in capsys.readouterr().out) == waits
    # Nothing of it is left for the next one.
    x.normal_(), x.sum().item()
    assert report.median_ms([lambda: x * 2], "cuda") > 0
    assert capsys.readouterr().out == ""


@pytest.mark.gpu
def test_memory_of_a_training_step():
    """Kept are A and the sums of the gates, 132 bytes a token and head; the peak has the gradients too."""
    shape = Shape((4096,), 2, 4)
    x = bench.arguments(shape, "step", "cuda")
    bench.step("ours")(x)()  # compiles
    held, peak = bench.memory_mib("ours", x)
    assert held == pytest.approx(4096 * 4 * 132 / 2**20, rel=0.02)
    assert peak > sum(x[name].nbytes for name in bench.LEAVES) / 2**20


@pytest.mark.parametrize("mode", ["fwd", "bwd", "step"])
def test_smoke(mode, tmp_path, monkeypatch, capsys):
    """The script itself, on the CPU; a row that was recorded as faster makes it fail."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    out = tmp_path / "cpu.jsonl"
    monkeypatch.setattr(sys, "argv", ["", "--mode", mode, "--set", "smoke", "--out", str(out)])
    assert bench.main() == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["mode"] for r in rows] == [mode] * 2
    for r in rows:
        assert r["ms"]["ours"] > 0 and 0 < r["error"]["ours"] < bench.LIMITS[mode]

    report.append(out, [{**r, "ms": {"ours": 1e-6}} for r in rows])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--rows", "1"])
    assert bench.main() == 1
    assert "regressed: " + mode + " 2x96 (1,1) dense" in capsys.readouterr().out


def test_smoke_of_kda(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    out = tmp_path / "cpu.jsonl"
    monkeypatch.setattr(sys, "argv", ["", "--set", "smoke", "--out", str(out)])
    assert bench_kda.main() == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["mode"] for r in rows] == ["kda_fwd"] * 2
    assert all(0 < r["error"]["ours"] < bench_kda.LIMIT for r in rows)


def test_bytes_between_ranks():
    assert bench_cp.pair_bytes(2, 16, 8, 2) == 4 * 2 * 16 * (8 + 16)
    assert bench_cp.pair_bytes(2, 16, 8, 1) == 4 * 2 * 16 * 8 and bench_cp.pair_bytes(2, 16, 8, 0) == 0


def test_model_of_ranks():
    """One rank alone has its own work; more tokens cost more work, more ranks more of the rest."""
    for mode in bench_cp.LOCAL_MS:
        one, eight, many = (bench_cp.model(ranks, 32768, mode) for ranks in (1, 8, 64))
        assert sum(one.values()) == one["local"] == bench_cp.LOCAL_MS[mode]
        assert all(eight[x] < many[x] for x in ("all-gather", "fold")) and eight["pair"] == many["pair"]
        assert bench_cp.model(8, 65536, mode)["pair"] == 2 * eight["pair"]


def test_documented_model():
    documented = (DOCS / "sequence_parallel.md").read_text()
    for mode, ranks, tokens in itertools.product(bench_cp.LOCAL_MS, (8, 64), (8192, 32768, 131072)):
        parts = bench_cp.model(ranks, tokens, mode).values()
        assert f"| {mode} | {ranks} | {tokens} | {' | '.join(f'{x:.2f}' for x in (*parts, sum(parts)))} |" in documented


@pytest.mark.skipif(torch.cuda.is_available(), reason="a run on the CPU")
def test_smoke_run_over_ranks(tmp_path, monkeypatch, capsys):
    out = tmp_path / "rows.jsonl"
    sizes = ["--ranks", "2", "--tokens", "80", "--heads", "1", "2", "--head-dim", "16", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["bench_cp.py", *sizes, "--out", str(out)])
    assert bench_cp.main() == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["mode"] for row in rows] == ["forward", "training"] and all(row["ms"] > 0 for row in rows)
    assert rows[0]["MiB received"] * 2**20 == bench_cp.pair_bytes(2, 16, 16, 1)
    assert "exchange ms" in capsys.readouterr().out
