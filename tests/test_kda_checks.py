"""The refusals of Kimi Delta Attention that are its own; those it shares are named here once.

The messages that both operators have are in test_checks.py, and so is what holds for each of them:
nothing is launched or allocated before one.
"""

import math

import pytest
import torch
from test_checks import CU_SEQLENS, FLOATS, refused, zeros

from flash_qla_tl import chunk_kda, kda_fwd
from flash_qla_tl.compat import flash_kda
from flash_qla_tl.testing import kda_inputs

B, T, H, HV, K, V = 2, 8, 2, 4, 16, 8

CASES = {
    "q no tensor": (TypeError, {"q": [1.0]}, "q must be a torch.Tensor, got list"),
    "k dtype": (
        TypeError,
        {"k": zeros(B, T, H, K, dtype=torch.bfloat16)},
        "k must have dtype torch.float32, got torch.bfloat16",
    ),
    "HV % H": (
        ValueError,
        {"v": zeros(B, T, 3, V)},
        "v must have shape [B, T, HV, V] with HV a multiple of H = 2, got [2, 8, 3, 8]",
    ),
    "g None": (TypeError, {"g": None}, "g must be a torch.Tensor, got NoneType"),
    "g without channels": (
        ValueError,
        {"g": zeros(B, T, HV)},
        "g must have shape [B, T, HV, K] = [2, 8, 4, 16], got [2, 8, 4]",
    ),
    "g of the query heads": (
        ValueError,
        {"g": zeros(B, T, H, K)},
        "g must have shape [B, T, HV, K] = [2, 8, 4, 16], got [2, 8, 2, 16]",
    ),
    "g of V channels": (
        ValueError,
        {"g": zeros(B, T, HV, V)},
        "g must have shape [B, T, HV, K] = [2, 8, 4, 16], got [2, 8, 4, 8]",
    ),
    "g integer": (
        TypeError,
        {"g": zeros(B, T, HV, K, dtype=torch.int32)},
        f"g must have dtype {FLOATS}, got torch.int32",
    ),
    "beta heads": (ValueError, {"beta": zeros(B, T, H)}, "beta must have shape [B, T, HV] = [2, 8, 4], got [2, 8, 2]"),
    "A_log heads": (ValueError, {"A_log": zeros(HV + 1)}, "A_log must have shape [HV] = [4], got [5]"),
    "A_log as the weights have it": (
        ValueError,
        {"A_log": zeros(1, 1, HV, 1)},
        "A_log must have shape [HV] = [4], got [1, 1, 4, 1]",
    ),
    "dt_bias of heads": (
        ValueError,
        {"dt_bias": zeros(HV)},
        "dt_bias must have shape [HV, K] or [HV*K] = [4, 16] or [64], got [4]",
    ),
    "dt_bias transposed": (
        ValueError,
        {"dt_bias": zeros(K, HV)},
        "dt_bias must have shape [HV, K] or [HV*K] = [4, 16] or [64], got [16, 4]",
    ),
    "dt_bias integer": (
        TypeError,
        {"dt_bias": zeros(HV, K, dtype=torch.int64)},
        f"dt_bias must have dtype {FLOATS}, got torch.int64",
    ),
    "dt_bias device": (
        ValueError,
        {"dt_bias": zeros(HV, K, device="meta")},
        "dt_bias must be on device cpu as q is, got meta",
    ),
    "softplus without A_log": (
        ValueError,
        {"A_log": None, "lower_bound": None},
        "A_log must be a tensor with use_gate_in_kernel=True and no lower_bound, got None",
    ),
    "lower_bound a string": (TypeError, {"lower_bound": "-5"}, "lower_bound must be a number or None, got str"),
    "lower_bound positive": (ValueError, {"lower_bound": 1.0}, "lower_bound must be finite and at most 0, got 1.0"),
    "lower_bound infinite": (
        ValueError,
        {"lower_bound": -math.inf},
        "lower_bound must be finite and at most 0, got -inf",
    ),
    "lower_bound NaN": (ValueError, {"lower_bound": math.nan}, "lower_bound must be finite and at most 0, got nan"),
    "scale a tensor": (TypeError, {"scale": zeros(())}, "scale must be a number or None, got Tensor"),
    "B with cu_seqlens": (
        ValueError,
        {"cu_seqlens": torch.tensor([0, 8])},
        "q must have B = 1 with cu_seqlens, got B = 2",
    ),
}

CHUNK_ONLY = {
    "initial_state layout": (
        ValueError,
        {"initial_state": zeros(B, HV, V, K)},
        "initial_state must have shape [N, HV, K, V] = [2, 4, 16, 8], got [2, 4, 8, 16]",
    ),
    "chunk_size": (ValueError, {"chunk_size": 16}, "chunk_size must be 64, got 16"),
    "backend": (ValueError, {"backend": "triton"}, "backend must be one of auto, torch, tilelang, got 'triton'"),
    "allow_neg_eigval alone": (
        ValueError,
        {"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": True},
        "allow_neg_eigval must come with use_beta_sigmoid_in_kernel=True, got False",
    ),
    "safe_gate, no bound": (
        ValueError,
        {"safe_gate": True, "lower_bound": None},
        "lower_bound must be at least -5 and below 0 with safe_gate=True, got None",
    ),
    "safe_gate, low bound": (
        ValueError,
        {"safe_gate": True, "lower_bound": -5.5},
        "lower_bound must be at least -5 and below 0 with safe_gate=True, got -5.5",
    ),
    "safe_gate, no decay": (
        ValueError,
        {"safe_gate": True, "lower_bound": 0.0},
        "lower_bound must be at least -5 and below 0 with safe_gate=True, got 0.0",
    ),
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

FORWARD_ONLY = {
    "initial_state layout": (
        ValueError,
        {"initial_state": zeros(B, HV, K, V)},
        "initial_state must have shape [N, HV, V, K] = [2, 4, 8, 16], got [2, 4, 16, 8]",
    ),
    "final_state layout": (
        ValueError,
        {"final_state": zeros(B, HV, K, V)},
        "final_state must have shape [N, HV, V, K] = [2, 4, 8, 16], got [2, 4, 16, 8]",
    ),
    "final_state dtype": (
        TypeError,
        {"final_state": zeros(B, HV, V, K, dtype=torch.int8)},
        f"final_state must have dtype {FLOATS}, got torch.int8",
    ),
    "out dtype": (
        TypeError,
        {"out": zeros(B, T, HV, V, dtype=torch.bfloat16)},
        "out must have dtype torch.float32, got torch.bfloat16",
    ),
    "out shape": (
        ValueError,
        {"out": zeros(B, T, H, V)},
        "out must have shape [B, T, HV, V] = [2, 8, 4, 8], got [2, 8, 2, 8]",
    ),
    "out device": (
        ValueError,
        {"out": zeros(B, T, HV, V, device="meta")},
        "out must be on device cpu as q is, got meta",
    ),
}


def dense(call, **changes):
    args = kda_inputs(B, T, H, HV, K, V, dtype=torch.float32)
    if call is kda_fwd:
        args = {name: x for name, x in args.items() if not name.startswith("use_")} | {"scale": None}
    return {**args, **changes}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("call", [chunk_kda, kda_fwd])
def test_arguments(call, case):
    error, change, message = CASES[case]
    refused(error, message, call, dense(call, **change))


@pytest.mark.parametrize("case", CHUNK_ONLY)
def test_options(case):
    error, change, message = CHUNK_ONLY[case]
    refused(error, message, chunk_kda, dense(chunk_kda, **change))


@pytest.mark.parametrize("case", FORWARD_ONLY)
def test_outputs(case):
    error, change, message = FORWARD_ONLY[case]
    refused(error, message, kda_fwd, dense(kda_fwd, **change))


@pytest.mark.parametrize("case", CU_SEQLENS)
def test_cu_seqlens(case):
    error, change, message = CU_SEQLENS[case]
    args = kda_inputs(1, T, H, HV, K, V, dtype=torch.float32)
    refused(error, message, chunk_kda, {**args, "cu_seqlens": torch.tensor([0, 5, 8]), **change})


def test_flash_kda():
    args = dense(kda_fwd, out=zeros(B, T, HV, V), final_state=zeros(B, HV, K, V))
    message = "final_state must have shape [N, HV, V, K] = [2, 4, 8, 16], got [2, 4, 16, 8]"
    refused(ValueError, message, flash_kda.fwd, args)


def test_a_refused_call_writes_nothing():
    args = dense(kda_fwd, out=zeros(B, T, HV, V), final_state=zeros(B, HV, V, K), A_log=zeros(1))
    with pytest.raises(ValueError, match="^A_log must have"):
        kda_fwd(**args)
    assert not args["out"].any() and not args["final_state"].any()


def test_unknown_keyword():
    with pytest.raises(TypeError, match="use_qk_l2norm"):
        chunk_kda(**dense(chunk_kda), use_qk_l2norm=True)


@pytest.mark.parametrize(
    ("K", "V", "reason"),
    [
        (128, 128, "the kernels need CUDA tensors, got cpu"),
        (128, 64, "the kernels need head dims K = V = 128, got K=128, V=64"),
        (64, 128, "the kernels need head dims K = V = 128, got K=64, V=128"),
    ],
)
def test_backend_of_the_kernels(K, V, reason):
    args = {**kda_inputs(1, T, 1, 1, K, V), "backend": "tilelang"}
    refused(
        ValueError, f"backend must be 'auto' or 'torch' for these tensors, got 'tilelang': {reason}", chunk_kda, args
    )
