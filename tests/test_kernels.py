"""One kernel at a time on the card, against torch."""

import pytest
import torch

import flash_qla_tl
from flash_qla_tl import testing
from flash_qla_tl.torch_chunked import chunked

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("B", "num_tokens", "H", "HV", "K"),
    [
        (1, 1, 1, 1, 128),  # one row in a block
        (2, 13, 3, 12, 64),  # a ragged block, heads that divide nothing
        (1, 300, 16, 64, 128),
    ],
)
def test_prepare(B, num_tokens, H, HV, K, dtype):
    from flash_qla_tl.kernels.gated_delta_rule.prepare import prepare

    q, k = (torch.randn(B, num_tokens, H, K, device="cuda").to(dtype) for _ in range(2))
    raw_g, raw_beta = (
        torch.randn(B, HV, num_tokens, device="cuda").to(x).transpose(1, 2) for x in (dtype, torch.float32)
    )
    A_log, dt_bias = torch.randn(HV, device="cuda"), torch.randn(HV, device="cuda")
    g, beta, q_norms, k_norms = prepare(q, k, raw_g, raw_beta, norms=True, A_log=A_log, dt_bias=dt_bias, beta_range=2.0)
    softplus = torch.nn.functional.softplus(raw_g.double() + dt_bias.double())
    assert testing.rel_l2(g, -A_log.double().exp() * softplus) < 1e-5
    assert testing.rel_l2(beta, 2 * raw_beta.double().sigmoid()) < 1e-5
    for norms, x in ((q_norms, q), (k_norms, k)):
        assert testing.rel_l2(norms, (x.double().square().sum(-1) + 1e-6).rsqrt()) < 1e-6
    g, beta, *norms = prepare(q, k, None, raw_beta, norms=False)
    assert norms == [None, None] and not g.any() and torch.equal(beta, raw_beta)


@pytest.mark.parametrize("VR", [64, 128])
@pytest.mark.parametrize("keys", ["same", "near"])
def test_inverse_of_correlated_keys(keys, VR, monkeypatch):
    """Keys that repeat make (I + L)^-1 a sum of large cancelling powers: A must not be one."""
    from flash_qla_tl.kernels.gated_delta_rule import fused_fwd

    monkeypatch.setattr(fused_fwd, "pick_config", lambda K, V, dtype, *_: fused_fwd.Config(K, V, VR, dtype, True))
    num_tokens, HV = 128, 2
    k = torch.nn.functional.normalize(torch.randn(1, 1, 1, 128, device="cuda"), dim=-1)
    if keys == "near":
        noise = torch.nn.functional.normalize(torch.randn(1, num_tokens, 1, 128, device="cuda"), dim=-1)
        k = torch.nn.functional.normalize(k + 0.1 * noise, dim=-1)
    k = k.expand(1, num_tokens, 1, 128).bfloat16().contiguous()
    v = torch.randn(1, num_tokens, HV, 128, device="cuda").bfloat16()
    beta = torch.ones(1, num_tokens, HV, device="cuda")
    A = fused_fwd.fused_fwd(k, k, v, None, beta, 1.0, output_A=True).A
    chunks = k[0, :, 0].double().view(-1, 64, 128)
    L = (chunks @ chunks.mT).tril(-1)
    expected = torch.linalg.inv(torch.eye(64, device="cuda", dtype=torch.float64) + L).reshape(num_tokens, 1, 64)
    assert testing.rel_l2(A[0], expected.expand(-1, HV, -1)) < 4e-3


# The gradients of the gates and of beta are sums in which much cancels.
GRADIENT_LIMITS = {"dq": 0.008, "dk": 0.008, "dv": 0.008, "dh0": 0.008, "db": 0.015, "dg": 0.015}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {"T": 64, "H": 1},  # one chunk
        {"B": 2, "T": 320, "H": 2, "HV": 8},
        {"T": 200, "H": 1, "HV": 8},  # a ragged chunk once round the ring of three
        {"T": 200, "H": 1, "HV": 8, "K": 64, "V": 128},
        {"T": 130, "H": 5, "HV": 5, "K": 128, "V": 64},
        {"H": 2, "HV": 4, "lengths": [0, 64, 1, 63, 100, 0, 72]},
        {"H": 1, "HV": 2, "lengths": [64 * n + 40 for n in range(7)]},
    ],
    ids=str,
)
@pytest.mark.parametrize("regime", ["model", "zero", "strong", "reset"])
def test_chunk_bwd(shape, regime, dtype):
    from flash_qla_tl.kernels.gated_delta_rule.chunk_bwd import chunk_bwd

    args = testing.inputs(**{"K": 128, **shape}, regime=regime, dtype=dtype, h0_dtype=torch.float32, device="cuda")
    q, k, v, g, beta, h0 = (args[name] for name in ("q", "k", "v", "g", "beta", "initial_state"))
    cu_seqlens, scale = args.get("cu_seqlens"), q.shape[-1] ** -0.5
    do, dht = torch.randn_like(v), torch.randn_like(h0)
    leaves = [x.double().requires_grad_() for x in (q, k, v, beta, g, h0)]
    exact = chunked(*leaves[:3], leaves[4], leaves[3], scale, leaves[5], cu_seqlens)
    grads = torch.autograd.grad((exact.o, exact.ht), leaves, (do.double(), dht.double()))
    fwd = flash_qla_tl.chunk_gated_delta_rule_fwd(q, k, v, g, beta, None, h0, cu_seqlens)

    def backward():
        saved = q, k, v, fwd.g_cumsum, beta, fwd.A, do
        return chunk_bwd(*saved, dht=dht, scale=scale, h0=h0, cu_seqlens=cu_seqlens)

    found = backward()
    for name, x, y in zip(("dq", "dk", "dv", "db", "dg", "dh0"), found, grads, strict=True):
        # Under strong decay dg itself nearly vanishes, and dh0 falls below the numbers of fp16.
        floor = {"dg": 1e-4, "dh0": 1e-6}.get(name, 0.0) * do.double().norm()
        assert x.isfinite().all() and (x - y).norm() <= GRADIENT_LIMITS[name] * max(y.norm(), floor), name
    assert all(torch.equal(x, y) for x, y in zip(found, backward(), strict=True))
