"""Every refusal and its message. Nothing is launched or allocated before one."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_qla_tl import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from flash_qla_tl.testing import inputs

B, T, H, HV, K, V = 2, 8, 2, 4, 16, 8


class NoWork(TorchDispatchMode):
    """Fails on any operation but reading the numbers of a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" in str(func) or "select" in str(func), f"{func} was run"
        return func(*args, **(kwargs or {}))


def refused(error, message, call, args):
    with NoWork(), pytest.raises(error) as raised:
        call(**args)
    assert str(raised.value) == message


def dense(**changes):
    return {**inputs(B, T, H, HV, K, V, dtype=torch.float32), **changes}


def packed(cu_seqlens, **changes):
    args = inputs(1, T, H, HV, K, V, dtype=torch.float32)
    return {**args, "cu_seqlens": torch.tensor(cu_seqlens), **changes}


def zeros(*shape, **kwargs):
    return torch.zeros(*shape, **kwargs)


FLOATS = "torch.float64 or torch.float32 or torch.bfloat16 or torch.float16"

CASES = {
    "q no tensor": (TypeError, {"q": [1.0]}, "q must be a torch.Tensor, got list"),
    "beta None": (TypeError, {"beta": None}, "beta must be a torch.Tensor, got NoneType"),
    "q integer": (
        TypeError,
        {"q": zeros(B, T, H, K, dtype=torch.int64)},
        f"q must have dtype {FLOATS}, got torch.int64",
    ),
    "q rank": (
        ValueError,
        {"q": zeros(B, T, K)},
        "q must have shape [B, T, H, K] with H and K at least 1, got [2, 8, 16]",
    ),
    "q no heads": (
        ValueError,
        {"q": zeros(B, T, 0, K)},
        "q must have shape [B, T, H, K] with H and K at least 1, got [2, 8, 0, 16]",
    ),
    "k dtype": (
        TypeError,
        {"k": zeros(B, T, H, K, dtype=torch.bfloat16)},
        "k must have dtype torch.float32, got torch.bfloat16",
    ),
    "k head dim": (
        ValueError,
        {"k": zeros(B, T, H, 32)},
        "k must have shape [B, T, H, K] = [2, 8, 2, 16], got [2, 8, 2, 32]",
    ),
    "k heads": (
        ValueError,
        {"k": zeros(B, T, HV, K)},
        "k must have shape [B, T, H, K] = [2, 8, 2, 16], got [2, 8, 4, 16]",
    ),
    "v dtype": (
        TypeError,
        {"v": zeros(B, T, HV, V, dtype=torch.float16)},
        "v must have dtype torch.float32, got torch.float16",
    ),
    "v rank": (
        ValueError,
        {"v": zeros(B, T, HV)},
        "v must have shape [B, T, HV, V] = [2, 8, HV, V] with HV and V at least 1, got [2, 8, 4]",
    ),
    "v tokens": (
        ValueError,
        {"v": zeros(B, 9, HV, V)},
        "v must have shape [B, T, HV, V] = [2, 8, HV, V] with HV and V at least 1, got [2, 9, 4, 8]",
    ),
    "HV % H": (
        ValueError,
        {"v": zeros(B, T, 3, V)},
        "v must have shape [B, T, HV, V] with HV a multiple of H = 2, got [2, 8, 3, 8]",
    ),
    "g heads": (ValueError, {"g": zeros(B, T, H)}, "g must have shape [B, T, HV] = [2, 8, 4], got [2, 8, 2]"),
    "g per channel": (
        ValueError,
        {"g": zeros(B, T, HV, K)},
        "g must have shape [B, T, HV] = [2, 8, 4], got [2, 8, 4, 16]",
    ),
    "g integer": (TypeError, {"g": zeros(B, T, HV, dtype=torch.int32)}, f"g must have dtype {FLOATS}, got torch.int32"),
    "g device": (ValueError, {"g": zeros(B, T, HV, device="meta")}, "g must be on device cpu as q is, got meta"),
    "beta heads": (ValueError, {"beta": zeros(B, T, H)}, "beta must have shape [B, T, HV] = [2, 8, 4], got [2, 8, 2]"),
    "initial_state layout": (
        ValueError,
        {"initial_state": zeros(B, HV, V, K)},
        "initial_state must have shape [N, HV, K, V] = [2, 4, 16, 8], got [2, 4, 8, 16]",
    ),
    "initial_state layout, V first": (
        ValueError,
        {"initial_state": zeros(B, HV, K, V), "state_v_first": True},
        "initial_state must have shape [N, HV, V, K] = [2, 4, 8, 16], got [2, 4, 16, 8]",
    ),
    "initial_state dtype": (
        TypeError,
        {"initial_state": zeros(B, HV, K, V, dtype=torch.int8)},
        f"initial_state must have dtype {FLOATS}, got torch.int8",
    ),
    "scale a tensor": (TypeError, {"scale": zeros(())}, "scale must be a number or None, got Tensor"),
    "B with cu_seqlens": (
        ValueError,
        {"cu_seqlens": torch.tensor([0, 8])},
        "q must have B = 1 with cu_seqlens, got B = 2",
    ),
}

PUBLIC_ONLY = {
    "chunk_size": (ValueError, {"chunk_size": 32}, "chunk_size must be 64, got 32"),
    "backend": (ValueError, {"backend": "triton"}, "backend must be one of auto, torch, tilelang, got 'triton'"),
    "allow_neg_eigval alone": (
        ValueError,
        {"allow_neg_eigval": True},
        "allow_neg_eigval must come with use_beta_sigmoid_in_kernel=True, got False",
    ),
    "gate without g": (
        ValueError,
        {"g": None, "use_gate_in_kernel": True, "A_log": zeros(HV)},
        "g must be a tensor with use_gate_in_kernel=True, got None",
    ),
    "gate without A_log": (
        ValueError,
        {"use_gate_in_kernel": True},
        "A_log must be a tensor with use_gate_in_kernel=True, got None",
    ),
    "A_log heads": (
        ValueError,
        {"use_gate_in_kernel": True, "A_log": zeros(HV + 1)},
        "A_log must have shape [HV] = [4], got [5]",
    ),
    "dt_bias heads": (
        ValueError,
        {"use_gate_in_kernel": True, "A_log": zeros(HV), "dt_bias": zeros(HV, K)},
        "dt_bias must have shape [HV] = [4], got [4, 16]",
    ),
    "head_first": (ValueError, {"head_first": True}, "head_first must be False (layout [B, T, H, K]), got True"),
    "cp_context": (TypeError, {"cp_context": object()}, "cp_context must be what build_cp_context returns, got object"),
    "both layout names": (
        ValueError,
        {"state_v_first": True, "transpose_state_layout": True},
        "transpose_state_layout must be None with state_v_first, got both",
    ),
    "cu_seqlens_cpu alone": (
        ValueError,
        {"cu_seqlens_cpu": torch.tensor([0, 8])},
        "cu_seqlens must be a tensor with cu_seqlens_cpu, got None",
    ),
}

CU_SEQLENS = {
    "list": (TypeError, {"cu_seqlens": [0, 8]}, "cu_seqlens must be a torch.Tensor, got list"),
    "float": (
        TypeError,
        {"cu_seqlens": torch.tensor([0.0, 8.0])},
        "cu_seqlens must have dtype torch.int32 or torch.int64, got torch.float32",
    ),
    "rank": (
        ValueError,
        {"cu_seqlens": torch.tensor([[0, 8]])},
        "cu_seqlens must have shape [N+1] with N at least 0, got [1, 2]",
    ),
    "nothing": (
        ValueError,
        {"cu_seqlens": torch.tensor([], dtype=torch.int64)},
        "cu_seqlens must have shape [N+1] with N at least 0, got [0]",
    ),
    "device": (
        ValueError,
        {"cu_seqlens": zeros(2, dtype=torch.int32, device="meta")},
        "cu_seqlens must be on device cpu as q is, got meta",
    ),
    "start": (ValueError, {"cu_seqlens": torch.tensor([1, 8])}, "cu_seqlens must start at 0, got 1"),
    "decreasing": (
        ValueError,
        {"cu_seqlens": torch.tensor([0, 5, 3, 8])},
        "cu_seqlens must not decrease, got 5 then 3 at 2",
    ),
    "past the end": (
        ValueError,
        {"cu_seqlens": torch.tensor([0, 5, 9])},
        "cu_seqlens must end at most at T = 8, got 9",
    ),
    "states": (
        ValueError,
        {"initial_state": zeros(1, HV, K, V)},
        "initial_state must have shape [N, HV, K, V] = [2, 4, 16, 8], got [1, 4, 16, 8]",
    ),
    "cpu copy, length": (
        ValueError,
        {"cu_seqlens_cpu": torch.tensor([0, 8])},
        "cu_seqlens_cpu must have shape [N+1] = [3], got [2]",
    ),
    "cpu copy, device": (
        ValueError,
        {"cu_seqlens_cpu": zeros(3, dtype=torch.int32, device="meta")},
        "cu_seqlens_cpu must be on device cpu, got meta",
    ),
    "cpu copy, start": (
        ValueError,
        {"cu_seqlens_cpu": torch.tensor([-1, 5, 8])},
        "cu_seqlens_cpu must start at 0, got -1",
    ),
    "cpu copy, values": (
        ValueError,
        {"cu_seqlens_cpu": torch.tensor([0, 4, 8])},
        "cu_seqlens_cpu must have the values of cu_seqlens = [0, 5, 8], got [0, 4, 8]",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("call", [chunk_gated_delta_rule, chunk_gated_delta_rule_fwd])
def test_arguments(call, case):
    error, change, message = CASES[case]
    refused(error, message, call, dense(**change))


@pytest.mark.parametrize("case", PUBLIC_ONLY)
def test_options(case):
    error, change, message = PUBLIC_ONLY[case]
    refused(error, message, chunk_gated_delta_rule, dense(**change))


@pytest.mark.parametrize("case", CU_SEQLENS)
@pytest.mark.parametrize("call", [chunk_gated_delta_rule, chunk_gated_delta_rule_fwd])
def test_cu_seqlens(call, case):
    error, change, message = CU_SEQLENS[case]
    refused(error, message, call, {**packed([0, 5, 8]), **change})


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("A", (B, T, HV, 32), "A must have shape [B, T, HV, 64] = [2, 8, 4, 64], got [2, 8, 4, 32]"),
        ("do", (B, T, H, V), "do must have shape [B, T, HV, V] = [2, 8, 4, 8], got [2, 8, 2, 8]"),
        ("dht", (B, HV, V, K), "dht must have shape [N, HV, K, V] = [2, 4, 16, 8], got [2, 4, 8, 16]"),
    ],
)
def test_backward(name, shape, message):
    args = dense(A=zeros(B, T, HV, 64), do=zeros(B, T, HV, V), dht=zeros(B, HV, K, V))
    refused(ValueError, message, chunk_gated_delta_rule_bwd, {**args, name: zeros(*shape)})


@pytest.mark.parametrize("name", ["A", "do"])
def test_backward_needs(name):
    args = dense(A=zeros(B, T, HV, 64), do=zeros(B, T, HV, V))
    message = f"{name} must be a torch.Tensor, got NoneType"
    refused(TypeError, message, chunk_gated_delta_rule_bwd, {**args, name: None})


def test_unknown_keyword():
    with pytest.raises(TypeError, match="use_qk_l2norm"):
        chunk_gated_delta_rule(**dense(), use_qk_l2norm=True)


def test_kernels_refuse_with_a_reason():
    with pytest.raises(ValueError, match=r"^backend must be 'auto' or 'torch' for these tensors"):
        chunk_gated_delta_rule(**dense(), backend="tilelang")


def test_deprecated_name_of_the_layout():
    args = dense(initial_state=torch.randn(B, HV, V, K))
    with pytest.warns(DeprecationWarning, match="use state_v_first"):
        old = chunk_gated_delta_rule(**args, output_final_state=True, transpose_state_layout=True)
    new = chunk_gated_delta_rule(**args, output_final_state=True, state_v_first=True)
    assert all(map(torch.equal, old, new))


@pytest.mark.gpu
@pytest.mark.parametrize("values", [[1, 5, 8], [0, 5, 3, 8], [0, 5, 9]])
def test_contents_on_the_gpu_on_request(values, monkeypatch):
    args = {name: x.cuda() for name, x in packed(values).items()}
    monkeypatch.setenv("FLASH_QLA_TL_CHECK", "1")
    with pytest.raises(ValueError, match="^cu_seqlens must"):
        chunk_gated_delta_rule(**args)
