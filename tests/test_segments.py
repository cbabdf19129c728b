"""Long sequences in segments that run at the same time: the same numbers but for rounding, whatever the heads' decay."""

import pytest
import torch

from flash_qla_tl import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    chunk_kda,
    kda_fwd,
)
from flash_qla_tl.testing import inputs, kda_inputs, rel_l2
from flash_qla_tl.torch_chunked import chunked

pytestmark = pytest.mark.gpu
LIMIT = 0.008
SHAPES = {
    "dense": dict(B=2, T=700, H=2, HV=4),
    "whole segments": dict(B=1, T=768, H=1, HV=2),
    "packed": dict(H=2, HV=6, lengths=[300, 0, 64, 650, 1, 128, 129]),
    "padded": dict(H=1, HV=2, lengths=[500, 70], T=640),
    "K=64": dict(B=1, T=500, H=1, HV=2, K=64, V=128),
    "V=64": dict(B=1, T=500, H=1, HV=2, K=128, V=64),
}


@pytest.fixture(params=[1, 2, 3])
def segments(request, monkeypatch):
    """Segments of so many chunks, whatever the shape, in the forward and in the backward."""
    from flash_qla_tl.kernels.gated_delta_rule import chunk_fwd, chunk_states

    def shortened(pick):
        def short(*args):
            config, chunks = pick(*args)
            return config, request.param if args[-1] else chunks

        return short

    for kernel in (chunk_fwd, chunk_states):
        monkeypatch.setattr(kernel, "pick_config", shortened(kernel.pick_config))


def gates(x, decay):
    """Log decay a token: none, so slow that nothing may be dropped, fast, or a head of each."""
    g = x["g"]
    if decay == "none":
        x["g"] = None
        return
    rate = {"slow": [0.003], "fast": [2.0], "mixed": [0.0, 2.0, 0.003, 0.15]}[decay]
    rates = torch.tensor(rate, device=g.device).repeat(g.shape[2])[: g.shape[2]]
    x["g"] = -rates * torch.rand_like(g)


@pytest.mark.parametrize("decay", ["none", "slow", "fast", "mixed"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_same_as_whole(segments, shape, decay, dtype):
    x = inputs(**{"K": 128, **SHAPES[shape]}, h0_dtype=torch.float32, dtype=dtype, device="cuda")
    gates(x, decay)
    if shape == "padded":  # what no sequence has may be anything
        for name in ("q", "k", "v", "g", "beta"):
            if x[name] is not None:
                x[name][:, 570:] = torch.nan
    o, ht = chunk_gated_delta_rule(**x, output_final_state=True)
    whole = chunk_gated_delta_rule(**x, output_final_state=True, auto_cp=False)
    exact = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in x.items()}
    assert not o[:, 570:].any() or shape != "padded"
    truth = chunk_gated_delta_rule(**exact, output_final_state=True, backend="torch")
    for ours, unsplit, expected in zip((o, ht), whole, truth, strict=True):
        assert rel_l2(ours, expected) < max(LIMIT, 1.2 * rel_l2(unsplit, expected))
        # Each is as far from the truth, in its own direction.
        assert rel_l2(ours, unsplit) < 6e-3
    again = chunk_gated_delta_rule(**x, output_final_state=True)
    assert torch.equal(again[0], o) and torch.equal(again[1], ht)


# The gradients of the gates and of beta are sums in which much cancels.
GRADIENT_LIMITS = {"dq": LIMIT, "dk": LIMIT, "dv": LIMIT, "db": 0.015, "dg": 0.015, "dh0": LIMIT}


def backward(x, do, dht):
    """-> a function of auto_cp that gives dq, dk, dv, db, dg, dh0 from one forward, which is not split."""
    fwd = chunk_gated_delta_rule_fwd(**x, auto_cp=False)
    args = {**x, "g": None if x["g"] is None else fwd.g_cumsum, "A": fwd.A, "do": do, "dht": dht}
    return lambda auto_cp=True: chunk_gated_delta_rule_bwd(**args, auto_cp=auto_cp)


def exact_gradients(x, do, dht):
    """The same in float64."""
    names = [n for n in ("q", "k", "v", "beta", "g", "initial_state") if x.get(n) is not None]
    leaves = {n: x[n].double().requires_grad_() for n in names}
    q, k, v, beta, g, h0 = (leaves.get(n) for n in ("q", "k", "v", "beta", "g", "initial_state"))
    mT = x.get("state_v_first", False)
    out = chunked(q, k, v, g, beta, q.shape[3] ** -0.5, h0.mT if mT and h0 is not None else h0, x.get("cu_seqlens"))
    pairs = [(out.o, do.double())] + ([] if dht is None else [(out.ht.mT if mT else out.ht, dht.double())])
    outputs, weights = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, list(leaves.values()), weights)
    found = dict(zip(names, found, strict=True))
    return [found.get(n) for n in ("q", "k", "v", "beta", "g", "initial_state")]


def hold_against(grads, whole, truth, do):
    for (name, limit), ours, unsplit, expected in zip(GRADIENT_LIMITS.items(), grads, whole, truth, strict=True):
        if expected is None:
            assert ours is None and unsplit is None
            continue
        # Under strong decay dg itself nearly vanishes, and dh0 falls below the numbers of fp16.
        size = max(expected.norm(), {"dg": 1e-4, "dh0": 1e-6}.get(name, 0.0) * do.double().norm())
        error, error_whole = ((x - expected).norm() / size for x in (ours, unsplit))
        assert error < max(limit, 1.2 * error_whole), name
        # Each is as far from the truth, in its own direction.
        assert (ours - unsplit).double().norm() / size < limit, name


@pytest.mark.parametrize("decay", ["none", "slow", "fast", "mixed"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_same_as_whole(segments, shape, decay, dtype):
    x = inputs(**{"K": 128, **SHAPES[shape]}, h0_dtype=torch.float32, dtype=dtype, device="cuda")
    gates(x, decay)
    do, dht = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    truth = exact_gradients(x, do, dht)
    if shape == "padded":  # what no sequence has may be anything
        for y in (x["q"], x["k"], x["v"], x["g"], x["beta"], do):
            if y is not None:
                y[:, 570:] = torch.nan
    run = backward(x, do, dht)
    grads, whole = run(), run(auto_cp=False)
    if shape == "padded":
        assert all(y is None or not y[:, 570:].any() for y in grads[:5])
        do = do[:, :570]
    hold_against(grads, whole, truth, do)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(grads, run(), strict=True))


@pytest.mark.parametrize(
    "options",
    [
        dict(h0_dtype=None, dht=False),
        dict(h0_dtype=None, dht=True),
        dict(h0_dtype=torch.bfloat16, dht=False, cu_dtype=torch.int64),
        dict(h0_dtype=torch.float16, dht=True, state_v_first=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [{}, {"K": 64, "V": 64}, {"K": 64, "V": 128}], ids=str)
def test_gradients_by_options(segments, options, size):
    """Which states there are, and in what layout; three sequences, two of them longer than a segment."""
    given = {name: y for name, y in options.items() if name != "dht"}
    x = inputs(H=2, HV=4, lengths=[300, 0, 450], **{"K": 128, **size}, **given, device="cuda")
    gates(x, "mixed")
    V, K = x["v"].shape[3], x["k"].shape[3]
    state = (3, 4, V, K) if options.get("state_v_first") else (3, 4, K, V)
    do, dht = torch.randn_like(x["v"]), torch.randn(state, device="cuda") if options["dht"] else None
    run = backward(x, do, dht)
    hold_against(run(), run(auto_cp=False), exact_gradients(x, do, dht), do)


@pytest.mark.parametrize("regime", ["zero", "strong", "reset", "mixed"])
def test_gradients_by_gate(segments, regime):
    x = inputs(1, 500, 1, 4, 128, regime=regime, h0_dtype=torch.float32, device="cuda")
    do, dht = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    run = backward(x, do, dht)
    hold_against(run(), run(auto_cp=False), exact_gradients(x, do, dht), do)


def test_gradients_beside_a_sequence_of_nan(segments):
    """The last chunk of a sequence is ragged, and what lies behind it is the next one's."""
    x = inputs(H=1, HV=2, K=128, lengths=[300, 400, 321], h0_dtype=torch.float32, device="cuda")
    gates(x, "mixed")
    do, dht = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    expected = backward(x, do, dht)()
    for y in (x["q"], x["k"], x["v"], x["g"], x["beta"], do):
        y[:, 300:700] = torch.nan
    grads = backward(x, do, dht)()
    for ours, theirs in zip(grads[:5], expected, strict=False):
        assert torch.equal(ours[:, :300], theirs[:, :300]) and torch.equal(ours[:, 700:], theirs[:, 700:])
    assert torch.equal(grads.dh0[[0, 2]], expected.dh0[[0, 2]])


def test_training_with_activations(segments):
    x = inputs(H=2, HV=4, K=128, lengths=[300, 0, 450], normalised=False, h0_dtype=torch.float32, device="cuda")
    x |= {
        "g": torch.randn_like(x["g"]) - 4,
        "A_log": torch.zeros(4, device="cuda"),
        "dt_bias": torch.zeros(4, device="cuda"),
    }
    x |= {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    leaves = {name: y.requires_grad_() for name, y in x.items() if torch.is_tensor(y) and y.is_floating_point()}

    def step(**options):
        o, ht = chunk_gated_delta_rule(**x, output_final_state=True, **options)
        return torch.autograd.grad(o.float().square().sum() + ht.square().sum(), list(leaves.values()))

    whole = step(auto_cp=False)
    for options in ({}, {"cu_seqlens_cpu": x["cu_seqlens"].cpu()}):
        for name, ours, unsplit in zip(leaves, step(**options), whole, strict=True):
            assert rel_l2(ours, unsplit) < (0.015 if name in ("g", "beta", "A_log", "dt_bias") else LIMIT), name


def test_activations_inside(segments):
    x = inputs(1, 700, 2, 4, 128, normalised=False, device="cuda")
    x |= {
        "g": torch.randn_like(x["g"]) - 4,
        "A_log": torch.zeros(4, device="cuda"),
        "dt_bias": torch.zeros(4, device="cuda"),
    }
    x |= {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    ours, whole = (chunk_gated_delta_rule(**x, output_final_state=True, auto_cp=auto_cp) for auto_cp in (True, False))
    assert all(rel_l2(a, b) < 6e-3 for a, b in zip(ours, whole, strict=True))


def test_states_of_chunks_and_training(segments):
    x = inputs(H=2, HV=4, K=128, lengths=[300, 0, 650], h0_dtype=torch.bfloat16, state_v_first=True, device="cuda")
    gates(x, "mixed")
    call = lambda **o: chunk_gated_delta_rule_fwd(**x, output_h=True, **o)  # noqa: E731
    for ours, whole in zip(call(), call(auto_cp=False), strict=True):
        assert rel_l2(ours, whole) < 6e-3


def test_pool_in_place(segments):
    x = inputs(H=2, HV=4, K=128, lengths=[300, 130, 650], device="cuda")
    gates(x, "slow")
    x |= {"initial_state_indices": torch.tensor([3, -1, 1], dtype=torch.int32, device="cuda")}
    pool = torch.randn(5, 4, 128, 128, device="cuda").to(torch.bfloat16)
    pools = [pool.clone() for _ in range(2)]
    for p, auto_cp in zip(pools, (True, False), strict=True):
        chunk_gated_delta_rule(**x, initial_state=p, inplace_final_state=True, auto_cp=auto_cp)
    assert rel_l2(pools[0], pools[1]) < 6e-3
    assert torch.equal(pools[0][[0, 2, 4]], pool[[0, 2, 4]])


def test_training_step_in_a_graph(segments):
    """Captured once; replayed with other values in the same tensors, the boundaries among them."""

    def step(x):
        leaves = {name: y.detach().requires_grad_() for name, y in x.items() if y.is_floating_point()}
        outputs = chunk_gated_delta_rule(**{**x, **leaves}, output_final_state=True)
        loss = sum(y.float().square().sum() for y in outputs)
        return *(y.detach() for y in outputs), *torch.autograd.grad(loss, list(leaves.values()))

    x, other = (
        inputs(H=1, HV=2, K=128, T=900, lengths=lengths, h0_dtype=torch.float32, device="cuda")
        for lengths in ([500, 0, 63, 300], [1, 130, 700, 0])
    )
    expected = step(x)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x)
    for source, results in ((x, expected), (other, step(other))):
        for name, y in source.items():
            x[name].copy_(y)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, results))


def test_keys_that_grow_a_state(segments):
    """A state can grow behind keys longer than sqrt(2 / beta), decay or not: nothing of it may be dropped."""
    x = inputs(B=1, T=400, H=1, HV=2, K=128, h0_dtype=torch.float32, device="cuda")
    x["k"] = x["k"] * 1.7
    x["beta"] = torch.ones_like(x["beta"])
    x["g"] = torch.full_like(x["g"], -0.6)  # 2^-55 a chunk of decay alone
    o, ht = chunk_gated_delta_rule(**x, output_final_state=True)
    whole = chunk_gated_delta_rule(**x, output_final_state=True, auto_cp=False)
    assert rel_l2(o, whole[0]) < 1e-2 and rel_l2(ht, whole[1]) < 1e-2
    do, dht = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    run = backward(x, do, dht)
    for name, ours, unsplit in zip(GRADIENT_LIMITS, run(), run(auto_cp=False), strict=True):
        assert rel_l2(ours, unsplit) < 2e-2, name


def test_batch_does_not_matter_without():
    """With auto_cp=False, and the sizes at which it would split, a sequence's result is that of the sequence alone."""
    x = inputs(H=4, HV=8, K=128, lengths=[8192, 1000], device="cuda")
    alone = {k: v[:, :8192] if torch.is_tensor(v) and v.ndim > 1 else v for k, v in x.items()}
    alone["cu_seqlens"] = None
    assert torch.equal(
        chunk_gated_delta_rule(**x, auto_cp=False)[0][:, :8192], chunk_gated_delta_rule(**alone, auto_cp=False)[0]
    )
    o = chunk_gated_delta_rule(**x)[0]
    assert rel_l2(o, chunk_gated_delta_rule(**x, auto_cp=False)[0]) < 6e-3
    do = torch.randn_like(x["v"])
    both, one = backward(x, do, None), backward(alone, do[:, :8192], None)
    for name, ours, theirs, split in zip(GRADIENT_LIMITS, both(auto_cp=False), one(auto_cp=False), both(), strict=True):
        if ours is not None:
            assert torch.equal(ours[:, :8192], theirs), name
            assert rel_l2(split, ours) < GRADIENT_LIMITS[name], name


@pytest.mark.parametrize("cu", [[0, 5000, 2000], [700, 100, 90000], [-5, 3, 640], [640, 640, 640], [500, 640, 0]])
def test_contents_that_make_no_sense(segments, cu):
    """Nothing outside of the tensors is touched, and nothing hangs."""
    x = inputs(B=1, T=640, H=1, HV=2, K=128, device="cuda")
    x["cu_seqlens"] = torch.tensor(cu, dtype=torch.int32, device="cuda")
    chunk_gated_delta_rule(**x, output_final_state=True)
    fwd = chunk_gated_delta_rule_fwd(**x, output_h=True)
    chunk_gated_delta_rule_bwd(**{**x, "g": fwd.g_cumsum}, A=fwd.A, do=torch.ones_like(fwd.o), dht=fwd.final_state)
    torch.cuda.synchronize()


# Kimi Delta Attention


@pytest.fixture(params=[(1, 64), (2, 128), (3, 64), (3, 128)], ids=str)
def split(request, monkeypatch):
    """Kimi Delta Attention in segments of so many chunks, a CTA carrying so many rows; split(False): whole from now on."""
    from flash_qla_tl.kernels.kda import fwd
    from flash_qla_tl.kernels.kda.state_loop import Config

    chunks, rows = request.param

    def choose(split):
        def pick(dtype, HV, lengths, num_sms, emit):
            return Config(64 if emit else rows, dtype, emit), chunks if split else max(lengths.longest, 1)

        monkeypatch.setattr(fwd, "pick_config", pick)

    choose(True)
    return choose


def kda(x, **options):
    return chunk_kda(**x, output_final_state=True, backend="tilelang", **options)


def channel_gates(x, decay):
    """Log decay a token and channel: none, so slow that every segment counts, fast, heads of each, or channels of each."""
    g = x["g"]
    rates = {"none": [0.0], "slow": [0.003], "fast": [2.0], "heads": [0.0, 2.0, 0.003, 0.15]}.get(decay)
    if rates is None:
        rate = torch.logspace(-5, 1, g.shape[3], device=g.device)
        rate = torch.stack([rate[torch.randperm(len(rate), device=g.device)] for _ in range(g.shape[2])])
    else:
        rate = torch.tensor(rates, device=g.device).repeat(g.shape[2])[: g.shape[2], None]
    x["g"] = -rate * torch.rand_like(g)


def gated(*args, decay="channels", **options):
    options = {"K": 128, "h0_dtype": torch.float32, "device": "cuda", **options}
    x = kda_inputs(*args, regime="zero", activations=False, **options)
    channel_gates(x, decay)
    return x


@pytest.mark.parametrize("decay", ["none", "slow", "fast", "heads", "channels"])
@pytest.mark.parametrize("shape", [name for name in SHAPES if "=" not in name])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kda_same_as_whole(split, shape, decay, dtype):
    x = gated(**SHAPES[shape], decay=decay, dtype=dtype)
    exact = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in x.items()}
    truth = chunk_kda(**exact, output_final_state=True, backend="torch")
    if shape == "padded":  # what no sequence has may be anything
        for name in ("q", "k", "v", "g", "beta"):
            x[name][:, 570:] = torch.nan
    found, again = kda(x), kda(x)
    assert all(map(torch.equal, found, again))
    assert not found[0][:, 570:].any() or shape != "padded"
    split(False)
    for ours, whole, expected in zip(found, kda(x), truth, strict=True):
        assert rel_l2(ours, expected) < max(LIMIT, 1.2 * rel_l2(whole, expected))
        # Each is as far from the truth, in its own direction.
        assert rel_l2(ours, whole) < 6e-3


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("lengths", [None, [300, 0, 650]])
def test_kda_states_of_chunks(split, lengths, state_v_first):
    x = gated(2, 300, 2, 4, lengths=lengths, h0_dtype=torch.bfloat16, state_v_first=state_v_first)
    if lengths:
        x["cu_seqlens_cpu"] = x["cu_seqlens"].cpu()
    found = kda(x, return_intermediate_states=True)
    split(False)
    for ours, whole in zip(found, kda(x, return_intermediate_states=True), strict=True):
        assert rel_l2(ours, whole) < 6e-3


@pytest.mark.parametrize("state_v_first", [False, True])
def test_kda_pool_in_place(split, state_v_first):
    x = gated(H=2, HV=4, lengths=[300, 130, 0, 650], decay="slow", h0_dtype=None, state_v_first=state_v_first)
    x |= {"initial_state_indices": torch.tensor([3, -1, 0, 1], dtype=torch.int32, device="cuda")}
    pool = torch.randn(5, 4, 128, 128, device="cuda").to(torch.bfloat16)
    pools = [pool.clone() for _ in range(2)]
    outputs = []
    for p in pools:
        outputs += [chunk_kda(**x, initial_state=p, inplace_final_state=True, backend="tilelang")[0]]
        split(False)
    assert rel_l2(*pools) < 6e-3 and rel_l2(*outputs) < 6e-3
    assert torch.equal(pools[0][[0, 2, 4]], pool[[0, 2, 4]])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kda_forward_into_what_it_is_given(split, state_dtype):
    """Everything inside, a strided result, the state in place."""
    x = kda_inputs(
        H=2, T=1000, lengths=[500, 1, 0, 400], K=128, h0_dtype=state_dtype, state_v_first=True, device="cuda"
    )
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "lower_bound", "cu_seqlens")
    found = []
    for _ in range(2):
        wide = torch.full((3, 1000, 4, 128), 7.0, dtype=torch.bfloat16, device="cuda")
        state = x["initial_state"].clone()
        given = {name: x[name] for name in names}
        kda_fwd(**given, scale=0.1, out=wide[1:2, :, 1:3], initial_state=state, final_state=state)
        assert (wide[::2] == 7).all() and (wide[1, :, ::3] == 7).all() and not wide[1, 901:, 1:3].any()
        found.append((wide[1, :, 1:3], state))
        split(False)
    assert all(rel_l2(ours, whole) < 6e-3 for ours, whole in zip(*found, strict=True))
    assert torch.equal(found[0][1][2], x["initial_state"][2])


def test_kda_in_a_graph(split):
    """Captured once; replayed with other values in the same tensors, the boundaries among them."""
    x, other = (gated(H=1, HV=2, T=900, lengths=lengths) for lengths in ([500, 0, 63, 300], [1, 130, 700, 0]))
    expected = [kda(y, return_intermediate_states=True) for y in (x, other)]  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kda(x, return_intermediate_states=True)
    for source, results in zip(({**x}, other), expected, strict=True):
        for name, y in source.items():
            x[name].copy_(y)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, results))


@pytest.mark.parametrize(
    "cu", [[0, 5000, 2000], [700, 100, 90000], [-5, 3, 640], [640, 640, 640], [500, 640, 0], [5, 1 << 30, -7]]
)
def test_kda_contents_that_make_no_sense(split, cu):
    """Nothing outside of the tensors is touched, and nothing hangs."""
    x = gated(1, 640, 1, 2, h0_dtype=None)
    x["cu_seqlens"] = torch.tensor(cu, dtype=torch.int32, device="cuda")
    wide = torch.full((3, 640, 2, 128), 7.0, dtype=torch.bfloat16, device="cuda")
    chunk_kda(**x, out=wide[1:2], output_final_state=True, return_intermediate_states=True, backend="tilelang")
    chunk_kda(**x, out=wide[1:2], output_final_state=True, backend="tilelang")
    torch.cuda.synchronize()
    assert (wide[::2] == 7).all()


@pytest.mark.parametrize("lengths", [[8192], [16000, 3, 384]], ids=str)
def test_kda_splits_by_itself(monkeypatch, lengths):
    """Where that is picked, without a word from the caller; of several lengths the host has to know them."""
    from flash_qla_tl.kernels.kda import fwd

    x = gated(H=2, HV=4, lengths=lengths, decay="slow")
    x["cu_seqlens_cpu"] = x["cu_seqlens"].cpu()
    picked = []

    def whole(dtype, HV, lengths, num_sms, emit):
        config, chunks = pick(dtype, HV, lengths, num_sms, emit)
        picked.append(chunks < lengths.longest)
        return config, lengths.longest

    found, pick = kda(x), fwd.pick_config
    monkeypatch.setattr(fwd, "pick_config", whole)
    assert all(rel_l2(ours, whole) < 6e-3 for ours, whole in zip(found, kda(x), strict=True))
    assert picked == [True]
