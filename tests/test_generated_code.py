"""The kernels as TileLang generates them, on the CPU, from the public functions down: every role of every warp, barrier by
barrier. What only the card has (timing, memory's order, registers) is not seen here."""

import contextlib
import importlib
import shutil

import pytest
import torch

pytest.importorskip("tilelang")

from generated import Kernel  # noqa: E402

from flash_qla_tl import chunk_gated_delta_rule, chunk_kda, gated_delta_rule  # noqa: E402
from flash_qla_tl.affine import Call, affine_pair, affine_pair_bwd  # noqa: E402
from flash_qla_tl.kernels.common import target  # noqa: E402
from flash_qla_tl.testing import inputs, kda_inputs, rel_l2  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler for the CPU")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MODULES = (
    "common.segment_starts",
    "gated_delta_rule.affine",
    "gated_delta_rule.chunk_bwd",
    "gated_delta_rule.chunk_fwd",
    "gated_delta_rule.chunk_intra",
    "gated_delta_rule.chunk_states",
    "gated_delta_rule.segment_states",
    "kda.fwd",
    "kda.prepare",
    "kda.segment_states",
    "kda.state_loop",
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A module's kernels by their arguments, each compiled once."""
    folder, kernels = tmp_path_factory.mktemp("generated"), {}

    def kernel(build, *args):
        key = id(build), args
        if key not in kernels:
            kernels[key] = Kernel(build, args, folder)
        return kernels[key]

    return kernel


@pytest.fixture
def card(compiled, monkeypatch):
    """CPU tensors go where those of a GPU with 132 SMs do. -> the module that decides how a forward is laid over it."""
    monkeypatch.setattr(target, "refusal", lambda *_: None)
    for name in MODULES:
        module = importlib.import_module(f"flash_qla_tl.kernels.{name}")
        for launcher in ("_kernel", "kernel"):
            if hasattr(module, launcher):
                monkeypatch.setattr(module, launcher, lambda *args, build=module.build: compiled(build, *args))
        for function, value in (("num_sms", 132), ("on_device", contextlib.nullcontext())):
            if hasattr(module, function):
                monkeypatch.setattr(module, function, lambda _, value=value: value)
    return importlib.import_module("flash_qla_tl.kernels.gated_delta_rule.chunk_fwd")


def exact(x, function=chunk_gated_delta_rule):
    """The same call in float64, by the torch path."""
    x = {name: y.double() if torch.is_tensor(y) and y.is_floating_point() else y for name, y in x.items()}
    return function(**x, output_final_state=True, backend="torch")


CASES = {
    "ragged": (dict(B=2, T=70, H=1, HV=2), BF16, 64, None),
    "packed": (dict(lengths=[100, 0, 64, 1, 30], H=1, HV=4), BF16, 64, None),  # a warp a head, and slots of no chunk
    "padded": (dict(lengths=[65, 60], T=200, H=1, HV=1), FP16, 64, None),
    "both halves": (dict(T=130, H=1, HV=3), FP16, 128, None),
    "head dims of 64": (dict(T=150, H=1, HV=2, K=64, V=64), BF16, 64, None),
    "segments": (dict(T=330, H=1, HV=2), BF16, 64, 2),
    "packed segments": (dict(lengths=[330, 0, 70], H=1, HV=2, K=64, V=64), BF16, 64, 1),
    "segments in fp16": (dict(T=130, H=1, HV=1, K=64, V=64), FP16, 64, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_forward(case, card, monkeypatch):
    """chunk_intra and chunk_fwd, and in front of segments segment_states and segment_starts."""
    shape, dtype, VR, segment = CASES[case]
    x = inputs(**{"K": 128, "V": 128, **shape}, dtype=dtype, h0_dtype=FP32)
    # A head that does not decay, and one that does.
    x["g"] = -torch.rand_like(x["g"]) * torch.tensor([0.0, 0.05, 2.0, 0.3])[: x["g"].shape[2]]
    name = str(dtype).removeprefix("torch.")
    pick = lambda K, V, dtype, HV, lengths, *_: (card.Config(K, VR, name, False), segment or lengths.longest)  # noqa: E731
    monkeypatch.setattr(card, "pick_config", pick)
    found = chunk_gated_delta_rule(**x, output_final_state=True, backend="tilelang")
    assert all(rel_l2(a, b) < 0.008 for a, b in zip(found, exact(x), strict=True))
    if case == "padded":
        assert not found[0][:, 125:].any()


def test_everything_inside(card):
    """Norm, gate and sigmoid in chunk_intra; states of a pool, in place, in bf16."""
    x = inputs(lengths=[70, 0, 33], H=1, HV=2, K=128, V=128, h0_dtype=FP32)
    pool = torch.randn(5, 2, 128, 128, dtype=BF16)
    x |= {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    x |= {"A_log": torch.randn(2), "dt_bias": torch.randn(2), "allow_neg_eigval": True, "state_v_first": True}
    x |= {"initial_state": pool, "initial_state_indices": torch.tensor([3, 1, -1], dtype=torch.int32)}
    expected, given = exact(x), pool.clone()
    o, ht = chunk_gated_delta_rule(**x, output_final_state=True, backend="tilelang")
    assert rel_l2(o, expected[0]) < 0.008 and rel_l2(ht[0], expected[1][0]) < 0.008
    chunk_gated_delta_rule(**x, output_final_state=True, inplace_final_state=True, backend="tilelang")
    assert rel_l2(pool[3], expected[1][0]) < 0.008
    assert torch.equal(pool[[0, 1, 2, 4]], given[[0, 1, 2, 4]])


@pytest.mark.parametrize("T", [128, 330])
def test_maps(T, card):
    """N, M (segment_states) and D (chunk_states) of sequences over several cards."""
    x = inputs(1, T, 1, 2, 128, 128, h0_dtype=FP32)
    h0 = x.pop("initial_state")
    x["g"] = -torch.rand_like(x["g"]) * torch.tensor([0.0, 2.0])
    x |= dict.fromkeys(("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"), False)
    x |= {"scale": 0.3, "A_log": None, "dt_bias": None, "backend": "auto"}
    ours = Call(chunk_gated_delta_rule, x, gated_delta_rule._MAPS)
    whole = Call(chunk_gated_delta_rule, x | {"backend": "torch"})
    for begin in (None, h0):
        pair = zip(affine_pair(ours, begin, True), affine_pair(whole, begin, True), strict=True)
        assert all(rel_l2(a, b) < 0.008 for a, b in pair)
    do, dht = torch.randn_like(x["v"]), torch.randn_like(h0[0])
    assert rel_l2(affine_pair_bwd(ours, do, dht), affine_pair_bwd(whole, do, dht)) < 0.008


@pytest.mark.parametrize("lengths", [None, [70, 0, 130]], ids=["dense", "packed"])
def test_backward(lengths, card):
    """chunk_states and chunk_bwd, through autograd; two value heads a key head."""
    leaves = ("q", "k", "v", "g", "beta", "initial_state")
    x = inputs(1, 100, 1, 2, 128, 128, lengths=lengths, h0_dtype=FP32)
    x["g"] = -torch.rand_like(x["g"]) * torch.tensor([0.0, 0.3])
    results = []
    for given, backend in ((x, "tilelang"), ({n: y.double() if n in leaves else y for n, y in x.items()}, "torch")):
        given = {n: y.clone().requires_grad_() if n in leaves else y for n, y in given.items()}
        out = chunk_gated_delta_rule(**given, output_final_state=True, backend=backend)
        if not results:
            weights = [torch.randn_like(y) for y in out]
        loss = [w.to(y.dtype) for w, y in zip(weights, out, strict=True)]
        results.append([*out, *torch.autograd.grad(out, [given[n] for n in leaves], loss)])
    for name, a, b in zip(("o", "ht", *leaves), *results, strict=True):
        assert rel_l2(a, b) < 0.015, name


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("regime", ["normal", "saturated"])
def test_kda(regime, dtype, card):
    """prepare and state_loop with everything inside; blocks that fade by more than a float holds, too."""
    x = kda_inputs(lengths=[70, 0, 20], H=1, HV=1, K=128, dtype=dtype, regime=regime, h0_dtype=FP32)
    found = chunk_kda(**x, output_final_state=True, backend="tilelang")
    assert all(rel_l2(a, b) < 0.008 for a, b in zip(found, exact(x, chunk_kda), strict=True))


def test_kda_in_segments(card, monkeypatch):
    fwd = importlib.import_module("flash_qla_tl.kernels.kda.fwd")
    x = kda_inputs(1, 330, 1, 1, 128, regime="normal", h0_dtype=FP32)
    monkeypatch.setattr(fwd, "pick_config", lambda dtype, *_: (fwd.Config(64, dtype, False), 2))
    found = chunk_kda(**x, output_final_state=True, backend="tilelang")
    assert all(rel_l2(a, b) < 0.008 for a, b in zip(found, exact(x, chunk_kda), strict=True))
