"""The TileLang programs, installed as ``flash_qla_tl.kernels``. Import them by that name only."""
