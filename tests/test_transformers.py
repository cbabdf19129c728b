"""Tiny models of transformers through us and through their own torch functions.

On the CPU in fp32, where the two agree closely. With the kernels, emulated or on a GPU, in bf16: there
what we add to the error of the model's own functions, measured against the same model in fp32, is held
to the size of that error.
"""

import copy
import importlib
import inspect
import sys
from types import ModuleType
from unittest.mock import Mock

import emulated_kernels
import pytest
import torch

import flash_qla_tl
from flash_qla_tl.integrations.transformers import patch, unpatch
from flash_qla_tl.testing import rel_l2

pytest.importorskip("transformers")

BF16, FP32 = torch.bfloat16, torch.float32

SHARED = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "layer_types": ["linear_attention", "full_attention"],
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
HEADS = {
    "head_dim": 32,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MLA = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
# Class of the configuration, of the model, and what it is made with.
MODELS = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**HEADS, "mlp_only_layers": [0, 1]}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", HEADS),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {**MLA, "linear_head_dim": 64, "linear_num_heads": 2, "mlp_layer_types": ["dense", "dense"]},
    ),
}


def tiny(kind, **options):
    """A model with random weights, that calls its own torch functions."""
    config_class, model_class, own = MODELS[kind]
    try:
        module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(f"transformers.models.{kind}"):
            raise
        pytest.skip(f"this version of transformers has no {kind}")
    config = getattr(importlib.import_module(f"transformers.models.{kind}"), config_class)
    model = getattr(module, model_class)(config(**{**SHARED, **own, **options}))
    for name, parameter in model.named_parameters():
        # States that last, and gates that say what they forget.
        if name.endswith("A_log"):
            parameter.data.uniform_(-3, -1)
        elif name.endswith("dt_bias"):
            parameter.data.normal_()
    return model


@pytest.fixture(autouse=True)
def own_functions(monkeypatch):
    """Where FLA is installed, transformers would call that, which computes nothing on a CPU."""
    for kind in MODELS:
        try:
            module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        except ImportError:
            continue
        for name, function in list(vars(module).items()):
            if name.endswith(("_gated_delta_rule", "_delta_attention")) and hasattr(function, "__wrapped__"):
                monkeypatch.setattr(module, name, inspect.unwrap(function))


@pytest.fixture(params=MODELS)
def kind(request):
    return request.param


@pytest.fixture(params=["cpu", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request, monkeypatch):
    """Device and dtype: the torch path, the kernel path around an emulated kernel, and the kernels."""
    if request.param == "emulated":
        emulated_kernels.install(monkeypatch)
    return "cuda" if request.param == "cuda" else "cpu", FP32 if request.param == "cpu" else BF16


@pytest.fixture
def ours(monkeypatch):
    """Tokens a row in each call of our operators."""
    integration = importlib.import_module("flash_qla_tl.integrations.transformers")
    calls = []

    def recorded(operator):
        def run(q, *args, **kwargs):
            calls.append(q.shape[1])
            return operator(q, *args, **kwargs)

        return run

    for name in ("chunk_gated_delta_rule", "chunk_kda"):
        monkeypatch.setattr(integration, name, recorded(getattr(integration, name)))
    return calls


def tokens(*shape, device="cpu"):
    return torch.randint(SHARED["vocab_size"], shape).to(device)


def compare(run, kind, place, **options):
    """What ``run`` makes of a model, by name, through us and through its own functions."""
    device, dtype = place
    full = tiny(kind, **options).to(device)
    model = copy.deepcopy(full).to(dtype)
    exact, own = run(full), run(model)
    patch(model)
    try:
        found = run(model)
    finally:
        unpatch(model)
    assert found.keys() == own.keys() == exact.keys()
    for name, x in found.items():
        if dtype == FP32:
            # The gates' gradients are sums in which much cancels.
            assert rel_l2(x, own[name]) < (1e-4 if "linear_attn" in name else 1e-5), name
        else:
            assert rel_l2(x, exact[name]) < 1.5 * rel_l2(own[name], exact[name]) + 0.005, name


def test_logits_and_gradients(kind, place, ours):
    ids = tokens(2, 150, device=place[0])

    def run(model):
        out = model(ids, labels=ids, use_cache=False)
        parameters = dict(model.named_parameters())
        gradients = torch.autograd.grad(out.loss, parameters.values(), allow_unused=True)
        gradients = {name: x for name, x in zip(parameters, gradients, strict=True) if x is not None}
        assert any(name.endswith("A_log") for name in gradients)
        return {"logits": out.logits.detach(), **gradients}

    compare(run, kind, place)
    assert ours == [150]


def test_cache(kind, place, ours):
    """A prompt, several tokens on top of its cache, and then token by token."""
    ids = tokens(2, 103, device=place[0])

    @torch.no_grad()
    def run(model):
        cache, logits = None, []
        for piece in ids.split([70, 30, 1, 1, 1], dim=1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits)
        return {"logits": torch.cat(logits, 1)}

    compare(run, kind, place)
    assert ours == [70, 30, 1, 1, 1]


def test_generate(kind, place, ours):
    """A prompt and token by token: the same text in fp32, where rounding does not choose it."""
    device, dtype = place
    prompt = tokens(2, 70, device=device)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    full = tiny(kind).to(device)
    model = copy.deepcopy(full).to(dtype)
    exact, own = full.generate(prompt, **options), model.generate(prompt, **options)
    patch(model)
    found = model.generate(prompt, **options)
    unpatch(model)
    assert found.sequences.shape == (2, 76) and ours == [70, 1, 1, 1, 1, 1]
    first, own_first, exact_first = (x.logits[0] for x in (found, own, exact))
    if dtype == FP32:
        assert torch.equal(found.sequences, own.sequences) and rel_l2(first, own_first) < 1e-5
    assert rel_l2(first, exact_first) < 1.5 * rel_l2(own_first, exact_first) + 0.005


def test_packed(kind, place, ours):
    """Sequences packed along one row; the convolution, which alone would mix them, sees one token."""
    device, dtype = place
    model = tiny(kind, linear_conv_kernel_dim=1).to(device, dtype)
    if kind != "kimi_linear" and "cu_seq_lens_q" not in inspect.getsource(sys.modules[type(model).__module__]):
        pytest.skip("this version of transformers does not tell the gated delta rule of packed sequences")
    lengths = [70, 1, 64, 5]
    sequences = [tokens(1, n, device=device) for n in lengths]
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    call = {"position_ids": positions, "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "use_cache": False}
    call |= {"max_length_q": 70, "max_length_k": 70}
    patch(model)
    with torch.no_grad():
        expected = torch.cat([model(ids, use_cache=False).logits for ids in sequences], 1)
        found = model(torch.cat(sequences, 1), **call).logits
    unpatch(model)
    assert ours == [*lengths, sum(lengths)]
    assert rel_l2(found, expected) < (1e-5 if dtype == FP32 else 0.01)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_training(place):
    """50 steps on a repeated text reach the loss that the torch functions reach."""
    device, dtype = place
    text = b"a state of fixed size forgets what it is told to forget; " * 3
    ids = torch.tensor([[x % 64 for x in text[:129]], [x % 64 for x in text[20:149]]], device=device)

    def losses(through_us):
        torch.manual_seed(0)
        model = tiny("qwen3_next", initializer_range=0.02).to(device)
        if through_us:
            patch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found = []
        for _ in range(50):
            with torch.autocast(device, dtype=BF16, enabled=dtype == BF16):
                loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        unpatch(model)
        return found

    expected, found = losses(False), losses(True)
    assert abs(found[-1] / expected[-1] - 1) < 0.01
    assert abs(found[0] / expected[0] - 1) < (1e-5 if dtype == FP32 else 1e-3)
    assert expected[-1] < expected[0] / 2


@pytest.mark.parametrize("place", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_through_fla(place, monkeypatch):
    """transformers calls FLA, and FLA us."""
    pytest.importorskip("triton")
    pytest.importorskip("fla")
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    # As transformers does where it finds FLA when it is imported.
    taken = inspect.signature(chunk_gated_delta_rule).parameters

    def call(*args, **given):
        return chunk_gated_delta_rule(*args, **{name: x for name, x in given.items() if name in taken})

    model = tiny("qwen3_next").to(place[0], BF16)
    ids = tokens(2, 100, device=place[0])
    patch(model)
    expected = model(ids, use_cache=False).logits
    unpatch(model)
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", call)
    backend = Mock(wraps=flash_qla_tl.chunk_gated_delta_rule)
    monkeypatch.setattr("flash_qla_tl.integrations.fla.chunk_gated_delta_rule", backend)
    flash_qla_tl.enable_fla()
    try:
        found = model(ids, use_cache=False).logits
    finally:
        flash_qla_tl.disable_fla()
    assert torch.equal(found, expected) and backend.call_count == 1


def test_patch_and_unpatch():
    model = tiny("qwen3_next")
    module = sys.modules[type(model).__module__]
    holders = [module, *model.modules()]

    def functions():
        return [x for holder in holders for name, x in vars(holder).items() if name.endswith("gated_delta_rule")]

    before = functions()
    patch(model)
    patched = functions()
    patch(model)
    assert functions() == patched != before
    unpatch(model)
    unpatch(model)
    assert functions() == before
    patch(module)
    assert "flash_qla_tl" in module.torch_chunk_gated_delta_rule.__module__
    unpatch(module)
    assert functions() == before


@pytest.mark.parametrize("change", [patch, unpatch])
def test_refusals(change):
    with pytest.raises(TypeError, match="model_or_module must be a torch.nn.Module or a Python module, got str"):
        change("qwen3_next")
    with pytest.raises(ValueError, match="model_or_module must have the gated delta rule .*, got Linear"):
        change(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="got nothing"):
        change(ModuleType("nothing"))
