"""What is copied before a kernel sees it, and what is said where a kernel cannot be compiled: no GPU needed."""

import shutil

import pytest
import torch

from flash_qla_tl.kernels.common.target import compiled
from flash_qla_tl.kernels.common.tensors import state_rows, tma_ready


def rows(*shape):
    return torch.randn(*shape).bfloat16()


@pytest.mark.parametrize(
    ("x", "kept"),
    [
        (rows(2, 6, 3, 64), True),
        (rows(64), True),
        (rows(65)[1:], False),
        (rows(1, 6, 8 * 64).unflatten(-1, (8, 64))[:, :, 2:5], True),  # heads of one fused buffer
        (rows(2, 3, 6, 64).transpose(1, 2), True),
        (rows(2, 6, 3, 64).expand(2, 6, 3, 64), True),
        (rows(2, 6, 1, 64).expand(2, 6, 3, 64), False),  # TMA takes no stride of 0
        (rows(1, 1, 3, 64).expand(2, 6, 3, 64), False),
        (rows(2, 6, 3, 68)[..., :64], False),  # rows of 8 bytes too many
        (rows(2, 6, 3, 128)[..., ::2], False),
        (rows(2 * 6 * 3 * 64 + 1)[1:].view(2, 6, 3, 64), False),  # 2 bytes off
    ],
)
def test_tma_ready(x, kept):
    y = tma_ready(x)
    assert torch.equal(x, y) and (y.data_ptr() == x.data_ptr()) == kept
    assert y.stride(-1) == 1 and y.data_ptr() % 16 == 0
    assert all(s > 0 and s % 8 == 0 for s in y.stride()[:-1])


def test_a_dimension_of_one_is_no_reason_to_copy():
    """Its stride is anything, and TMA refuses some."""
    x = rows(6, 3, 64).as_strided((1, 6, 3, 64), (3, 192, 64, 1))
    y = tma_ready(x)
    assert y.data_ptr() == x.data_ptr() and torch.equal(x, y) and y.stride()[0] % 8 == 0


def test_state_rows():
    pool = torch.randn(10, 4, 16, 8)
    assert state_rows(pool[::2]).data_ptr() == pool.data_ptr()
    assert torch.equal(state_rows(pool.mT), pool.mT) and state_rows(pool.mT).stride(-2) == 16
    assert state_rows(pool.double()).dtype == torch.float32


def test_state_rows_begin_at_pairs():
    """The kernels read a state two numbers at a time: one that begins at an odd number would be a misaligned address."""
    odd = torch.randn(2 * 4 * 16 * 8 + 1)[1:].view(2, 4, 16, 8)
    odd_steps = torch.randn(2, 4 * 16 * 8 + 1)[:, :-1].view(2, 4, 16, 8)
    for x in (odd, odd_steps, odd.bfloat16()[1:]):
        y = state_rows(x)
        assert torch.equal(x, y) and y.data_ptr() % (2 * y.element_size()) == 0
        assert y.is_contiguous()


def test_without_nvcc_the_error_says_what_to_install(monkeypatch):
    nvcc = pytest.importorskip("tilelang.contrib.nvcc")

    def nothing():
        raise RuntimeError("no CUDA")

    def build():
        raise OSError("nvcc: not found")

    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(nvcc, "get_nvcc_compiler", nothing)
    with pytest.raises(RuntimeError, match=r'pip install "flash_qla_tl\[nvcc\]"'):
        compiled(build)
    # A compiler that is there speaks for itself.
    monkeypatch.setattr(shutil, "which", lambda name: name)
    with pytest.raises(OSError, match="not found"):
        compiled(build)
