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
        (1, 1, 1, 1, 128),  # one row in a chunk
        (2, 77, 3, 12, 64),  # a ragged chunk, heads that divide nothing
        (1, 192, 1, 8, 128),
        (1, 6400, 16, 64, 128),  # CTAs that take a whole group, a warp a head
        (1, 17000, 8, 16, 128),  # two warps a head
        (1, 9000, 2, 10, 64),  # more heads than warps
    ],
)
def test_chunk_intra(B, num_tokens, H, HV, K, dtype):
    """T with P^T, and the factors, with every activation inside, as chunk_fwd reads them."""
    from flash_qla_tl.kernels.common.gates import FACTORS
    from flash_qla_tl.kernels.gated_delta_rule.chunk_intra import chunk_intra

    q, k = (torch.randn(B, num_tokens, H, K, device="cuda").to(dtype) for _ in range(2))
    raw_g, raw_beta = (
        torch.randn(B, HV, num_tokens, device="cuda").to(x).transpose(1, 2) for x in (dtype, torch.float32)
    )
    A_log, dt_bias = torch.randn(HV, device="cuda") / 4 - 3, torch.randn(HV, device="cuda")
    slots, scale = B * -(-num_tokens // 64), 0.3
    o = torch.empty(B, num_tokens, HV, 64, dtype=dtype, device="cuda")
    options = dict(slots=slots, cu_seqlens=None, A=None, g_cumsum=None)
    TP, factors = chunk_intra(
        q, k, raw_g, raw_beta, scale, o, **options, use_qk_l2norm=True, A_log=A_log, dt_bias=dt_bias, beta_range=2.0
    )
    T = TP.tril(-1) + torch.diag_embed(factors[..., FACTORS["BETA"] : FACTORS["BETA"] + 64]).to(dtype)
    PT = TP.triu()
    norms = [(x.double().square().sum(-1) + 1e-6).rsqrt() for x in (q, k)]
    g = -A_log.double().exp() * torch.nn.functional.softplus(raw_g.double() + dt_bias.double())
    whole = lambda x: torch.nn.functional.pad(  # noqa: E731
        x.transpose(1, 2).double(), (0, 0) * (x.ndim - 3) + (0, -num_tokens % 64)
    ).unflatten(2, (-1, 64)).transpose(1, 2).flatten(0, 1)  # fmt: skip
    group = lambda x: x.repeat_interleave(HV // H, 2)  # noqa: E731
    r_q, r_k, q, k = (whole(group(x)) for x in (*norms, q, k))
    G, beta = whole(g).cumsum(-1), whole(2 * raw_beta.double().sigmoid())
    decay = (G[..., :, None] - G[..., None, :]).tril().exp().tril()
    normed = r_k[..., None] * k
    L = (beta[..., None] * (normed @ normed.mT)).tril(-1)
    A = torch.linalg.inv(torch.eye(64, device="cuda", dtype=torch.float64) + L)
    # With the norms of k moved to both ends: chunk_fwd multiplies by plain k.
    expected_T = decay * (r_k[..., :, None] * A * beta[..., None, :])
    valid = whole(torch.ones_like(raw_beta)) > 0
    inside = valid[..., :, None] & valid[..., None, :]
    assert testing.rel_l2(T * inside, expected_T) < (4e-3 if dtype == torch.bfloat16 else 1e-3)
    assert not (T * ~inside).any()
    P = scale * decay * ((r_q[..., None] * q) @ k.mT)
    assert testing.rel_l2(PT.mT * inside, P * inside) < (4e-3 if dtype == torch.bfloat16 else 1e-3)
    rows = lambda name: factors[..., FACTORS[name] : FACTORS[name] + 64].double() * valid  # noqa: E731
    assert testing.rel_l2(rows("NGAMMA"), -G.exp() * r_k * valid) < 1e-5
    assert testing.rel_l2(rows("QGAMMA"), scale * G.exp() * r_q * valid) < 1e-5
    assert testing.rel_l2(rows("DECAY"), (G[..., -1:] - G).exp() * valid) < 1e-5
    assert testing.rel_l2(factors[..., FACTORS["LAST"]], G[..., -1].exp()) < 1e-5


@pytest.mark.parametrize("keys", ["same", "near"])
def test_inverse_of_correlated_keys(keys):
    """Keys that repeat make (I + L)^-1 a sum of large cancelling powers: A must not be one."""
    from flash_qla_tl.kernels.gated_delta_rule.chunk_fwd import chunk_fwd

    num_tokens, HV = 128, 2
    k = torch.nn.functional.normalize(torch.randn(1, 1, 1, 128, device="cuda"), dim=-1)
    if keys == "near":
        noise = torch.nn.functional.normalize(torch.randn(1, num_tokens, 1, 128, device="cuda"), dim=-1)
        k = torch.nn.functional.normalize(k + 0.1 * noise, dim=-1)
    k = k.expand(1, num_tokens, 1, 128).bfloat16().contiguous()
    v = torch.randn(1, num_tokens, HV, 128, device="cuda").bfloat16()
    beta = torch.ones(1, num_tokens, HV, device="cuda")
    A = chunk_fwd(k, k, v, None, beta, 1.0, output_A=True).A
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "end"),
    [
        ((1, 1, 1, 1, 128), None),  # one row
        ((2, 77, 3, 12, 64), None),  # tiles that nothing fills
        ((1, 200, 2, 34, 128), 130),  # padding, and more heads than a warp has lanes
        ((1, 100, 2, 4, 128), 0),  # nothing but padding
        ((1, 20000, 16, 32, 128), None),
    ],
)
@pytest.mark.parametrize("raw_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_activations(shape, end, raw_dtype, dtype):
    """Forward and backward of every activation against float64, and to the bit against themselves."""
    from flash_qla_tl.kernels.gated_delta_rule.activations import activations_bwd, activations_fwd
    from flash_qla_tl.reference import activate

    B, num_tokens, H, HV, K = shape
    randn = lambda *s: torch.randn(*s, device="cuda")  # noqa: E731
    q, k = (randn(B, num_tokens, 3 * H, K).to(dtype)[:, :, i * H : i * H + H] for i in range(2))
    g, beta = (4 * randn(B, HV, num_tokens).to(raw_dtype).transpose(1, 2) for _ in range(2))
    A_log, dt_bias = randn(HV), randn(HV)
    q[0, 0, 0] = 0
    dq, dk = (randn(B, num_tokens, H, K).to(dtype) for _ in range(2))
    dg, db = randn(B, num_tokens, HV), randn(B, num_tokens, HV)
    cu_seqlens = None if end is None else torch.tensor([0, end // 2, end], device="cuda")
    for x in (q, k, g, beta):
        x[:, num_tokens if end is None else end :] = torch.nan
    for x in (dq, dk, dg, db):
        x[:, num_tokens if end is None else end :] = 0

    leaves = [x.double().requires_grad_() for x in (q, k, g, beta, A_log, dt_bias)]
    active = activate(
        *leaves[:4],
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=leaves[4],
        dt_bias=leaves[5],
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
    )
    expected = torch.autograd.grad(active, leaves, [x.double() for x in (dq, dk, dg, db)])

    options = {"cu_seqlens": cu_seqlens, "use_qk_l2norm": True, "beta_range": 2.0}
    forward = lambda: activations_fwd(q, k, beta, **options)  # noqa: E731
    backward = lambda: activations_bwd(  # noqa: E731
        q, k, g, beta, dq.clone(), dk.clone(), dg, db, **options, A_log=A_log, dt_bias=dt_bias
    )
    rounding = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
    found = forward()
    for x, y in zip(found, (active[0], active[1], active[3]), strict=True):
        assert x.isfinite().all() and testing.rel_l2(x[:, :end], y[:, :end]) <= rounding[x.dtype]
        assert end is None or not x[:, end:].any()
    assert all(torch.equal(x, y) for x, y in zip(found, forward(), strict=True))
    found = backward()
    for x, y in zip(found, expected, strict=True):
        assert x.isfinite().all() and testing.rel_l2(x, y) <= rounding[x.dtype]
        assert x.ndim == 1 or end is None or not x[:, end:].any()
    assert [x.dtype for x in found] == [dtype, dtype, raw_dtype, raw_dtype, torch.float32, torch.float32]
    assert all(torch.equal(x, y) for x, y in zip(found, backward(), strict=True))
