"""Every kernel variant compiles for sm_90a without a GPU, within the hardware's limits."""

import os
import re
import shutil
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

tilelang = pytest.importorskip("tilelang")

from flash_qla_tl.kernels.common.target import SMEM_CAPACITY, TARGET  # noqa: E402
from flash_qla_tl.warmup import variants  # noqa: E402


def nvcc() -> str | None:
    from tilelang.contrib import nvcc

    try:
        return nvcc.get_nvcc_compiler()
    except RuntimeError:
        return shutil.which("nvcc")


pytestmark = pytest.mark.skipif(nvcc() is None, reason="no nvcc: the kernels are not compiled")

VARIANTS = {variant.name: variant for variant in variants()}
# By kernel, where it is not 64. In chunk_bwd two accumulator registers of a compute thread spill once a head, beside some 20
# products; the rest once a chunk or in the warps that load and store.
SPILL_BYTES = {"chunk_bwd": 320, "activations_fwd": 0, "activations_bwd": 0}
# The state is the register operand of its products, and tiles come and go by TMA.
STATE_IN_REGISTERS = ("wgmma_rs", "tma_load", "tma_store")
CONTAINS = {
    "chunk_fwd": STATE_IN_REGISTERS,
    "chunk_states": STATE_IN_REGISTERS,
    "kda_prepare": ("tma_load",),
    "kda_state_loop": STATE_IN_REGISTERS,
    "kda_segment_states": ("wgmma_rs", "tma_load"),
}


def lower(variant):
    """As the builder does: -> the generated source, dynamic shared memory in bytes."""
    from tilelang import tvm

    func = variant.build.get_tir(*variant.args)
    configs = tvm.transform.PassContext(opt_level=3, config=variant.build.pass_configs)
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
                source, dynamic = lower(VARIANTS[name])
                report = pool.submit(ptxas_report, source, tmp_path_factory.mktemp("kernel"))
            except Exception as error:  # this kernel's own test is where it belongs
                source, dynamic, report = "", 0, Future()
                report.set_exception(error)
            found[name] = source, dynamic, report
        yield found


@pytest.mark.parametrize("name", VARIANTS)
def test_compiles(name, compiled):
    source, dynamic, report = compiled[name]
    report, kernel = report.result(), VARIANTS[name].kernel
    assert not re.search(r"C75\d\d", report), report
    spills = sum(int(x) for x in re.findall(r"(\d+) bytes spill stores", report))
    assert spills <= SPILL_BYTES.get(kernel, 64), report
    static = int(re.search(r"(\d+) bytes smem", report)[1]) if "bytes smem" in report else 0
    assert dynamic + static <= SMEM_CAPACITY
    assert all(word in source for word in CONTAINS.get(kernel, ()))
