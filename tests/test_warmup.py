"""The warm-up: what it compiles is what calls ask for, and a cache that it filled serves every process."""

import contextlib
import ctypes
import importlib
import itertools
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang")

import flash_qla_tl.kernels  # noqa: E402
from flash_qla_tl import chunk_gated_delta_rule, chunk_gated_delta_rule_fwd, chunk_kda, testing, warmup  # noqa: E402
from flash_qla_tl.kernels.common import target  # noqa: E402

VARIANTS = {variant.name: variant for variant in warmup.variants()}
# Two of the quickest to compile.
SMALL = [f"activations_{direction} bfloat16" for direction in ("fwd", "bwd")]


def nvcc() -> str | None:
    from tilelang.contrib import nvcc

    with contextlib.suppress(RuntimeError):
        return shutil.which(nvcc.get_nvcc_compiler())


needs_nvcc = pytest.mark.skipif(nvcc() is None, reason="no nvcc: nothing is compiled")


def kernel_modules():
    found = pkgutil.walk_packages(flash_qla_tl.kernels.__path__, "flash_qla_tl.kernels.")
    return [importlib.import_module(module.name) for module in found]


def test_every_builder_is_in_the_list():
    from tilelang.jit import JITImpl

    builders = {id(x) for module in kernel_modules() for x in vars(module).values() if isinstance(x, JITImpl)}
    assert builders == {id(variant.build) for variant in VARIANTS.values()}
    assert len(VARIANTS) == len(warmup.variants())


@pytest.fixture
def asked_for(monkeypatch):
    """The names of the variants that calls ask for, on CPU tensors; nothing is launched."""
    names = {(id(variant.build), variant.args): name for name, variant in VARIANTS.items()}
    asked = set()

    def compiled(build, *args):
        asked.add(names[id(build), args])
        return lambda *call: None

    def forget():
        for module in kernel_modules():
            for function in vars(module).values():
                if hasattr(function, "cache_clear"):
                    function.cache_clear()

    monkeypatch.setattr(target, "refusal", lambda q, k, v: None)
    for module in kernel_modules():
        for name, stub in (("launcher", compiled), ("on_device", contextlib.nullcontext)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stub)
    forget()
    yield asked
    forget()


def with_sms(monkeypatch, count):
    for module in kernel_modules():
        if hasattr(module, "num_sms"):
            monkeypatch.setattr(module, "num_sms", lambda index: count)


CALLS = [{"T": 3}, {"lengths": [3, 0, 2]}, {"B": 2, "T": 65, "h0_dtype": torch.bfloat16}]
HEADS = [(1, 1), (2, 4), (1, 33), (66, 66), (67, 67), (1, 132), (133, 133)]


def test_calls_ask_for_what_the_warm_up_compiles(asked_for, monkeypatch):
    """Every one of its variants, and nothing else: whatever N, T, H, HV, scale, states, dtypes and the GPU's size are."""
    options = itertools.cycle([{"scale": 0.5, "output_final_state": True}, {"use_qk_l2norm_in_kernel": True}])
    for sms, dtype, (H, HV), call in itertools.product((78, 132), (torch.bfloat16, torch.float16), HEADS, CALLS):
        with_sms(monkeypatch, sms)
        for K, V in itertools.product((64, 128), repeat=2):
            args = testing.inputs(**call, H=H, HV=HV, K=K, V=V, dtype=dtype)
            chunk_gated_delta_rule_fwd(**args, output_h=HV == 1)
            args |= {name: args[name].requires_grad_() for name in ("q", "k", "v", "g", "beta")}
            o, _ = chunk_gated_delta_rule(**args, **next(options), use_beta_sigmoid_in_kernel=True)
            o.backward(o)
        args = testing.kda_inputs(**call, H=H, HV=HV, K=128, dtype=dtype)
        chunk_kda(**args, return_intermediate_states=HV == 1)
    for dtype, K in itertools.product((torch.bfloat16, torch.float16), (64, 128)):
        # Long enough to be split.
        chunk_gated_delta_rule(**testing.inputs(T=8192, H=1, K=K, dtype=dtype))
        if K == 128:
            chunk_kda(**testing.kda_inputs(T=8192, H=1, K=K, dtype=dtype))
    assert asked_for == set(VARIANTS)


def test_choice():
    def numbers(*args):
        kernels = [variant.kernel for variant in warmup.chosen(*args)]
        return {kernel: kernels.count(kernel) for kernel in kernels}

    assert numbers(["kda_fwd"]) == {"kda_prepare": 2, "kda_state_loop": 6, "kda_segment_states": 2, "segment_starts": 2}
    serving = {"chunk_fwd": 3, "chunk_intra": 1, "segment_states": 1, "segment_starts": 1}
    assert numbers(["gdn_fwd"], ["bfloat16"], [128]) == serving
    # A backward comes with its forward.
    backward = {"chunk_bwd": 1, "chunk_states": 2, "activations_fwd": 1, "activations_bwd": 1}
    assert numbers(["gdn_bwd"], ["bfloat16"], [128]) == {**backward, **serving}
    assert len(warmup.chosen()) == len(VARIANTS)


def run_main(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["warmup", *args])
    return warmup.main()


@pytest.mark.parametrize(
    ("capability", "args", "message"),
    [
        (None, [], "no GPU here whose architecture would be meant: name it, --arch sm_90a"),
        ((8, 0), [], "compute capability 9.0, this one has 8.0"),
        (None, ["--arch", "sm_100a"], "invalid choice: 'sm_100a'"),
        (None, ["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (None, ["--op", "kda_fwd", "--head-dim", "64"], r"kda_fwd have no kernel for head dims of \[64\]"),
    ],
)
def test_refusals(monkeypatch, capsys, capability, args, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(SystemExit) as exit:
        run_main(monkeypatch, *args)
    assert exit.value.code == 2 and re.search(message, capsys.readouterr().err)


def test_list(monkeypatch, capsys):
    assert run_main(monkeypatch, "--op", "kda_fwd", "--dtype", "bfloat16", "--list") == 0
    names = capsys.readouterr().out.splitlines()
    assert len(names) == 6 and set(names) <= set(VARIANTS)


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Environment of a toolkit that counts the starts of its nvcc, and their number so far."""
    folder = tmp_path_factory.mktemp("toolkit")
    real, log = Path(nvcc()), folder / "starts"
    for entry in real.resolve().parents[1].iterdir():
        if entry.name != "bin":
            (folder / entry.name).symlink_to(entry)
    wrapper = folder / "bin/nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\necho start >> {log}\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    log.touch()
    return {"CUDA_HOME": str(folder)}, lambda: len(log.read_text().splitlines())


@pytest.fixture(scope="module")
def filled(counted, tmp_path_factory):
    """A cache with the small variants in it, and what the command that filled it and one more said."""
    cache = tmp_path_factory.mktemp("cache")
    out = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in {**counted[0], "TILELANG_CACHE_DIR": str(cache)}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(warmup, "chosen", lambda *args: [VARIANTS[name] for name in SMALL])
        for _ in range(2):
            monkeypatch.setattr("builtins.print", lambda *x, **_: out.append(" ".join(x)))
            assert run_main(monkeypatch, "--arch", "sm_90a", "--jobs", "2") == 0
            out.append(counted[1]())
    return cache, out


@needs_nvcc
def test_a_second_warm_up_starts_no_compiler(filled):
    cache, (*first, starts, fourth, fifth, second, all_starts) = filled
    assert [line.split()[-1] for line in first[:2]] == ["compiled"] * 2 and "2 compiled, 0 cached, 0 failed" in first[2]
    assert [fourth.split()[-1], fifth.split()[-1]] == ["cached"] * 2 and "0 compiled, 2 cached" in second
    assert second.endswith(f"in {cache}")
    assert starts == all_starts == 2


BUILD = """
import sys, warnings
from flash_qla_tl import warmup
from flash_qla_tl.kernels.common.target import compiled
found = {variant.name: variant for variant in warmup.variants()}
for name in sys.argv[1:]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kernel = compiled(found[name].build, *found[name].args)
    print("cached" if kernel.artifact is None else "compiled", *{x.category.__name__ for x in said})
"""


def environment(**more):
    """Of a process that finds the package where it is found here."""
    path = os.pathsep.join([str(Path(flash_qla_tl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def start(cache, *names, **options):
    """A process that has kernels made, with the cache in this folder."""
    env = environment(TILELANG_CACHE_DIR=str(cache))
    command = [sys.executable, "-c", BUILD, *names]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def said(process):
    out, err = process.communicate()
    assert process.returncode == 0, err
    return [line for line in out.splitlines() if line.startswith(("cached", "compiled"))]


def entries(cache):
    return [path.parent for path in Path(cache).rglob("executable.so") if ".staging" not in path.parts]


@needs_nvcc
def test_eight_processes_fill_a_cache_at_once(tmp_path):
    processes = [start(tmp_path, SMALL[0]) for _ in range(8)]
    assert all(len(said(process)) == 1 for process in processes)
    assert len(entries(tmp_path)) == 1
    assert said(start(tmp_path, SMALL[0])) == ["cached"]


@needs_nvcc
@pytest.mark.parametrize("name", ["executable.so", "manifest.json"])
def test_a_truncated_file_is_made_anew(filled, tmp_path, name):
    cache = shutil.copytree(filled[0], tmp_path / "cache")
    file = next(path / name for path in entries(cache) if "activations_fwd" in (path / "device_kernel.cu").read_text())
    size = file.stat().st_size
    os.truncate(file, size // 2)
    assert said(start(cache, *SMALL)) == ["compiled", "cached"]
    assert file.stat().st_size == size


def obey_permissions():
    """Root may write where it may not, until it gives that up (CAP_DAC_OVERRIDE); nobody else has anything to give up."""
    ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)


@needs_nvcc
def test_a_read_only_cache(filled, counted, tmp_path):
    """What is in it is taken; what is not is compiled for the process, which is told."""
    cache = shutil.copytree(filled[0], tmp_path / "cache")
    other = SMALL[0].replace("bfloat16", "float16")
    folders = [cache, *(path for path in cache.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        process = start(cache, *SMALL, other, preexec_fn=obey_permissions)
        assert said(process) == ["cached", "cached", "compiled ReadOnlyCache"]
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert len(entries(cache)) == 2


def test_a_failure_is_reported(monkeypatch, capsys, tmp_path):
    """Here that of a machine without nvcc: once, and by the exit status."""
    monkeypatch.setattr(warmup, "chosen", lambda *args: [VARIANTS[name] for name in SMALL])
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_main(monkeypatch, "--arch", "sm_90a", "--jobs", "1") == 1
    out, err = capsys.readouterr()
    assert out.count("failed") == 3 and "0 compiled, 0 cached, 2 failed" in out
    assert err.count('pip install "flash_qla_tl[nvcc]"') == 1


def test_what_cannot_be_kept_is_a_failure(monkeypatch):
    monkeypatch.setattr(warmup, "compiled", lambda *args: warnings.warn("in vain", target.ReadOnlyCache, stacklevel=2))
    assert warmup._compile(SMALL[0]).outcome == "ReadOnlyCache: in vain"


SERVE = """
import os, sys
compilers, started = {"nvcc", "ptxas", "g++", "gcc", "c++", "cc", "clang++"}, []
sys.addaudithook(lambda event, args: started.append(os.path.basename(args[0])) if event == "subprocess.Popen" else None)
from itertools import product
import torch
from flash_qla_tl import chunk_gated_delta_rule, chunk_gated_delta_rule_fwd, chunk_kda, testing

for i, (N, T, (H, HV)) in enumerate(product((1, 2, 7), (1, 64, 700, 4096), ((2, 4), (16, 64), (8, 8)))):
    size = {"lengths": [T] * N, "H": H, "HV": HV, "K": 128, "device": "cuda"}
    size["h0_dtype"] = (None, torch.float32, torch.bfloat16)[i % 3]
    more = {"scale": (None, 0.5)[i % 2], "output_final_state": i % 3 > 0, "backend": "tilelang"}
    args = testing.inputs(**size)
    chunk_gated_delta_rule(**args, **more)
    chunk_gated_delta_rule_fwd(**args, output_h=True)
    args = testing.kda_inputs(**size)
    chunk_kda(**args, **more)
    chunk_kda(**args, **more, return_intermediate_states=True)
torch.cuda.synchronize()
print("started:", *compilers.intersection(started))
"""


@pytest.mark.gpu
def test_a_server_compiles_nothing_after_the_warm_up():
    choice = ["--op", "gdn_fwd", "kda_fwd", "--dtype", "bfloat16", "--head-dim", "128"]
    subprocess.run([sys.executable, "-m", "flash_qla_tl.warmup", *choice], env=environment(), check=True)
    served = subprocess.run([sys.executable, "-c", SERVE], env=environment(), capture_output=True, text=True)
    assert served.returncode == 0, served.stderr
    assert served.stdout.splitlines()[-1] == "started:"
