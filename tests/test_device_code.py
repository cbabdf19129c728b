"""The kernels' CUDA C++ on the CPU: a warpgroup emulated as fibers, so that what a warp does with a chunk is tested without a GPU."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang")

from flash_qla_tl.kernels.common.gates import LOG2E, ROWS, TABLE  # noqa: E402
from flash_qla_tl.kernels.gated_delta_rule import chunk_intra  # noqa: E402
from flash_qla_tl.testing import gate, rel_l2  # noqa: E402

HERE = Path(__file__).parent
COMPILER = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler for the CPU")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Arguments(ctypes.Structure):
    _fields_ = [(x, ctypes.c_void_p) for x in ("kk", "qk", "norm", "table", "diagonal", "tile", "A", "T", "P", "reach")]
    _fields_ += [("split", ctypes.c_int), ("valid", ctypes.c_int)]


@pytest.fixture(scope="module", params=DTYPES)
def emulation(request, tmp_path_factory):
    """chunk_intra.cuh for one dtype -> its call, and that dtype."""
    folder = tmp_path_factory.mktemp(request.param)
    source = chunk_intra.device_source(request.param)
    ptx = (Path(chunk_intra.__file__).parents[1] / "common" / "ptx.cuh").read_text()
    defines, _, code = source.partition(ptx)
    assert code and "asm" not in code, "PTX outside of ptx.cuh"
    defines += f"#define TABLE {TABLE}\n"
    parts = [defines, (HERE / "emulated_ptx.h").read_text(), code, (HERE / "emulated_chunk_intra.cpp").read_text()]
    text = "\n".join(part.replace("#pragma once", "").replace("#pragma unroll", "// unroll") for part in parts)
    (folder / "code.cpp").write_text(text)
    library = folder / "code.so"
    options = [
        "-O1",
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        "-fno-strict-aliasing",
        "-ffp-contract=off",
        "-w",
    ]
    subprocess.run([COMPILER, *options, "-o", str(library), str(folder / "code.cpp")], check=True)
    return ctypes.CDLL(str(library)).run, DTYPES[request.param]


def gate_table(g, beta):
    """As gates.write_gates fills it."""
    G = g.double().cumsum(0).float() * LOG2E
    table = torch.zeros(TABLE)
    before = torch.zeros(64)
    for b in (1, 2, 3):
        before[16 * b : 16 * b + 16] = end = G[16 * b - 1]
        table[ROWS[f"COL{b}"] :][: 16 * b] = torch.exp2(end - G[: 16 * b])
    for name, x in {"G": G, "BETA": beta, "ROW": torch.exp2(G - before)}.items():
        table[ROWS[name] :][:64] = x
    return table


KEYS = {
    "any": lambda k: k,
    "near": lambda k: k[:1] + 0.1 * k,
    "same": lambda k: k[:1].expand(64, -1),
    "of all lengths": lambda k: (k[:1] + k) * torch.logspace(-3, 2.4, 64)[torch.randperm(64), None],
}


@pytest.mark.parametrize("split", [1, 2, 4], ids=lambda x: f"{x} warps")
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize(
    ("regime", "keys"), [("model", x) for x in KEYS] + [(x, "any") for x in ("zero", "strong", "mixed", "reset")]
)
def test_chunk_intra(emulation, regime, keys, norms, split):
    """T, P^T and A of a chunk, and the bound of what it leaves of a state, as the kernel's warps make them."""
    run, dtype = emulation
    q, k = torch.randn(64, 128), KEYS[keys](torch.randn(64, 128))
    if not norms:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    q, k = q.to(dtype).double(), k.to(dtype).double()
    g, beta = gate(regime, 1, 64, 1).flatten(), 2 * torch.rand(64)
    norm_q, norm_k = ((x.square().sum(1) + 1e-6).rsqrt().float() if norms else torch.ones(64) for x in (q, k))
    valid = 64 if split == 1 else 50
    tensors = {
        "kk": (k @ k.T).float(),
        "qk": (q @ k.T).float(),
        "norm": torch.stack((norm_k, 0.3 * norm_q)),
        "table": gate_table(g, beta),
        "diagonal": beta * norm_k,
        "reach": torch.zeros(1),
    }
    tensors |= {x: torch.full((64, 64), torch.nan, dtype=dtype) for x in ("tile", "A", "T", "P")}
    tensors = {name: x.contiguous() for name, x in tensors.items()}
    run(ctypes.byref(Arguments(**{x: y.data_ptr() for x, y in tensors.items()}, split=split, valid=valid)))

    G, beta, r = g.double().cumsum(0), beta.double(), norm_k.double()[:, None]
    decay = (G[:, None] - G).tril().exp().tril()
    unit = r * k
    A = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + (beta[:, None] * (unit @ unit.T)).tril(-1))
    P = 0.3 * norm_q.double()[:, None] * decay * (q @ k.T)
    # The inverse is in fp16 either way; that of nearly equal keys is a sum in which much cancels.
    limit = 4e-3 if dtype == torch.bfloat16 or keys == "near" else 1e-3
    # Rows of T come times the norm of their key; each counts.
    assert rel_l2(tensors["T"] / r, decay * A * beta) < limit
    assert rel_l2(tensors["P"].T, P) < limit
    assert rel_l2(tensors["A"][:valid], A[:valid]) < limit and tensors["A"][valid:].isnan().all()
    growth = (1 - beta * unit.square().sum(1)).abs().clamp(min=1).log2().sum()
    assert tensors["reach"].item() == pytest.approx(G[-1].item() * LOG2E + growth.item(), rel=1e-4, abs=1e-4)


def test_a_key_that_is_not_a_number_has_no_reach(emulation):
    """Then nothing may be dropped: the bound is not a number either."""
    run, dtype = emulation
    kk = torch.eye(64)
    kk[5] = kk[:, 5] = torch.nan
    ones, tile = torch.ones(64), torch.zeros(64, 64, dtype=dtype)
    table, reach = gate_table(-ones, ones), torch.zeros(1)
    given = dict(
        kk=kk,
        qk=kk,
        norm=ones.repeat(2),
        table=table,
        diagonal=ones,
        tile=tile,
        T=tile.clone(),
        P=tile.clone(),
        reach=reach,
    )
    run(ctypes.byref(Arguments(**{x: y.data_ptr() for x, y in given.items()}, split=1, valid=64)))
    assert reach.isnan()
