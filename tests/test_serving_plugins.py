"""The plug-ins against stubs of vLLM and SGLang: the names that are looked up, and the calls as the two servers make them.

The stubs are ours, after the interfaces of vLLM 0.33 and SGLang 0.5.23; the servers themselves are not run here.
"""

import re
import subprocess
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType

import emulated_kda
import emulated_kernels
import pytest
import torch

from flash_qla_tl import chunk_gated_delta_rule, chunk_kda
from flash_qla_tl.integrations import serving, sglang, vllm
from flash_qla_tl.testing import inputs, kda_inputs

BF16, FP32 = torch.bfloat16, torch.float32
TOKENS = ("q", "k", "v", "g", "beta")
LENGTHS = [70, 1, 130]
INDICES = [3, -1, 1]

on_gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setenv("FLASH_QLA_TL_SERVING", "1")
    serving.say_once.cache_clear()


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=on_gpu)])
def device(request, monkeypatch):
    if request.param == "cuda":
        return "cuda"
    emulated_kernels.install(monkeypatch)
    emulated_kda.install(monkeypatch)
    return "cpu"


def stub(monkeypatch, name, **contents):
    """A module of this name, and the packages above it."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        if path not in sys.modules:
            module = ModuleType(path)
            module.__path__ = []
            # find_spec asks for it.
            module.__spec__ = type(sys.__spec__)(path, None)
            monkeypatch.setitem(sys.modules, path, module)
            if i > 1:
                monkeypatch.setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], module, raising=False)
    for key, value in contents.items():
        monkeypatch.setattr(sys.modules[name], key, value, raising=False)
    return sys.modules[name]


def same(ours, theirs):
    return all(map(torch.equal, ours, theirs))


def test_entry_points():
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    for group, module in (("vllm.general_plugins", vllm), ("sglang.srt.plugins", sglang)):
        found = re.search(rf'entry-points."{group}"\]\nflash_qla_tl = "(.+):(.+)"\n', project)
        assert found[1] == module.__name__ and callable(getattr(module, found[2]))


@pytest.mark.parametrize("plugin", [vllm, sglang])
def test_nothing_without_the_server(plugin, monkeypatch, caplog):
    for name in ("vllm", "sglang"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(plugin, "find_spec", lambda name: None)
    plugin.register()
    assert not caplog.records


@pytest.mark.parametrize("plugin", [vllm, sglang])
def test_nothing_unless_asked_for(plugin, monkeypatch):
    """Not even an import of the server, whose kernels touch the device when they are imported."""
    monkeypatch.delenv("FLASH_QLA_TL_SERVING")
    monkeypatch.setattr(plugin, "find_spec", None)
    plugin.register()


@pytest.mark.parametrize("plugin, name", [(vllm, "vLLM"), (sglang, "SGLang")])
def test_another_version_of_the_server_is_said(plugin, name, monkeypatch, caplog):
    stub(monkeypatch, name.lower())
    plugin.register()
    assert caplog.records and all(re.match(f"{name} keeps its .*: No module", x.message) for x in caplog.records)


def test_entry_points_import_no_tilelang():
    code = (
        "import sys, flash_qla_tl.integrations.vllm as v, flash_qla_tl.integrations.sglang as s\n"
        "v.register(), s.register()\n"
        "assert not {'tilelang', 'vllm', 'sglang'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


# vLLM


class VllmOp(torch.nn.Module):
    """The op of the gated delta rule, and the registry of its base class."""

    registry = {}

    def __new__(cls, *args, **kwargs):
        return super().__new__(cls.registry.get(cls.__name__, cls))

    def __init__(self):
        super().__init__()
        self._forward_method = self.forward_native

    def forward(self, *args, **kwargs):
        return self._forward_method(*args, **kwargs)

    def forward_native(self, **kwargs):
        return "vLLM", kwargs

    @classmethod
    def register_oot(cls, name):
        def register(op):
            assert name not in cls.registry, f"Duplicate op name: {name}"
            cls.registry[name] = op
            return op

        return register


@pytest.fixture
def in_vllm(monkeypatch):
    """The op as vLLM makes it after loading the plug-in twice, and the module of Kimi Delta Attention."""
    op = type("ChunkGatedDeltaRule", (VllmOp,), {"registry": {}})
    layers = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
    stub(monkeypatch, "vllm.model_executor.custom_op", op_registry_oot=op.registry)
    stub(monkeypatch, layers, ChunkGatedDeltaRule=op)
    name = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
    kda = stub(monkeypatch, name, chunk_kda_with_fused_gate=lambda *args, **kwargs: ("vLLM", args, kwargs))
    vllm.register()
    replaced = kda.chunk_kda_with_fused_gate
    vllm.register()
    assert kda.chunk_kda_with_fused_gate is replaced
    assert isinstance(made := op(), op) and type(made) is not op
    return made, kda


@pytest.mark.parametrize("with_out", [False, True])
def test_vllm_gated_delta_rule(in_vllm, device, with_out):
    op, _ = in_vllm
    args = inputs(H=1, HV=2, K=128, lengths=LENGTHS, h0_dtype=BF16, state_v_first=True, device=device)
    expected = chunk_gated_delta_rule(**args, output_final_state=True)
    buffer = torch.full((300, 2, 128), torch.nan, dtype=BF16, device=device) if with_out else None
    del args["state_v_first"]
    o, ht = op(
        **args,
        output_final_state=True,
        chunk_indices=None,
        chunk_offsets=None,
        use_qk_l2norm_in_kernel=False,
        core_attn_out=buffer,
        aiter_prefill_metadata=None,
    )
    assert same((o, ht), expected)
    if with_out:
        T = o.shape[1]
        assert o.data_ptr() == buffer.data_ptr() and torch.equal(buffer[:T], o[0]) and buffer[T:].isnan().all()


def test_vllm_keeps_what_the_kernels_do_not_take(in_vllm, device, caplog):
    op, kda = in_vllm
    args = inputs(H=1, K=96, lengths=LENGTHS, h0_dtype=FP32, device=device)
    for _ in range(2):
        who, kwargs = op(**args, output_final_state=True, core_attn_out=None, aiter_prefill_metadata=7)
        assert who == "vLLM" and kwargs["q"] is args["q"] and kwargs["aiter_prefill_metadata"] == 7
        assert kda.chunk_kda_with_fused_gate(*(args[x] for x in TOKENS), None, None, scale=2.0)[0] == "vLLM"
    messages = [x.message for x in caplog.records]
    assert len(messages) == 2 and "gated delta rule in its own kernels: the kernels need" in messages[0]
    assert "Kimi Delta Attention in its own kernels: the kernels need head dims K = V = 128" in messages[1]


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_vllm_kimi_delta_attention(in_vllm, device, lower_bound):
    """As Kimi Linear's layer calls it: parameters in the shapes of the model, and as Kimi K3's, with out."""
    _, module = in_vllm
    regime = "normal" if lower_bound else "softplus"
    args = kda_inputs(
        H=2, K=128, lengths=LENGTHS, regime=regime, h0_dtype=FP32, state_v_first=True, g_dtype=BF16, device=device
    )
    expected = chunk_kda(**args, output_final_state=True)
    given = {
        "q": args["q"],
        "k": args["k"],
        "v": args["v"],
        "raw_g": args["g"],
        "raw_beta": args["beta"],
        "A_log": args["A_log"].view(1, 1, -1, 1),
        "g_bias": args["dt_bias"].flatten(),
        "lower_bound": lower_bound,
        "initial_state": args["initial_state"],
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "cu_seqlens": args["cu_seqlens"],
    }
    assert same(module.chunk_kda_with_fused_gate(**given), expected)
    out = torch.empty_like(args["v"])
    assert module.chunk_kda_with_fused_gate(**given, out=out)[0] is out and torch.equal(out, expected[0])


# SGLang


class HookType(Enum):
    AFTER = "after"


class Triton:
    """SGLang's own kernels, which say that they were called."""

    supports_track_state_snapshot = False

    def extend(self, *args, **kwargs):
        self.called = kwargs
        return "SGLang", None, torch.ones(1, 9, 2, 128, 128, device=kwargs["ssm_states"].device)


class Dispatcher:
    def __init__(self, kernel):
        self.extend_kernel = self.decode_kernel = kernel


@pytest.fixture
def in_sglang(monkeypatch):
    """The kernels for prefill that the two dispatchers have with the hooks applied."""
    hooks = {}

    class HookRegistry:
        @staticmethod
        def register(target, hook, hook_type):
            assert hook_type is HookType.AFTER
            hooks[target] = hook

    stub(monkeypatch, "sglang.srt.plugins.hook_registry", HookRegistry=HookRegistry, HookType=HookType)
    kernels = "sglang.srt.layers.attention.linear.kernels"
    stub(monkeypatch, f"{kernels}.gdn_triton", TritonGDNKernel=Triton)
    stub(monkeypatch, f"{kernels}.kda_triton", TritonKDAKernel=Triton)
    sglang.register()
    found = []
    for name in ("gdn_backend.GDNKernelDispatcher", "kda_backend.KDAKernelDispatcher"):
        dispatcher = Dispatcher(Triton())
        assert hooks[f"sglang.srt.layers.attention.linear.{name}.__init__"](None, dispatcher, "triton") is None
        assert type(dispatcher.decode_kernel) is Triton and isinstance(dispatcher.extend_kernel, Triton)
        found.append(dispatcher.extend_kernel)
    return found


def pooled(make, device, dtype=FP32, **kwargs):
    """Arguments of ours, those as SGLang passes them, and its pool, a slice of what other layers have too."""
    args = make(H=1, HV=2, K=128, lengths=LENGTHS, state_v_first=True, device=device, **kwargs)
    pool = torch.randn(6, 3, 2, 128, 128, device=device).to(dtype)[:, 1]
    indices = torch.tensor(INDICES, dtype=torch.int32, device=device)
    theirs = {"ssm_states": pool, "cache_indices": indices, "query_start_loc": args["cu_seqlens"]}
    ours = {**args, "initial_state": pool.clone(), "initial_state_indices": indices, "inplace_final_state": True}
    return ours, [args[name] for name in TOKENS], theirs


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_sglang_gated_delta_rule(in_sglang, device, dtype):
    kernel, _ = in_sglang
    ours, tokens, theirs = pooled(inputs, device, dtype)
    o, after = chunk_gated_delta_rule(**ours, use_qk_l2norm_in_kernel=True)
    more = {"layer_id": 3, "extend_prefix_lens": None, "track_state": None, "track_chunk_idx": None, "output": None}
    before = theirs["ssm_states"].clone()
    assert torch.equal(kernel.extend(*tokens, **theirs, **more, inplace_update=False)[0], o)
    assert torch.equal(theirs["ssm_states"], before)
    out = torch.full_like(o, torch.nan)
    result = kernel.extend(*tokens, **theirs, **{**more, "output": out})
    assert result[0] is out and torch.equal(out, o) and result[1:] == (None, None)
    assert torch.equal(theirs["ssm_states"], after)


def test_sglang_keeps_prefixes_of_the_gated_delta_rule(in_sglang, device):
    """The state at the start of one chunk of each sequence that is tracked."""
    kernel, _ = in_sglang
    ours, tokens, theirs = pooled(inputs, device)
    *_, h = chunk_gated_delta_rule(**ours, use_qk_l2norm_in_kernel=True, return_intermediate_states=True)
    track_state = torch.full((3, 2, 128, 128), torch.nan, device=device)
    track_chunk_idx = torch.tensor([1, -1, 2], dtype=torch.int32, device=device)
    kernel.extend(*tokens, **theirs, track_state=track_state, track_chunk_idx=track_chunk_idx)
    # Chunks: two, one and three.
    assert torch.equal(track_state[[0, 2]], h[0, [1, 5]].float())


@pytest.mark.parametrize("regime", ["normal", "softplus"])
@pytest.mark.parametrize("with_h", [False, True])
def test_sglang_kimi_delta_attention(in_sglang, device, regime, with_h):
    _, kernel = in_sglang
    ours, tokens, theirs = pooled(kda_inputs, device, regime=regime)
    o, after, *h = chunk_kda(**ours, return_intermediate_states=with_h)
    gate = {"A_log": ours["A_log"].view(1, 1, -1, 1), "dt_bias": ours["dt_bias"].flatten()}
    gate |= {"lower_bound": ours.get("lower_bound"), "beta_is_raw": True}
    more = {"is_spec_decode": False, "track_state": None, "track_chunk_idx": None, "extend_seq_lens_cpu": LENGTHS}
    result = kernel.extend(*tokens, **theirs, **gate, **more, return_intermediate_states=with_h)
    assert same(result, (o, *h)) if with_h else torch.equal(result, o)
    assert torch.equal(theirs["ssm_states"], after)


def test_sglang_kimi_delta_attention_with_everything_outside(in_sglang, device):
    _, kernel = in_sglang
    ours, tokens, theirs = pooled(kda_inputs, device, regime="zero", activations=False)
    o, after = chunk_kda(**ours, use_qk_l2norm_in_kernel=True)
    assert torch.equal(kernel.extend(*tokens, **theirs), o) and torch.equal(theirs["ssm_states"], after)


def test_sglang_keeps_what_the_kernels_do_not_take(in_sglang, device, caplog):
    gdn, kda = in_sglang
    _, tokens, theirs = pooled(kda_inputs, device)
    whole = {**theirs, "ssm_states": theirs["ssm_states"].to(torch.float64)}
    for change in ({"is_spec_decode": True}, {"track_state": torch.zeros(3)}):
        assert kda.extend(*tokens, **theirs, **change)[0] == "SGLang" and kda.called.items() >= change.items()
    assert kda.extend(*tokens, **whole)[0] == "SGLang"
    assert kda.extend(*tokens, **{**theirs, "ssm_states": theirs["ssm_states"].mT})[0] == "SGLang"
    track_state = torch.zeros(3, 2, 128, 128, device=device)
    tracked = {"track_state": track_state, "track_chunk_idx": torch.tensor([0, 0, 0], device=device)}
    assert gdn.extend(*tokens, **whole, **tracked)[0] == "SGLang" and track_state.all()
    reasons = ("a draft", "to keep in fp32", "got torch.float64", "each state dense", "got torch.float64")
    assert all(reason in x.message for reason, x in zip(reasons, caplog.records, strict=True))
