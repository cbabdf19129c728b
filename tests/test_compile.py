"""Every kernel variant compiles for sm_90a without a GPU, within the hardware's limits."""

import itertools
import os
import re
import shutil
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

tilelang = pytest.importorskip("tilelang")

from flash_qla_tl.kernels.common.target import SMEM_CAPACITY, TARGET  # noqa: E402
from flash_qla_tl.kernels.gated_delta_rule import activations, chunk_bwd, chunk_fwd, chunk_intra, chunk_states  # noqa: E402
from flash_qla_tl.kernels.kda import prepare as kda_prepare  # noqa: E402
from flash_qla_tl.kernels.kda import state_loop as kda_state_loop  # noqa: E402


def nvcc() -> str | None:
    from tilelang.contrib import nvcc

    try:
        return nvcc.get_nvcc_compiler()
    except RuntimeError:
        return shutil.which("nvcc")


pytestmark = pytest.mark.skipif(nvcc() is None, reason="no nvcc: the kernels are not compiled")

SPILL_BYTES = 64
# Two accumulator registers of a compute thread spill once a head, beside some 20 products; the rest once a chunk or in the
# warps that load and store.
CHUNK_BWD_SPILL_BYTES = 320
# The state is the register operand of its products, and tiles come and go by TMA.
STATE_IN_REGISTERS = ("wgmma_rs", "tma_load", "tma_store")


@dataclass
class Kernel:
    """A variant, and what is asked of it."""

    build: object
    args: tuple
    spill_bytes: int = SPILL_BYTES
    contains: tuple[str, ...] = ()


KERNELS = {}
for config in chunk_fwd.configs():
    KERNELS[f"chunk_fwd {config}"] = Kernel(chunk_fwd.build, (config,), contains=STATE_IN_REGISTERS)
for config in chunk_states.configs():
    KERNELS[f"chunk_states {config}"] = Kernel(chunk_states.build, (config,), contains=STATE_IN_REGISTERS)
for config in chunk_bwd.configs():
    KERNELS[f"chunk_bwd {config}"] = Kernel(chunk_bwd.build, (config,), CHUNK_BWD_SPILL_BYTES)
for config in kda_prepare.configs():
    KERNELS[f"kda prepare {config}"] = Kernel(kda_prepare.build, (config,), contains=("tma_load",))
for config in kda_state_loop.configs():
    KERNELS[f"kda state_loop {config}"] = Kernel(kda_state_loop.build, (config,), contains=STATE_IN_REGISTERS)
for config in itertools.product((64, 128), ("bfloat16", "float16")):
    KERNELS[f"chunk_intra {config}"] = Kernel(chunk_intra.build, config)
    KERNELS[f"activations_fwd {config}"] = Kernel(activations.build_fwd, config, 0)
    KERNELS[f"activations_bwd {config}"] = Kernel(activations.build_bwd, config, 0)


def lower(kernel):
    """As the builder does: -> the generated source, dynamic shared memory in bytes."""
    from tilelang import tvm

    func = kernel.build.get_tir(*kernel.args)
    configs = tvm.transform.PassContext(opt_level=3, config=kernel.build.pass_configs)
    with tvm.target.Target(TARGET) as target, configs:
        artifact = tilelang.lower(func, target=target, enable_device_compile=False)
    dynamic = [int(x) for x in re.findall(r'call_packed\("\w+_kernel", .*, (\d+)\)$', str(artifact.host_mod), re.M)]
    return artifact.kernel_source, dynamic[0] if dynamic else 0


def ptxas_report(source, folder):
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    (folder / "kernel.cu").write_text(source)
    includes = [f"-I{path}" for path in (TILELANG_TEMPLATE_PATH, CUTLASS_INCLUDE_DIR)]
    options = [
        "-std=c++17",
        "--use_fast_math",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-cubin",
        "-w",
        "-Xptxas",
        "-v",
    ]
    command = [nvcc(), *options, *includes, "-o", str(folder / "kernel.cubin"), str(folder / "kernel.cu")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory):
    """By name of those asked for: lowered here one after the other, while nvcc is at work on the ones before."""
    names = [item.callspec.params["name"] for item in request.session.items if item.module is request.module]
    found = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name in names:
            try:
                source, dynamic = lower(KERNELS[name])
                report = pool.submit(ptxas_report, source, tmp_path_factory.mktemp("kernel"))
            except Exception as error:  # this kernel's own test is where it belongs
                source, dynamic, report = "", 0, Future()
                report.set_exception(error)
            found[name] = source, dynamic, report
        yield found


@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name, compiled):
    source, dynamic, report = compiled[name]
    report, kernel = report.result(), KERNELS[name]
    assert not re.search(r"C75\d\d", report), report
    spills = sum(int(x) for x in re.findall(r"(\d+) bytes spill stores", report))
    assert spills <= kernel.spill_bytes, report
    static = int(re.search(r"(\d+) bytes smem", report)[1]) if "bytes smem" in report else 0
    assert dynamic + static <= SMEM_CAPACITY
    assert all(word in source for word in kernel.contains)
