"""What the plug-ins of vLLM and SGLang share: whether they are wanted, and a line in the log."""

from __future__ import annotations

import functools
import logging
import os

logger = logging.getLogger("flash_qla_tl")


def wanted() -> bool:
    """Installing the package changes no server: ``FLASH_QLA_TL_SERVING=1`` in its environment does."""
    return os.environ.get("FLASH_QLA_TL_SERVING") == "1"


@functools.cache
def say_once(message: str) -> None:
    logger.warning(message)
