"""Long sequences in segments that run at the same time: the same numbers but for rounding, whatever the heads' decay."""

import pytest
import torch

from flash_qla_tl import chunk_gated_delta_rule, chunk_gated_delta_rule_fwd
from flash_qla_tl.testing import inputs, rel_l2

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
