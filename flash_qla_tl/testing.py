"""Inputs, errors and error budgets, shared by the tests, the benchmarks and ``python -m``."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_qla_tl.reference import activate
from flash_qla_tl.torch_chunked import chunked
from flash_qla_tl.torch_kda import chunked_kda
from flash_qla_tl.utils.norm import l2norm

GATES = ("model", "zero", "strong", "mixed", "reset")
KDA_LOWER_BOUND_GATES = ("saturated", "faint", "normal", "steep", "bias 2", "bias -2")
KDA_GATES = (*KDA_LOWER_BOUND_GATES, "softplus", "zero", "reset", "half", "spike")

# The largest relative errors we accept of 16-bit kernels, whatever the emulation says.
CAP = 0.008
CAP_NEG_EIGVAL = 0.012
# A gradient may always be this far off. Those of gates and of beta are sums in which much cancels.
GRADIENT_FLOOR = 0.008
GATE_GRADIENT_FLOOR = 0.015
L2_BYTES = 64 << 20  # no less than any Hopper GPU has


def gate(regime: str, *shape: int, device: torch.device | str = "cpu") -> Tensor:
    """Log decays ``[B, T, HV]`` fp32 of a named regime.

    - "model": as a trained model gives them, ``logsigmoid(randn) / 16``, every fourth head 0.
    - "zero": no decay.
    - "strong": -20 a token.
    - "mixed": each token of each head from one of the three above.
    - "reset": "model" with -1000 at 5% of the tokens and at both ends of the first chunk.
    """
    g = F.logsigmoid(torch.randn(*shape, device=device)) / 16
    if regime in ("model", "reset"):
        g[..., 3::4] = 0
    if regime == "zero":
        g.zero_()
    elif regime == "strong":
        g.fill_(-20)
    elif regime == "mixed":
        which = torch.randint(3, shape, device=device)
        g = g.masked_fill(which == 1, 0).masked_fill(which == 2, -20)
    elif regime == "reset":
        g = g.masked_fill(torch.rand(*shape, device=device) < 0.05, -1000)
        g[:, [t for t in (0, 63) if t < shape[1]]] = -1000
    elif regime != "model":
        raise ValueError(f"regime must be one of {', '.join(GATES)}, got {regime!r}")
    return g


def inputs(
    B: int = 1,
    T: int = 128,
    H: int = 2,
    HV: int | None = None,
    K: int = 64,
    V: int | None = None,
    *,
    lengths: list[int] | None = None,
    regime: str = "model",
    dtype: torch.dtype = torch.bfloat16,
    g_dtype: torch.dtype = torch.float32,
    beta_dtype: torch.dtype = torch.float32,
    h0_dtype: torch.dtype | None = None,
    state_v_first: bool = False,
    cu_dtype: torch.dtype = torch.int32,
    normalised: bool = True,
    device: torch.device | str = "cpu",
) -> dict:
    """Random arguments of :func:`flash_qla_tl.chunk_gated_delta_rule`, by keyword.

    ``HV`` and ``V`` None mean ``H`` and ``K``. ``lengths`` packs sequences of these lengths and
    replaces ``B``; ``T`` then is what they need unless it is more. ``h0_dtype`` None means no
    initial state. Keys and queries have unit length if ``normalised``.
    """
    HV, V = HV or H, V or K
    args = {}
    N = B
    if lengths is not None:
        cu = torch.tensor([0, *lengths]).cumsum(0)
        B, T, N = 1, max(T, int(cu[-1])), len(lengths)
        args["cu_seqlens"] = cu.to(device, cu_dtype)
    q, k = (torch.randn(B, T, H, K, device=device) for _ in range(2))
    if normalised:
        q, k = l2norm(q), l2norm(k)
    args["q"], args["k"] = q.to(dtype), k.to(dtype)
    args["v"] = torch.randn(B, T, HV, V, device=device, dtype=dtype)
    args["g"] = gate(regime, B, T, HV, device=device).to(g_dtype)
    args["beta"] = torch.rand(B, T, HV, device=device).to(beta_dtype)
    if h0_dtype is not None:
        state = (N, HV, V, K) if state_v_first else (N, HV, K, V)
        args["initial_state"] = torch.randn(*state, device=device).to(h0_dtype)
    if state_v_first:
        args["state_v_first"] = True
    return args


def kda_gate(regime: str, *shape: int, device: torch.device | str = "cpu") -> dict:
    """What :func:`flash_qla_tl.chunk_kda` is told of its gate, by keyword; g ``[B, T, HV, K]`` fp32.

    Inside, with a lower bound of -5:

    - "saturated", "faint": logits of 20 and of -20, decays of -5 and of nearly 0.
    - "normal", "steep": logits from randn with ``A_log`` of 0 and of 3.
    - "bias 2", "bias -2": "normal" with that ``dt_bias``.

    Inside, without one:

    - "softplus": about -20 a token.

    Outside:

    - "zero": no decay.
    - "reset": -1000 at 5% of all tokens and channels, -0.01 at the others.
    - "half": -20 on every other channel, 0 on the rest.
    - "spike": -20 at one token in 64, -0.01 at the others.
    """
    HV, K = shape[2:]
    g = torch.randn(*shape, device=device)
    if regime in KDA_LOWER_BOUND_GATES or regime == "softplus":
        A_log, dt_bias = torch.zeros(HV, device=device), torch.zeros(HV, K, device=device)
        args = {"g": g, "use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
        if regime == "softplus":
            A_log.fill_(16).log_()
            g.mul_(0.5).add_(0.9)
            return args
        if regime in ("saturated", "faint"):
            g.fill_(20 if regime == "saturated" else -20)
        elif regime == "steep":
            A_log.fill_(3)
        elif regime != "normal":
            dt_bias.fill_(int(regime.removeprefix("bias ")))
        return {**args, "lower_bound": -5.0}
    g.fill_(-0.01)
    if regime == "zero":
        g.zero_()
    elif regime == "reset":
        g = g.masked_fill(torch.rand(*shape, device=device) < 0.05, -1000)
    elif regime == "half":
        g.zero_()[..., ::2] = -20
    elif regime == "spike":
        g[:, 20::64] = -20
    else:
        raise ValueError(f"regime must be one of {', '.join(KDA_GATES)}, got {regime!r}")
    return {"g": g}


def kda_inputs(
    *args: int, regime: str = "normal", activations: bool = True, g_dtype: torch.dtype = torch.float32, **kwargs: object
) -> dict:
    """Random arguments of :func:`flash_qla_tl.chunk_kda`, by keyword; others as for :func:`inputs`.

    With ``activations``, the L2 norm of keys and queries and the sigmoid of beta are inside.
    """
    given = inputs(*args, normalised=not activations, **kwargs)
    gate = kda_gate(regime, *given["v"].shape[:3], given["q"].shape[3], device=given["q"].device)
    given |= {**gate, "g": gate["g"].to(g_dtype)}
    if activations:
        given["beta"] = torch.randn_like(given["beta"])
        given |= {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    return given


def emulated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    **activations: object,
) -> tuple[Tensor, Tensor]:
    """What an honest 16-bit kernel gives: the measure of the error budgets.

    The chunked form with every factor of a tensor-core product rounded to the dtype of ``q`` (bf16
    or fp16), sums, states, gates and the inverse in fp32, and ``o`` rounded at the end.
    ``activations`` are the keywords of :func:`flash_qla_tl.reference.activate`. A ``g`` with a decay
    for every channel, ``[B, T, HV, K]``, makes it Kimi Delta Attention.
    """
    dtype = q.dtype
    q, k, g, beta = activate(q, k, g, beta, cu_seqlens=cu_seqlens, **activations)
    if scale is None:
        scale = q.shape[3] ** -0.5
    h0 = initial_state.mT if state_v_first and initial_state is not None else initial_state
    rounded = lambda x: x.to(dtype).to(x.dtype)  # noqa: E731
    run = chunked_kda if g is not None and g.ndim == 4 else chunked
    out = run(q, k, v, g, beta, scale, h0, cu_seqlens, operand=rounded)
    return out.o.to(dtype), out.ht.mT if state_v_first else out.ht


def rel_l2(x: Tensor, reference: Tensor) -> float:
    """``|x - reference| / |reference|`` in float64; the plain norm of x for a reference of 0."""
    x, reference = x.double(), reference.double()
    size = reference.norm().item()
    return (x - reference).norm().item() / (size or 1.0)


def budget(emulation: Tensor, reference: Tensor, cap: float = CAP) -> float:
    """Twice the relative error of :func:`emulated`, at most ``cap``."""
    return min(cap, 2 * rel_l2(emulation, reference))


def gradient_budget(name: str, emulation: Tensor, reference: Tensor) -> float:
    """Twice the relative error of :func:`emulated`, or the floor for the gradient of ``name`` if that is more."""
    floor = GATE_GRADIENT_FLOOR if name in ("g", "beta", "A_log", "dt_bias") else GRADIENT_FLOOR
    return max(floor, 2 * rel_l2(emulation, reference))


def cold_copies(args: dict, device: str) -> list[dict]:
    """The arguments at enough addresses that a round through all of them leaves none in L2.

    Tensors of indices are shared: some packages keep what they derive from one.
    """
    tensors = [x for x in args.values() if torch.is_tensor(x) and x.is_floating_point()]
    size = sum(x.numel() * x.element_size() for x in tensors)
    n = 1 if device == "cpu" else max(2, math.ceil(4 * L2_BYTES / max(size, 1)))
    clone = lambda x: x.clone() if any(x is y for y in tensors) else x  # noqa: E731
    return [args] + [{name: clone(x) for name, x in args.items()} for _ in range(n - 1)]
