"""flash_qla_tl.utils and flash_qla_tl.ops.utils against plain loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_qla_tl.ops.utils import chunk_local_cumsum, group_reduce_vector
from flash_qla_tl.utils import l2norm, pack, prepare_chunk_indices, prepare_chunk_offsets, unpack

lengths_of_sequences = st.lists(st.integers(0, 200), max_size=8)
without_deadline = settings(deadline=None, max_examples=50)


def cumulative(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@without_deadline
@given(lengths_of_sequences, st.integers(0, 3))
def test_unpack_pads_each_sequence(lengths, tail):
    cu = cumulative(lengths)
    total = int(cu[-1])
    x = torch.randn(1, total + tail, 2)
    rows = unpack(x, cu)
    assert rows.shape == (len(lengths), max(lengths, default=0), 2)
    for n, length in enumerate(lengths):
        assert torch.equal(rows[n, :length], x[0, cu[n] : cu[n + 1]])
        assert not rows[n, length:].any()
    assert torch.equal(pack(rows, cu), x[:, :total])


def test_pack_drops_nan_padding_and_is_differentiable():
    cu = cumulative([2, 0, 3])
    x = torch.full((3, 4, 2), torch.nan)
    x[0, :2], x[2, :3] = 1.0, 2.0
    x.requires_grad_()
    packed = pack(x, cu)
    assert packed.isfinite().all()
    packed.sum().backward()
    assert torch.equal(unpack(packed, cu) > 0, x.grad[:, :3] > 0)


@pytest.mark.parametrize(
    ("call", "shape", "message"),
    [
        (pack, (2, 9, 4), r"x must have shape \[N, T_max, ...\] = \[3, >= 5, ...\], got \[2, 9, 4\]"),
        (pack, (3, 4), r"x must have shape \[N, T_max, ...\] = \[3, >= 5, ...\], got \[3, 4\]"),
        (unpack, (2, 9), r"x must have shape \[1, T, ...\] = \[1, >= 8, ...\], got \[2, 9\]"),
        (unpack, (1, 7), r"x must have shape \[1, T, ...\] = \[1, >= 8, ...\], got \[1, 7\]"),
    ],
)
def test_pack_and_unpack_refuse(call, shape, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(*shape), cumulative([3, 0, 5]))


@without_deadline
@given(lengths_of_sequences, st.sampled_from([16, 64]), st.sampled_from([torch.int32, torch.int64]))
def test_chunk_tables(lengths, size, dtype):
    cu = cumulative(lengths, dtype)
    counts = [-(-length // size) for length in lengths]
    offsets, indices = prepare_chunk_offsets(cu, size), prepare_chunk_indices(cu, size)
    assert offsets.dtype == indices.dtype == dtype
    assert offsets.tolist() == [sum(counts[:n]) for n in range(len(counts) + 1)]
    assert indices.tolist() == [[n, i] for n, count in enumerate(counts) for i in range(count)]


def test_tables_follow_a_change_in_place():
    cu = cumulative([64, 65])
    assert prepare_chunk_offsets(cu, 64).tolist() == [0, 1, 3]
    cu.copy_(cumulative([65, 64]))
    assert prepare_chunk_offsets(cu, 64).tolist() == [0, 2, 3]
    assert prepare_chunk_indices(cu, 64).tolist() == [[0, 0], [0, 1], [1, 0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_l2norm_keeps_the_dtype(dtype):
    """A helper that widened its result broke the kernels behind it; zeros must not become NaN."""
    x = torch.randn(3, 5, 64).to(dtype)
    x[0, 0] = 0
    y = l2norm(x)
    assert y.dtype == dtype
    assert not y[0, 0].any()
    exact = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(y, exact.to(dtype))


def test_l2norm_of_large_fp16():
    """64 * 300^2 is past the range of fp16."""
    y = l2norm(torch.full((1, 64), 300.0, dtype=torch.float16))
    torch.testing.assert_close(y, torch.full_like(y, 0.125))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", [None, [70, 0, 1, 64, 5]])
@pytest.mark.parametrize("size", [16, 64])
def test_chunk_local_cumsum(size, lengths, reverse):
    B, T = (2, 150) if lengths is None else (1, 150)
    g = torch.randn(B, T, 3).bfloat16()
    cu = None if lengths is None else cumulative(lengths)
    out = chunk_local_cumsum(g, size, cu, reverse)
    expected = torch.zeros(B, T, 3)
    bounds = [0, T] if lengths is None else cu.tolist()
    for bos, eos in zip(bounds, bounds[1:], strict=False):
        for t in range(bos, eos, size):
            chunk = g[:, t : min(t + size, eos)].float()
            flip = (lambda x: x.flip(1)) if reverse else (lambda x: x)
            expected[:, t : min(t + size, eos)] = flip(flip(chunk).cumsum(1))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected)


def test_chunk_local_cumsum_refuses():
    with pytest.raises(ValueError, match=r"g must have shape \[B, T, HV\], got \[4, 5\]"):
        chunk_local_cumsum(torch.zeros(4, 5))
    with pytest.raises(ValueError, match="g must have B = 1 with cu_seqlens, got B = 2"):
        chunk_local_cumsum(torch.zeros(2, 5, 1), cu_seqlens=cumulative([5]))


def test_group_reduce_vector_sums_in_fp32():
    """Adding ones in bf16 would stop at 256."""
    x = torch.ones(1, 2, 1024, 3, dtype=torch.bfloat16)
    out = group_reduce_vector(x, 2)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.full((1, 2, 2, 3), 512, dtype=torch.bfloat16))
    heads = torch.randn(2, 3, 6, 4)
    expected = torch.stack((heads[:, :, :3].sum(2), heads[:, :, 3:].sum(2)), dim=2)
    torch.testing.assert_close(group_reduce_vector(heads, 2), expected)


def test_group_reduce_vector_refuses():
    with pytest.raises(ValueError, match="x must have HV a multiple of H = 4, got HV = 6"):
        group_reduce_vector(torch.zeros(1, 1, 6, 2), 4)
    with pytest.raises(ValueError, match=r"x must have shape \[B, T, HV, D\], got \[1, 6, 2\]"):
        group_reduce_vector(torch.zeros(1, 6, 2), 2)
