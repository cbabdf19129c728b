"""The package as a user meets it: what an import does, and where modules come from."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flash_qla_tl
import flash_qla_tl.kernels

ROOT = Path(__file__).parents[1]


def python(code, **env):
    """Run code in a fresh process that imports flash_qla_tl from where this one has it."""
    paths = [str(Path(flash_qla_tl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        # One thread: several that wait for one another crawl on a loaded machine.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **env},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_touches_no_device_and_no_tilelang():
    python(
        "import sys, torch\n"
        "def touched(*args, **kwargs): raise AssertionError('a device was touched')\n"
        "torch.cuda._lazy_init = torch.cuda.is_available = touched\n"
        "torch.cuda.get_device_capability = torch.cuda.get_device_properties = touched\n"
        "import flash_qla_tl, flash_qla_tl.utils, flash_qla_tl.ops.utils, flash_qla_tl.testing\n"
        "import flash_qla_tl.profile, flash_qla_tl.warmup\n"
        "assert 'tilelang' not in sys.modules\n"
        # transformers asks for a distribution of this name by importing it.
        "assert 'kernels' not in sys.modules\n"
    )


def test_public_names():
    from flash_qla_tl import ops, utils

    assert set(flash_qla_tl.__all__) == {
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
    }
    assert set(utils.__all__) == {
        "l2norm",
        "pack",
        "prepare_chunk_indices",
        "prepare_chunk_offsets",
        "profile",
        "unpack",
    }
    assert callable(ops.utils.chunk_local_cumsum) and callable(ops.utils.group_reduce_vector)
    for module in (flash_qla_tl, utils):
        assert all(hasattr(module, name) for name in module.__all__)


def test_kernels_are_found_once():
    """Under one name, from the checkout or installed, with the CUDA files beside the programs."""
    folder = Path(flash_qla_tl.kernels.__file__).parent
    assert flash_qla_tl.kernels.__name__ == "flash_qla_tl.kernels"
    found = {path.relative_to(folder) for path in folder.rglob("*.cuh")}
    assert found == {path.relative_to(ROOT / "kernels") for path in ROOT.glob("kernels/**/*.cuh")}
    assert found


def test_kernels_import_one_way():
    """The kernels know nothing of the package above them, nor themselves by another name."""
    pattern = re.compile(r"^\s*(?:from|import)\s+((?:flash_qla_tl|kernels)\b[\w.]*)", re.MULTILINE)
    for path in (ROOT / "kernels").rglob("*.py"):
        for module in pattern.findall(path.read_text()):
            assert module.startswith("flash_qla_tl.kernels."), f"{path}: {module}"


def test_kernels_init_is_a_docstring():
    """Other packages may execute it under the bare name."""
    code = compile((ROOT / "kernels/__init__.py").read_text(), "kernels", "exec")
    assert set(code.co_names) <= {"__doc__"}


def test_dependencies():
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dependencies = ["torch>=2.8", "tilelang>=0.1.15"]\n' in project
    assert 'requires-python = ">=3.10"\n' in project


ON_GPU = pytest.param({}, marks=pytest.mark.gpu, id="gpu")


@pytest.mark.parametrize("env", [pytest.param({"CUDA_VISIBLE_DEVICES": ""}, id="cpu"), ON_GPU])
def test_main_job(env):
    """The README's first command, without the installation."""
    code = "import runpy, sys; sys.exit(runpy.run_module('flash_qla_tl')['main']())"
    out = python(code, **env)
    assert re.search(r"^final_state +0\.\d+ +0\.\d+$", out, re.MULTILINE), out
    assert re.search(r"^backward +\d+\.\d+$", out, re.MULTILINE), out


def test_main_job_fails_over_budget():
    code = (
        "import runpy, flash_qla_tl.testing as t\n"
        "t.budget = lambda *args: 1e-9\n"
        "print(runpy.run_module('flash_qla_tl')['main']())"
    )
    out = python(code, CUDA_VISIBLE_DEVICES="")
    assert "over budget: o, " in out and out.endswith("1\n")
