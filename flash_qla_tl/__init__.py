"""Linear-attention kernels for Hopper in TileLang, and a torch path for everything else."""

from pathlib import Path

__version__ = "0.1.0"

# A checkout keeps the TileLang programs in ../kernels, where setup.py maps them from; let
# flash_qla_tl.kernels resolve there when this package is imported without being installed.
if not (Path(__file__).parent / "kernels").is_dir():
    __path__.append(str(Path(__file__).parents[1]))

from flash_qla_tl.context_parallel import build_cp_context
from flash_qla_tl.gated_delta_rule import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from flash_qla_tl.integrations.fla import disable_fla, enable_fla
from flash_qla_tl.kda import chunk_kda, get_workspace_size, kda_fwd

__all__ = [
    "__version__",
    "build_cp_context",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "chunk_kda",
    "disable_fla",
    "enable_fla",
    "get_workspace_size",
    "kda_fwd",
]
