"""Every kernel variant compiles for sm_90a without a GPU, within the hardware's limits."""

import re
import shutil
import subprocess

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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("K", [64, 128])
def test_chunk_intra(K, dtype, tmp_path):
    check(chunk_intra.build, (K, dtype), tmp_path)


@pytest.mark.parametrize("config", chunk_fwd.configs(), ids=str)
def test_chunk_fwd(config, tmp_path):
    source = check(chunk_fwd.build, (config,), tmp_path)
    # The state is the register operand of its products, and tiles come and go by TMA.
    assert "wgmma_rs" in source and "tma_load" in source and "tma_store" in source


@pytest.mark.parametrize("config", chunk_states.configs(), ids=str)
def test_chunk_states(config, tmp_path):
    source = check(chunk_states.build, (config,), tmp_path)
    assert "wgmma_rs" in source and "tma_load" in source and "tma_store" in source


@pytest.mark.parametrize("config", chunk_bwd.configs(), ids=str)
def test_chunk_bwd(config, tmp_path):
    check(chunk_bwd.build, (config,), tmp_path, CHUNK_BWD_SPILL_BYTES)


@pytest.mark.parametrize("config", kda_prepare.configs(), ids=str)
def test_kda_prepare(config, tmp_path):
    assert "tma_load" in check(kda_prepare.build, (config,), tmp_path)


@pytest.mark.parametrize("config", kda_state_loop.configs(), ids=str)
def test_kda_state_loop(config, tmp_path):
    source = check(kda_state_loop.build, (config,), tmp_path)
    assert "wgmma_rs" in source and "tma_load" in source and "tma_store" in source


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("build", [activations.build_fwd, activations.build_bwd], ids=["fwd", "bwd"])
def test_activations(build, K, dtype, tmp_path):
    check(build, (K, dtype), tmp_path, spill_bytes=0)
