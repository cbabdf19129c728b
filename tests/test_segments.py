"""Long sequences in segments that run at the same time: the same numbers but for rounding, whatever the heads' decay."""

import pytest
import torch

from flash_qla_tl import chunk_gated_delta_rule, chunk_gated_delta_rule_fwd, chunk_kda, kda_fwd
from flash_qla_tl.testing import inputs, kda_inputs, rel_l2

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
    """Segments of so many chunks, whatever the shape."""
    from flash_qla_tl.kernels.gated_delta_rule import chunk_fwd

    pick = chunk_fwd.pick_config

    def short(*args):
        config, chunks = pick(*args)
        return config, request.param if args[-1] else chunks

    monkeypatch.setattr(chunk_fwd, "pick_config", short)


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


@pytest.mark.parametrize("cu", [[0, 5000, 2000], [700, 100, 90000], [-5, 3, 640], [640, 640, 640], [500, 640, 0]])
def test_contents_that_make_no_sense(segments, cu):
    """Nothing outside of the tensors is touched, and nothing hangs."""
    x = inputs(B=1, T=640, H=1, HV=2, K=128, device="cuda")
    x["cu_seqlens"] = torch.tensor(cu, dtype=torch.int32, device="cuda")
    chunk_gated_delta_rule(**x, output_final_state=True)
    chunk_gated_delta_rule_fwd(**x, output_h=True)
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
