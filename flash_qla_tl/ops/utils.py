"""Building blocks shared by the operators, in torch."""

from torch import Tensor

from flash_qla_tl.utils.chunks import Chunks
from flash_qla_tl.utils.norm import compute_dtype


def chunk_local_cumsum(
    g: Tensor, chunk_size: int = 64, cu_seqlens: Tensor | None = None, reverse: bool = False
) -> Tensor:
    """Cumulative sum over the tokens of each chunk, starting anew at every chunk.

    Args:
        g: ``[B, T, HV]`` (or with further axes), any float dtype.
        chunk_size: tokens a chunk.
        cu_seqlens: ``[N+1]``; chunks then start anew at every sequence, and ``B`` is 1.
        reverse: sum from the end of the chunk instead.

    Returns:
        Shape of ``g`` in fp32 (float64 for float64); rows past ``cu_seqlens[-1]`` are zero.

    Raises:
        ValueError: ``g`` has fewer than three axes, or ``B`` is not 1 with ``cu_seqlens``.
    """
    if g.ndim < 3:
        raise ValueError(f"g must have shape [B, T, HV], got {list(g.shape)}")
    if cu_seqlens is not None and g.shape[0] != 1:
        raise ValueError(f"g must have B = 1 with cu_seqlens, got B = {g.shape[0]}")
    chunks = Chunks.of(g, cu_seqlens, chunk_size)
    x = chunks.split(g.to(compute_dtype(g)))
    x = x.flip(2).cumsum(2).flip(2) if reverse else x.cumsum(2)
    return chunks.join(x)


def group_reduce_vector(x: Tensor, H: int) -> Tensor:
    """Sum over the value heads that share a query/key head.

    Args:
        x: ``[B, T, HV, D]``, any float dtype; summed in fp32 (float64 for float64).
        H: query/key heads; ``HV`` is a multiple of it.

    Returns:
        ``[B, T, H, D]`` in the dtype of ``x``.

    Raises:
        ValueError: ``x`` has another rank, or ``HV`` is no multiple of ``H``.
    """
    if x.ndim != 4:
        raise ValueError(f"x must have shape [B, T, HV, D], got {list(x.shape)}")
    if H < 1 or x.shape[2] % H:
        raise ValueError(f"x must have HV a multiple of H = {H}, got HV = {x.shape[2]}")
    return x.unflatten(2, (H, -1)).sum(3, dtype=compute_dtype(x)).to(x.dtype)
