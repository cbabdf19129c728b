"""Every kernel variant compiles for sm_90a without a GPU, within the hardware's limits."""

import re
import shutil
import subprocess

import pytest

tilelang = pytest.importorskip("tilelang")

from flash_qla_tl.kernels.common.target import SMEM_CAPACITY, TARGET  # noqa: E402
from flash_qla_tl.kernels.gated_delta_rule import chunk_bwd, chunk_states, fused_fwd, prepare  # noqa: E402


def nvcc() -> str | None:
    from tilelang.contrib import nvcc

    try:
        return nvcc.get_nvcc_compiler()
    except RuntimeError:
        return shutil.which("nvcc")


pytestmark = pytest.mark.skipif(nvcc() is None, reason="no nvcc: the kernels are not compiled")

SPILL_BYTES = 64
# 128 x (24 + 104 + 2 x 192) registers are the whole register file. The words that spill belong to the gate and
# store warps, which wait most of the time, and to the auxiliary warpgroup outside its dependent chain; fewer
# registers for the state warpgroups would serialize their wgmma (C7512), which costs more.
FUSED_FWD_SPILL_BYTES = 256  # at K = 128, VR = 128

# Two accumulator registers of a compute thread spill once a head, beside some 20 products; the rest once a chunk or in the
# warps that load and store.
CHUNK_BWD_SPILL_BYTES = 320


def compile_report(build, args, tmp_path):
    """As the builder compiles: -> the generated source, ptxas' report, dynamic shared memory in bytes."""
    from tilelang import tvm
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    func = build.get_tir(*args)
    configs = tvm.transform.PassContext(opt_level=3, config=build.pass_configs)
    with tvm.target.Target(TARGET) as target, configs:
        artifact = tilelang.lower(func, target=target, enable_device_compile=False)
    source = tmp_path / "kernel.cu"
    source.write_text(artifact.kernel_source)
    includes = [f"-I{path}" for path in (TILELANG_TEMPLATE_PATH, CUTLASS_INCLUDE_DIR)]
    options = ["-std=c++17", "--use_fast_math", "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-w"]
    command = [nvcc(), *options, *includes, "-Xptxas", "-v", "-o", str(tmp_path / "kernel.cubin"), str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    dynamic = [int(x) for x in re.findall(r'call_packed\("\w+_kernel", .*, (\d+)\)$', str(artifact.host_mod), re.M)]
    return artifact.kernel_source, result.stderr, dynamic[0] if dynamic else 0


def check(build, args, tmp_path, spill_bytes=SPILL_BYTES):
    source, report, dynamic = compile_report(build, args, tmp_path)
    assert not re.search(r"C75\d\d", report), report
    spills = sum(int(x) for x in re.findall(r"(\d+) bytes spill stores", report))
    assert spills <= spill_bytes, report
    static = int(re.search(r"(\d+) bytes smem", report)[1]) if "bytes smem" in report else 0
    assert dynamic + static <= SMEM_CAPACITY
    return source


@pytest.mark.parametrize("config", fused_fwd.configs(), ids=str)
def test_fused_fwd(config, tmp_path):
    full = config.K == config.VR == 128
    source = check(fused_fwd.build, (config,), tmp_path, FUSED_FWD_SPILL_BYTES if full else SPILL_BYTES)
    # The state is the register operand of its products, and tiles come and go by TMA.
    assert "wgmma_rs" in source and "tma_load" in source and "tma_store" in source


@pytest.mark.parametrize("config", chunk_states.configs(), ids=str)
def test_chunk_states(config, tmp_path):
    source = check(chunk_states.build, (config,), tmp_path)
    assert "wgmma_rs" in source and "tma_load" in source and "tma_store" in source


@pytest.mark.parametrize("config", chunk_bwd.configs(), ids=str)
def test_chunk_bwd(config, tmp_path):
    check(chunk_bwd.build, (config,), tmp_path, CHUNK_BWD_SPILL_BYTES)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("K", [64, 128])
def test_prepare(K, dtype, tmp_path):
    check(prepare.build, (K, dtype), tmp_path)
