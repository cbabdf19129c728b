"""Helpers around the operators: normalisation, packed sequences, chunk tables, profiling."""

from flash_qla_tl.utils.index import pack, prepare_chunk_indices, prepare_chunk_offsets, unpack
from flash_qla_tl.utils.norm import l2norm
from flash_qla_tl.utils.profile import profile

__all__ = ["l2norm", "pack", "prepare_chunk_indices", "prepare_chunk_offsets", "profile", "unpack"]
