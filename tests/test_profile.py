"""The profile of a call: what is timed, and how repeats are told apart."""

import pytest
import torch

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
