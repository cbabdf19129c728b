"""The kernels as a backend of flash-linear-attention.

Against two stand-ins for FLA, which have its two ways to register a backend and to ask it, and against
FLA itself where it is installed. Kernels are emulated: FLA's own path has none for the CPU.
"""

import importlib
import inspect
import logging
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import emulated_kernels
import pytest
import torch

import flash_qla_tl
from flash_qla_tl import kda
from flash_qla_tl.integrations import fla as integration
from flash_qla_tl.kernels.common import target
from flash_qla_tl.testing import inputs, kda_inputs, rel_l2

FP32, BF16 = torch.float32, torch.bfloat16
FLA = "FLA computed it"


def gated_delta_rule_0_5(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, cp_context=None, **kwargs,
):  # fmt: skip
    raise AssertionError


def gated_delta_rule_0_6(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs,
):  # fmt: skip
    raise AssertionError


def kda_0_5(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, **kwargs,
):  # fmt: skip
    raise AssertionError


def kda_0_6(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, use_graph=False, max_num_seqs=None, **kwargs,
):  # fmt: skip
    raise AssertionError


class Registry:
    def __init__(self, logger):
        self.backends = {}
        self.logger = logging.getLogger(logger)

    def register(self, backend):
        self.backends[backend.backend_type] = backend

    def dispatch(self, function, name):
        def wrapper(*args, **kwargs):
            for backend in sorted(self.backends.values(), key=lambda x: x.priority):
                if backend.is_available() and backend.is_enabled():
                    verifier = getattr(backend, f"{name}_verifier", lambda *args, **kwargs: (True, None))
                    try:
                        taken, reason = verifier(*args, **kwargs)
                    except Exception as error:
                        taken, reason = False, str(error)
                    self.logger.info(f"{name} -> {backend.backend_type}{'' if taken else f' rejected: {reason}'}")
                    if taken:
                        return getattr(backend, name)(*args, **kwargs)
            return function(*args, **kwargs)

        wrapper.__signature__ = inspect.signature(function)
        return wrapper


class BaseBackend:
    env_var = None

    def is_available(self):
        return True

    def is_enabled(self):
        return self.env_var is None or os.environ.get(self.env_var, "1") != "0"


def stand_in(version):
    """Modules of FLA by name, as far as an integration looks at them."""
    logger = "fla.ops.backends" if version == "0.5" else "fla.backends"
    registries = {name: Registry(logger) for name in ("gated_delta_rule", "kda")}
    functions = {}
    for name, registry in registries.items():
        function = globals()[f"{name}_{version.replace('.', '_')}"]
        functions[f"chunk_{name}"] = registry.dispatch(function, f"chunk_{name}")
    ops = {name: {f"chunk_{name}": functions[f"chunk_{name}"]} for name in registries}
    modules = {f"fla.ops.{name}": attributes for name, attributes in ops.items()}
    if version == "0.5":
        modules |= {
            "fla.ops.backends": {"BaseBackend": BaseBackend},
            "fla.ops.gated_delta_rule.backends": {"gdr_registry": registries["gated_delta_rule"]},
            "fla.ops.kda.backends": {"kda_registry": registries["kda"]},
        }
    else:
        places = {"gated_delta_rule": "gated_delta_rule", functions["chunk_kda"]: "kda"}

        def register(place):
            return lambda backend: registries[places[place]].register(backend())

        modules["fla.backends"] = {"BaseBackend": BaseBackend, "register": register}
    found = {"fla": ModuleType("fla"), "fla.ops": ModuleType("fla.ops")}
    for name, attributes in modules.items():
        found[name] = ModuleType(name)
        vars(found[name]).update(attributes)
    return found


last_is_on = False


def last(BaseBackend):
    """A backend that takes every call, in the place of FLA's own kernels."""

    class Last(BaseBackend):
        backend_type, priority = "last", 99

        @classmethod
        def is_available(cls):
            return last_is_on

        def chunk_gated_delta_rule(self, *args, **kwargs):
            return FLA

        chunk_kda = chunk_gated_delta_rule

    return Last


def register(backend):
    """As FLA's own backends are registered, by the version that is imported."""
    try:
        from fla.backends import register
    except ImportError:
        from fla.ops.gated_delta_rule.backends import gdr_registry
        from fla.ops.kda.backends import kda_registry

        gdr_registry.register(backend())
        kda_registry.register(backend())
    else:
        from fla.ops.kda import chunk_kda

        register("gated_delta_rule")(backend)
        register(chunk_kda)(backend)


def forget_fla(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)


VERSIONS = ["0.5", "0.6", *(["installed"] if all(map(importlib.util.find_spec, ("fla", "triton"))) else [])]


@pytest.fixture(params=VERSIONS)
def fla(request, monkeypatch):
    if request.param != "installed":
        forget_fla(monkeypatch)
        for name, module in stand_in(request.param).items():
            monkeypatch.setitem(sys.modules, name, module)
    try:
        from fla.backends import BaseBackend
    except ImportError:
        from fla.ops.backends import BaseBackend
    monkeypatch.setattr(sys.modules[__name__], "last_is_on", True)
    register(last(BaseBackend))
    flash_qla_tl.enable_fla()
    yield SimpleNamespace(
        gated_delta_rule=importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule,
        kda=importlib.import_module("fla.ops.kda").chunk_kda,
    )
    flash_qla_tl.disable_fla()


@pytest.fixture
def kernels(monkeypatch):
    """Kernels of both operators: that of the gated delta rule emulated, the other a record of its calls."""
    emulated_kernels.install(monkeypatch)
    calls = []
    monkeypatch.setattr(integration, "chunk_kda", lambda **given: calls.append(given) or "taken")
    return calls


GATE = {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "dt_bias": torch.ones(4)}
NEG_EIGVAL = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
PACKED = {"lengths": [70, 0, 30]}


def gdr_case(options=None, **given):
    args = inputs(2, 100, 2, 4, 64, 128, **{"h0_dtype": FP32, **given})
    return {**args, "output_final_state": True, **(options or {})}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(gdr_case(), id="dense"),
        pytest.param(gdr_case(**PACKED), id="packed"),
        pytest.param(gdr_case(dtype=torch.float16, g_dtype=BF16, beta_dtype=BF16), id="bf16 gates"),
        pytest.param(gdr_case({**GATE, **NEG_EIGVAL, "use_qk_l2norm_in_kernel": True}), id="activations"),
        pytest.param(gdr_case({"chunk_size": 64, "chunk_indices": torch.zeros(4, 2)}, **PACKED), id="chunk_indices"),
        pytest.param(gdr_case({"cu_seqlens_cpu": torch.tensor([0, 70, 70, 100])}, **PACKED), id="cu_seqlens_cpu"),
        pytest.param(gdr_case({"A_log": torch.zeros(1)}), id="A_log without the gate"),
        pytest.param(gdr_case(state_v_first=True), id="state_v_first"),
    ],
)
def test_takes_the_gated_delta_rule(case, fla, kernels):
    leaves = ("q", "k", "v", "g", "beta", "initial_state")
    case = {name: x.clone().requires_grad_() if name in leaves else x for name, x in case.items()}
    found, expected = fla.gated_delta_rule(**case), flash_qla_tl.chunk_gated_delta_rule(**case)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    weights = [torch.randn_like(x) for x in found]
    found, expected = (torch.autograd.grad(x, [case[name] for name in leaves], weights) for x in (found, expected))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_order_of_arguments(fla, kernels):
    """FLA's, which is not ours after the ninth."""
    case = gdr_case(**PACKED, state_v_first=True)
    first = [case[name] for name in ("q", "k", "v", "g", "beta")]
    found = fla.gated_delta_rule(*first, 0.5, case["initial_state"], True, True, True, True, True, case["cu_seqlens"])
    expected = flash_qla_tl.chunk_gated_delta_rule(
        **case, scale=0.5, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True
    )
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))

    first = [kda_case()[name] for name in ("q", "k", "v", "g", "beta")]
    assert fla.kda(*first, 0.5, None, True, False, False, True, True, False, None, False, False, True) == "taken"
    given = {name: kernels[0][name] for name in ("scale", "use_beta_sigmoid_in_kernel", "state_v_first", "backend")}
    assert given == {"scale": 0.5, "use_beta_sigmoid_in_kernel": True, "state_v_first": True, "backend": "tilelang"}


def test_former_name_of_the_layout(fla, kernels):
    case = gdr_case(state_v_first=True)
    expected = flash_qla_tl.chunk_gated_delta_rule(**case)
    del case["state_v_first"]
    with pytest.warns(DeprecationWarning, match="use state_v_first"):
        found = fla.gated_delta_rule(**case, transpose_state_layout=True)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert fla.gated_delta_rule(**case, transpose_state_layout=True, state_v_first=True) == FLA


@pytest.fixture
def reasons(caplog, monkeypatch):
    """Why calls were refused, as FLA logs it: once for each function, so that is made forgotten."""
    caplog.set_level(logging.INFO)

    def read():
        found = [x.getMessage() for x in caplog.records if "flash_qla_tl rejected: " in x.getMessage()]
        return [message.partition("rejected: ")[2] for message in found]

    for name, module in list(sys.modules.items()):
        if name in ("fla.backends", "fla.ops.backends") and hasattr(module, "BackendRegistry"):
            tables = [getattr(module, x, {}) for x in ("_operation_registries", "_function_registries")]
            tables.append(getattr(module.BackendRegistry, "_registries", {}))
            for registry in [x for table in tables for x in table.values()]:
                registry._logged.clear()
    return read


T = torch.tensor


@pytest.mark.parametrize(
    "case, reason",
    [
        pytest.param(gdr_case(dtype=FP32), "the kernels need 16 bits", id="fp32"),
        pytest.param({**gdr_case(), **inputs(2, 100, 2, 4, 32, 64)}, "head dims", id="head dims"),
        pytest.param(gdr_case({"chunk_size": 32}), "chunk_size must be 64, got 32", id="chunk_size"),
        pytest.param(gdr_case({"cp_context": object()}), "cp_context must be None", id="cp_context"),
        pytest.param(gdr_case({"head_first": False}), "no argument head_first", id="head_first"),
        pytest.param(gdr_case({"backend": "torch"}), "no argument backend", id="backend"),
        pytest.param(gdr_case({"alpha": 1, "gamma": 1}), "no argument alpha, gamma", id="unknown"),
        pytest.param(gdr_case({"g": None}), "g must be a tensor", id="g"),
        pytest.param(gdr_case({"g": torch.zeros(2, 100, 2)}), "g must have shape", id="g shape"),
        pytest.param(gdr_case({"k": torch.zeros(2, 100, 4, 64, dtype=BF16)}), "k must have shape", id="k shape"),
        pytest.param(gdr_case({"use_gate_in_kernel": True}), "A_log must be a tensor", id="A_log"),
        pytest.param(gdr_case({"allow_neg_eigval": True}), "allow_neg_eigval must come with", id="neg_eigval"),
        pytest.param(gdr_case({"cu_seqlens": T([0, 100])}), "q must have B = 1", id="B"),
        pytest.param(gdr_case({"initial_state": torch.zeros(1, 4, 64, 128)}), "initial_state must have", id="N"),
        pytest.param(gdr_case({"cu_seqlens": T([0, 9, 5, 6])}, **PACKED), "must not decrease", id="cu_seqlens"),
    ],
)
def test_leaves_the_gated_delta_rule(case, reason, fla, kernels, reasons):
    assert fla.gated_delta_rule(**case) == FLA
    assert len(reasons()) == 1 and reason in reasons()[0]


def kda_case(options=None, **given):
    args = kda_inputs(2, 100, 2, 4, 128, 128, regime="zero", activations=False, **{"h0_dtype": FP32, **given})
    return {**args, "output_final_state": True, **(options or {})}


KDA_GATE = {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "dt_bias": torch.ones(512)}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(kda_case(), id="dense"),
        pytest.param(kda_case(**PACKED), id="packed"),
        pytest.param(kda_case({**KDA_GATE, **NEG_EIGVAL}), id="activations"),
        pytest.param(kda_case({**KDA_GATE, "A_log": None, "lower_bound": -5.0, "safe_gate": True}), id="lower bound"),
        pytest.param(kda_case({"disable_recompute": True}), id="disable_recompute"),
        pytest.param(kda_case(state_v_first=True, g_dtype=BF16), id="state_v_first"),
    ],
)
def test_takes_kda(case, fla, kernels):
    assert fla.kda(**case) == "taken"
    assert kernels == [{**case, "backend": "tilelang"}]
    # Without a gradient to give; with FLA's graph mode.
    with torch.no_grad():
        assert fla.kda(**{**case, "q": case["q"].clone().requires_grad_()}) == "taken"


@pytest.mark.parametrize("name", ["q", "g", "beta", "initial_state", "A_log"])
def test_leaves_kda_with_a_gradient(name, fla, kernels, reasons):
    case = kda_case(KDA_GATE)
    assert fla.kda(**{**case, name: case[name].clone().requires_grad_()}) == FLA
    assert reasons() == ["the kernels give no gradient of Kimi Delta Attention"]


@pytest.mark.parametrize(
    "case, reason",
    [
        pytest.param(kda_case(dtype=FP32), "the kernels need 16 bits", id="fp32"),
        pytest.param(kda_case(h0_dtype=BF16), "initial_state must have dtype torch.float32", id="initial_state"),
        pytest.param(kda_case({"chunk_size": 32}), "chunk_size must be 64", id="chunk_size"),
        pytest.param(kda_case({"cp_context": object()}), "cp_context must be None", id="cp_context"),
        pytest.param(kda_case({**KDA_GATE, "safe_gate": True}), "lower_bound must be", id="lower_bound"),
        pytest.param(kda_case({"g": torch.zeros(2, 100, 4)}), "g must have shape", id="g shape"),
        pytest.param(kda_case({"return_intermediate_states": True}), "in inference mode", id="states"),
    ],
)
def test_leaves_kda(case, reason, fla, kernels, reasons):
    assert fla.kda(**case) == FLA
    assert len(reasons()) == 1 and reason in reasons()[0]


def test_states_of_kda(fla, kernels):
    """As many as chunks: for packed sequences that takes their lengths on the CPU."""
    packed = kda_case({"return_intermediate_states": True}, **PACKED)
    with torch.inference_mode():
        assert fla.kda(**kda_case({"return_intermediate_states": True})) == "taken"
        assert fla.kda(**packed) == FLA
        assert fla.kda(**packed, cu_seqlens_cpu=packed["cu_seqlens"]) == "taken"
        assert fla.kda(**packed, cu_seqlens_cpu=packed["cu_seqlens"], disable_recompute=True) == FLA


def test_graph_mode_of_kda(fla, kernels):
    if "use_graph" not in inspect.signature(fla.kda).parameters:
        pytest.skip("this version has none")
    case = kda_case(**PACKED)
    assert fla.kda(**case, use_graph=True, max_num_seqs=3) == "taken"
    assert kernels == [{**case, "backend": "tilelang"}]
    assert fla.kda(**case, use_graph=True) == "taken"
    assert fla.kda(**case, use_graph=True, max_num_seqs=4) == FLA


def test_no_kernels_here(fla, reasons):
    """The torch path is never FLA's: on the CPU, and of KDA without a kernel."""
    assert fla.gated_delta_rule(**gdr_case()) == FLA and fla.kda(**kda_case()) == FLA
    assert reasons() == ["the kernels need CUDA tensors, got cpu"] * 2


def test_kda_without_kernels(fla, monkeypatch, reasons):
    monkeypatch.setattr(target, "refusal", lambda q, k, v: None)
    monkeypatch.setattr(kda, "refusal", lambda q, k, v: "there is none")
    assert fla.kda(**kda_case()) == FLA
    assert reasons() == ["there is none"]


def test_a_call_that_fits_no_signature(fla, kernels):
    """... is FLA's to raise on."""
    case = gdr_case()
    for args, kwargs in [((), {}), ((case["q"],), case), ((None,) * 20, {})]:
        assert fla.gated_delta_rule(*args, **kwargs) == FLA


def test_on_and_off(fla, kernels, monkeypatch):
    case = gdr_case()
    taken = lambda: fla.gated_delta_rule(**case) != FLA  # noqa: E731
    assert taken()
    monkeypatch.setenv("FLA_FLASH_QLA_TL", "0")
    assert not taken() and fla.kda(**kda_case()) == FLA
    monkeypatch.setenv("FLA_FLASH_QLA_TL", "1")
    assert taken()
    flash_qla_tl.disable_fla()
    flash_qla_tl.disable_fla()
    assert not taken() and fla.kda(**kda_case()) == FLA
    flash_qla_tl.enable_fla(priority=100)
    assert not taken()
    flash_qla_tl.enable_fla(priority=98)
    assert taken()


def test_missing_fla(monkeypatch):
    forget_fla(monkeypatch)
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ImportError, match="enable_fla needs flash-linear-attention 0.5.2 or later: pip install"):
        flash_qla_tl.enable_fla()
    flash_qla_tl.disable_fla()


@pytest.fixture
def few_configurations(monkeypatch):
    """Of what Triton would compile and time for each of FLA's kernels, minutes of work, two are enough for a result."""
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    pytest.importorskip("fla")
    pruned = autotuner.prune_configs
    monkeypatch.setattr(autotuner, "prune_configs", lambda *args, **kwargs: pruned(*args, **kwargs)[:2])


@pytest.mark.gpu
@pytest.mark.usefixtures("few_configurations")
@pytest.mark.parametrize("lengths", [None, [70, 0, 130]], ids=["dense", "packed"])
@pytest.mark.parametrize("activations", [False, True], ids=["plain", "activations"])
def test_gives_what_fla_gives(lengths, activations, reasons, caplog):
    """Its kernels and ours through one function of FLA, forward and backward."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule

    case = inputs(2, 200, 2, 4, 128, lengths=lengths, h0_dtype=FP32, device="cuda")
    case["output_final_state"] = True
    if activations:
        case |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True}
        case |= {"A_log": torch.zeros(4, device="cuda"), "dt_bias": torch.ones(4, device="cuda")}
    leaves = {name: x.requires_grad_() for name, x in case.items() if torch.is_tensor(x) and x.is_floating_point()}
    weights = None

    def results():
        nonlocal weights
        outputs = rule(**case)
        weights = weights or [torch.randn_like(x) for x in outputs]
        try:
            return [*outputs, *torch.autograd.grad(outputs, leaves.values(), weights)]
        except RuntimeError as error:
            # FLA does not trust its backward to some versions of Triton; ours has to run all the same.
            if "Triton" not in str(error):
                raise
            return outputs

    expected = results()
    flash_qla_tl.enable_fla()
    try:
        found = results()
    finally:
        flash_qla_tl.disable_fla()
    assert not reasons() and "chunk_gated_delta_rule -> flash_qla_tl" in caplog.text
    assert len(found) == 2 + len(leaves)
    for name, x, y in zip(("o", "ht", *leaves), found, expected, strict=False):
        assert rel_l2(x, y) < 0.03, name


@pytest.mark.gpu
@pytest.mark.usefixtures("few_configurations")
def test_kda_gives_what_fla_gives(reasons, caplog):
    """The forward."""
    from fla.ops.kda import chunk_kda as rule

    case = kda_inputs(2, 200, 2, 4, 128, regime="normal", h0_dtype=FP32, device="cuda")
    case |= {"output_final_state": True, "safe_gate": True}
    with torch.no_grad():
        expected = rule(**case)
        flash_qla_tl.enable_fla()
        try:
            found = rule(**case)
        finally:
            flash_qla_tl.disable_fla()
    assert not reasons() and "chunk_kda -> flash_qla_tl" in caplog.text
    assert all(rel_l2(x, y) < 0.02 for x, y in zip(found, expected, strict=True))


def test_import_leaves_fla_alone():
    code = "import sys, flash_qla_tl, flash_qla_tl.integrations.fla\nassert 'fla' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
