"""GPU tests skipped without a GPU, a seed for each test, and memory that shows when nobody wrote it."""

import contextlib
import faulthandler
import functools
import importlib
import sys
import zlib
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

# transformers imports a package `kernels`, which `python -m pytest` would take for this checkout's folder: that comes first.
_elsewhere = [folder for folder in sys.path if Path(folder).resolve() != Path(__file__).parents[1]]
with contextlib.suppress(ModuleNotFoundError), patch.object(sys, "path", _elsewhere):
    importlib.import_module("kernels")

# Shapes here are too small for threads, which only wait for each other on a busy machine.
torch.set_num_threads(1)

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def pytest_collection_modifyitems(items):
    if not HOPPER:
        skip = pytest.mark.skip(reason="no CUDA device of compute capability 9.0")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def seed(request):
    """Random numbers depend on the test alone, not on which tests ran before it."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def watchdog(request):
    """A kernel that waits for ever cannot be interrupted: end the run and say where it was."""
    if request.node.get_closest_marker("gpu"):
        faulthandler.dump_traceback_later(180, exit=True)
        yield
        faulthandler.cancel_dump_traceback_later()
    else:
        yield


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Uninitialised memory allocated in flash_qla_tl is NaN, so that an unwritten row shows."""

    def poisoned(allocate):
        @functools.wraps(allocate)
        def wrapper(*args, **kwargs):
            x = allocate(*args, **kwargs)
            module = sys._getframe(1).f_globals.get("__name__", "")
            if module.split(".")[0] == "flash_qla_tl" and x.is_floating_point():
                x.fill_(torch.nan)
            return x

        return wrapper

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
