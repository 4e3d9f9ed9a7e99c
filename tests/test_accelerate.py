# SPDX-License-Identifier: Apache-2.0
"""``unirl.accelerate`` against diffusers' own outputs and gradients, on small random transformers."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import unirl
from unirl.accelerate import Acceleration, SharedPrompt

GROUPS, SIBLINGS, PROMPT = 2, 3, 10
ROWS = GROUPS * SIBLINGS


@pytest.fixture(scope="module")
def diffusers() -> Any:
    library = pytest.importorskip("diffusers")
    assert library.PixArtTransformer2DModel and library.WanTransformer3DModel  # the import that takes seconds
    return library


def pixart(diffusers: Any, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    size = {"num_attention_heads": 2, "attention_head_dim": 16, "cross_attention_dim": 32, "num_layers": 2}
    return diffusers.PixArtTransformer2DModel(**{**size, "caption_channels": 24, "sample_size": 8, **changes})


def wan(diffusers: Any, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    size = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 48}
    return diffusers.WanTransformer3DModel(
        **{**size, "in_channels": 4, "out_channels": 4, "text_dim": 20, "freq_dim": 16, **changes}
    )


def build(diffusers: Any, name: str) -> nn.Module:
    if name == "pixart":
        return pixart(diffusers)
    return wan(diffusers, **({"image_dim": 16, "added_kv_proj_dim": 24} if name == "wan-image" else {}))


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def calls(name: str, prompts: Tensor | None = None, latents: Tensor | None = None) -> dict[str, Any]:
    """A call with GROUPS prompts of SIBLINGS rows each; PixArt's prompts have 10 and 4 real tokens."""
    if name == "pixart":
        prompts = draw(1, GROUPS, PROMPT, 24) if prompts is None else prompts
        lengths = torch.tensor([PROMPT, 4])
        mask = (torch.arange(PROMPT) < lengths[:, None]).to(prompts.dtype)
        return {
            "hidden_states": draw(2, ROWS, 4, 8, 8) if latents is None else latents,
            "encoder_hidden_states": prompts.repeat_interleave(SIBLINGS, 0),
            "encoder_attention_mask": mask.repeat_interleave(SIBLINGS, 0),
            "timestep": torch.arange(ROWS) * 90,
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
            "return_dict": False,
        }
    tokens = 512 if name == "wan-image" else PROMPT
    prompts = draw(1, GROUPS, tokens, 20) if prompts is None else prompts
    call = {
        "hidden_states": draw(2, ROWS, 4, 2, 4, 4) if latents is None else latents,
        "encoder_hidden_states": prompts.repeat_interleave(SIBLINGS, 0),
        "timestep": torch.arange(ROWS) * 90,
        "return_dict": False,
    }
    if name == "wan-image":
        call["encoder_hidden_states_image"] = draw(3, GROUPS, 5, 16).repeat_interleave(SIBLINGS, 0)
    return call


def cast(call: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        key: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in call.items()
    }


def run(model: nn.Module, call: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**call)[0]


def error(after: Tensor, before: Tensor) -> float:
    assert before.abs().max() > 0
    return float((after - before).abs().max() / before.abs().max())


def accelerate(model: nn.Module, **options: Any) -> Acceleration:
    return unirl.accelerate(model, quiet=True, **options)


@pytest.mark.parametrize("name", ["pixart", "wan", "wan-image"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_siblings_get_the_values_of_diffusers(diffusers: Any, name: str, dtype: torch.dtype) -> None:
    model, call = build(diffusers, name).to(dtype), cast(calls(name), dtype)
    # Wan's layer norms are float32 whatever the weights are.
    bound = {torch.float64: 1e-12 if name == "pixart" else 2e-6, torch.float32: 2e-6, torch.bfloat16: 4e-2}
    before = run(model, call)
    accelerate(model, siblings=SIBLINGS)
    assert error(run(model, call), before) < bound[dtype]


@pytest.mark.parametrize(("name", "bound"), [("pixart", 1e-11), ("wan", 1e-5), ("wan-image", 1e-5)])
def test_gradients_are_those_of_diffusers(diffusers: Any, name: str, bound: float) -> None:
    model = build(diffusers, name).double()
    call = cast(calls(name), torch.float64)
    width = call["encoder_hidden_states"].shape[2]
    prompts = draw(1, GROUPS, 512 if name == "wan-image" else PROMPT, width).double().requires_grad_()
    latents = call["hidden_states"].clone().requires_grad_()
    leaves = {"prompts": prompts, "latents": latents, **dict(model.named_parameters())}

    def gradients() -> list[Tensor]:
        out = model(**cast(calls(name, prompts, latents), torch.float64))[0]
        loss = (out * draw(4, *out.shape).double()).sum()
        return list(torch.autograd.grad(loss, leaves.values(), materialize_grads=True))

    before = gradients()
    accelerate(model, siblings=SIBLINGS)
    for leaf, own, theirs in zip(leaves, gradients(), before, strict=True):
        if "attn2.to_k.bias" in leaf and name == "pixart":
            # One constant on every logit of a row changes nothing: both are rounding.
            assert own.abs().max() < 1e-12 and theirs.abs().max() < 1e-12
        else:
            assert error(own, theirs) < bound, leaf


def test_the_first_row_of_a_group_gets_the_gradient_of_all_its_siblings(diffusers: Any) -> None:
    model, call = pixart(diffusers).double(), cast(calls("pixart"), torch.float64)
    rows = call["encoder_hidden_states"].requires_grad_()

    def gradient() -> Tensor:
        loss = model(**call)[0].square().sum()
        return torch.autograd.grad(loss, rows)[0].unflatten(0, (GROUPS, SIBLINGS))

    before = gradient()
    accelerate(model, siblings=SIBLINGS)
    after = gradient()
    assert error(after[:, 0], before.sum(1)) < 1e-12
    assert not after[:, 1:].any() and before[:, 1:].any()


@pytest.mark.parametrize("kind", ["left", "holes", "empty", "none"])
def test_any_mask_over_keys_is_kept(diffusers: Any, kind: str) -> None:
    model, call = pixart(diffusers).double(), cast(calls("pixart"), torch.float64)
    real = {
        "left": torch.arange(PROMPT) >= torch.tensor([[0], [6]]),
        "holes": torch.arange(PROMPT) % torch.tensor([[2], [3]]) != 0,
        "empty": torch.arange(PROMPT) < torch.tensor([[0], [5]]),
    }.get(kind)
    call["encoder_attention_mask"] = None if real is None else real.double().repeat_interleave(SIBLINGS, 0)
    unmasked = run(model, {**call, "encoder_attention_mask": None})
    before = run(model, call)
    accelerate(model, siblings=SIBLINGS)
    assert error(run(model, call), before) < 1e-12
    if kind in ("left", "holes"):
        assert error(unmasked, before) > 1e-4


def test_a_prompt_is_projected_once_a_group(diffusers: Any) -> None:
    model = pixart(diffusers)
    rows: list[int] = []
    for block in model.transformer_blocks:
        for projection in (block.attn2.to_k, block.attn2.to_v):
            projection.register_forward_hook(lambda _, args, out: rows.append(out.shape[0]))
    report = accelerate(model)
    run(model, calls("pixart"))
    assert rows == [ROWS] * 4
    rows.clear()
    with report.siblings(SIBLINGS):
        run(model, calls("pixart"))
    assert rows == [GROUPS] * 4


def test_the_backward_keeps_one_copy_of_a_prompt_s_keys_and_values(diffusers: Any) -> None:
    model = pixart(diffusers)

    def kept_bytes() -> int:
        stored: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            stored[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(**calls("pixart"))[0]
        assert out.requires_grad
        return sum(stored.values())

    before = kept_bytes()
    accelerate(model, siblings=SIBLINGS)
    layers, one_row = 2, PROMPT * 32 * 4
    keys_and_values, gathered_prompts = 2 * (ROWS - GROUPS) * one_row, GROUPS * one_row
    assert before - kept_bytes() >= layers * (keys_and_values - gathered_prompts)


def test_one_sibling_and_undo_have_the_same_bits_as_before(diffusers: Any) -> None:
    for name in ("pixart", "wan"):
        model, call = build(diffusers, name), calls(name)
        before, processors = run(model, call), dict(model.attn_processors)
        report = accelerate(model)
        assert torch.equal(run(model, call), before)
        with report.siblings(SIBLINGS):
            run(model, call)
        assert torch.equal(run(model, call), before)
        accelerate(model, siblings=SIBLINGS)
        report.undo()
        report.undo()
        assert torch.equal(run(model, call), before)
        assert model.attn_processors == processors


def test_a_second_call_changes_nothing(diffusers: Any) -> None:
    model = pixart(diffusers)
    first = accelerate(model, siblings=SIBLINGS)
    processors = dict(model.attn_processors)
    second = accelerate(model)
    assert model.attn_processors == processors
    assert first.replaced == second.already == ("transformer_blocks.0.attn2", "transformer_blocks.1.attn2")
    assert second.replaced == first.already == ()
    shared = [layer for layer in processors.values() if isinstance(layer, SharedPrompt)]
    assert [layer.siblings for layer in shared] == [SIBLINGS] * 2
    assert not any(isinstance(layer.processor, SharedPrompt) for layer in shared)


def test_a_batch_doubled_for_guidance(diffusers: Any) -> None:
    model, call = pixart(diffusers).double(), cast(calls("pixart"), torch.float64)
    negative = draw(9, 1, PROMPT, 24).double().expand(ROWS, -1, -1)
    doubled = {
        **call,
        "hidden_states": torch.cat([call["hidden_states"]] * 2),
        "encoder_hidden_states": torch.cat([negative, call["encoder_hidden_states"]]),
        "encoder_attention_mask": torch.cat(
            [torch.ones_like(call["encoder_attention_mask"]), call["encoder_attention_mask"]]
        ),
        "timestep": torch.cat([call["timestep"]] * 2),
    }
    before = run(model, doubled)
    accelerate(model, siblings=SIBLINGS)
    assert error(run(model, doubled), before) < 1e-12


def test_the_processors_before_torch_2_and_with_fused_projections(diffusers: Any) -> None:
    for prepare in ("set_default_attn_processor", "fuse_qkv_projections"):
        model, call = pixart(diffusers).double(), cast(calls("pixart"), torch.float64)
        getattr(model, prepare)()
        before = run(model, call)
        accelerate(model, siblings=SIBLINGS)
        assert error(run(model, call), before) < 1e-12


def test_an_adapter_on_the_cross_attention_is_used_and_trained(diffusers: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["attn2.to_k", "attn2.to_v"], init_lora_weights=False)
    for name in ("pixart", "wan"):
        model, call = build(diffusers, name).double(), cast(calls(name), torch.float64)
        bare = run(model, call)
        if name == "wan":
            model.add_adapter(config)
        else:
            model = peft.get_peft_model(model, config)
        model.double()
        adapter = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
        assert len(adapter) == 8

        def gradients(model: nn.Module = model, call: dict = call, adapter: list = adapter) -> list[Tensor]:
            return list(torch.autograd.grad(model(**call)[0].square().sum(), adapter))

        before, grads = run(model, call), gradients()
        assert error(before, bare) > 1e-3
        accelerate(model, siblings=SIBLINGS)
        assert error(run(model, call), before) < 1e-12
        for own, theirs in zip(gradients(), grads, strict=True):
            assert theirs.abs().max() > 0
            torch.testing.assert_close(own, theirs, rtol=1e-9, atol=1e-11)


def test_checkpointed_layers_are_run_again_with_the_same_siblings(diffusers: Any) -> None:
    model, call = pixart(diffusers).double().train(), cast(calls("pixart"), torch.float64)

    def loss() -> Tensor:
        return model(**call)[0].square().sum()

    loss().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.enable_gradient_checkpointing()
    report = accelerate(model)
    with report.siblings(SIBLINGS):
        loss().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-11)
    with report.siblings(SIBLINGS):
        late = loss()
    with pytest.raises(CheckpointError):
        late.backward()


def test_siblings_that_differ_are_named(diffusers: Any) -> None:
    model, call = pixart(diffusers), calls("pixart")
    report = accelerate(model, siblings=SIBLINGS)
    tiled = draw(1, GROUPS, PROMPT, 24).repeat(SIBLINGS, 1, 1)
    with pytest.raises(ValueError, match=r"encoder_hidden_states differs.*siblings=3"):
        run(model, {**call, "encoder_hidden_states": tiled})
    mask = call["encoder_attention_mask"].clone()
    mask[-1, 1] = 0
    with pytest.raises(ValueError, match="encoder_attention_mask differs"):
        run(model, {**call, "encoder_attention_mask": mask})
    a_query_each = torch.zeros(ROWS, 16, PROMPT)
    with pytest.raises(ValueError, match=r"mask has shape \(6, 16, 10\).*siblings 1"):
        run(model, {**call, "encoder_attention_mask": a_query_each})
    with report.siblings(4), pytest.raises(ValueError, match="multiple of siblings"):
        run(model, call)


def test_equal_prompts_pass_in_low_precision(diffusers: Any) -> None:
    model = pixart(diffusers).bfloat16()
    accelerate(model, siblings=SIBLINGS)
    prompts = draw(1, GROUPS, PROMPT, 24)
    call = cast(calls("pixart", prompts), torch.bfloat16)
    assert run(model, call).isfinite().all()
    changed = call["encoder_hidden_states"].clone()
    changed[1, 3] = draw(5, 24).bfloat16()
    with pytest.raises(ValueError, match="encoder_hidden_states differs"):
        run(model, {**call, "encoder_hidden_states": changed})


JOINT = {
    "SD3Transformer2DModel": {
        "sample_size": 8,
        "num_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "caption_projection_dim": 16,
        "pooled_projection_dim": 16,
    },
    "QwenImageTransformer2DModel": {
        "num_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "axes_dims_rope": (4, 6, 6),
    },
    "FluxTransformer2DModel": {
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "pooled_projection_dim": 16,
        "axes_dims_rope": (4, 6, 6),
    },
}


@pytest.mark.parametrize("name", JOINT)
def test_joint_attention_is_refused_by_name_and_reason(diffusers: Any, name: str) -> None:
    model = getattr(diffusers, name)(**JOINT[name])
    processors = dict(model.attn_processors)
    with pytest.raises(ValueError, match=f"{name} has no prefix.*joint attention.*Nothing was changed"):
        accelerate(model)
    assert model.attn_processors == processors


def test_every_refused_name_is_a_class_of_diffusers(diffusers: Any) -> None:
    from unirl.accelerate import _JOINT
    from unirl.accelerate_inputs import MAKE_INPUTS

    for name in (*_JOINT, *MAKE_INPUTS):
        assert issubclass(getattr(diffusers, name), nn.Module)


def test_what_is_not_supported_is_named_with_what_is(diffusers: Any) -> None:
    supported = "PixArtTransformer2DModel, WanTransformer3DModel, Bagel"
    with pytest.raises(ValueError, match=f"Linear holds no supported transformer.*{supported}"):
        accelerate(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=f"model is a dict, not a torch.nn.Module.*{supported}"):
        unirl.accelerate({}, quiet=True)
    both = nn.ModuleList([pixart(diffusers), wan(diffusers)])
    with pytest.raises(ValueError, match="holds PixArtTransformer2DModel, WanTransformer3DModel; pass one"):
        accelerate(both)
    with pytest.raises(ValueError, match="siblings is 0"):
        accelerate(both[0], siblings=0)
    report = accelerate(pixart(diffusers))
    with pytest.raises(ValueError, match="siblings is 0"):
        report.siblings(0)
    with pytest.raises(ValueError, match="pass check=True"):
        accelerate(both[0], inputs={})
    with pytest.raises(ValueError, match="needs siblings"):
        accelerate(both[0], inputs=calls("pixart"), check=True)


class TokenMixer:
    """A processor of somebody else's."""

    def __call__(self, attn: nn.Module, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states.cumsum(1)


def test_a_processor_that_is_not_known_is_left_alone(diffusers: Any) -> None:
    model = pixart(diffusers)
    model.transformer_blocks[1].attn2.set_processor(TokenMixer())
    processors = dict(model.attn_processors)
    with pytest.raises(ValueError, match=r"transformer_blocks\.1\.attn2 has the processor TokenMixer"):
        accelerate(model, siblings=SIBLINGS)
    assert model.attn_processors == processors


def test_lost_processors_are_noticed(diffusers: Any) -> None:
    model = pixart(diffusers)
    report = accelerate(model)
    model.fuse_qkv_projections()
    with (
        pytest.raises(ValueError, match=r"FusedAttnProcessor2_0 again.*accelerate"),
        report.siblings(SIBLINGS),
    ):
        pass


@pytest.mark.parametrize("name", ["pixart", "wan", "wan-image"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_check_compares_before_and_after(diffusers: Any, name: str, dtype: torch.dtype) -> None:
    model = build(diffusers, name).to(dtype).train()
    model.blocks[0].eval() if name != "pixart" else model.pos_embed.eval()
    training = [module.training for module in model.modules()]
    report = accelerate(model, check=True)
    assert 0.0 <= report.comparison.max_rel <= report.comparison.tolerance < 0.1
    assert report.comparison.max_abs < 1.0 and report.comparison.siblings == 2
    assert [module.training for module in model.modules()] == training
    given = accelerate(model, siblings=SIBLINGS, check=True, inputs=cast(calls(name), dtype))
    assert given.comparison.siblings == SIBLINGS and given.comparison.max_rel <= given.comparison.tolerance
    assert "check: max abs error" in str(given)


def test_check_of_every_kind_of_conditions(diffusers: Any) -> None:
    models = [
        pixart(diffusers, use_additional_conditions=True, attention_head_dim=18, cross_attention_dim=36),
        pixart(diffusers, caption_channels=None),
        wan(diffusers, image_dim=16, added_kv_proj_dim=24, pos_embed_seq_len=10),
    ]
    for model in models:
        assert accelerate(model, check=True).comparison.max_rel < 1e-5


def test_a_failed_check_puts_every_processor_back(diffusers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pixart(diffusers)
    processors = dict(model.attn_processors)
    before = run(model, calls("pixart"))
    monkeypatch.setattr(SharedPrompt, "_shared_mask", lambda self, mask, rows: None)
    with pytest.raises(RuntimeError, match=r"max abs error .* relative .*put back"):
        accelerate(model, siblings=SIBLINGS, check=True, inputs=calls("pixart"))
    assert model.attn_processors == processors
    assert torch.equal(run(model, calls("pixart")), before)


def test_a_check_that_raises_puts_every_processor_back(diffusers: Any) -> None:
    model = pixart(diffusers)
    processors = dict(model.attn_processors)
    tiled = {**calls("pixart"), "encoder_hidden_states": draw(1, ROWS, PROMPT, 24)}
    with pytest.raises(ValueError, match="encoder_hidden_states differs"):
        accelerate(model, siblings=SIBLINGS, check=True, inputs=tiled)
    assert model.attn_processors == processors
    with torch.no_grad():
        model.proj_out.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="largest output before was nan"):
        accelerate(model, check=True)
    assert model.attn_processors == processors


def test_the_dispatcher_s_kernel_choice_reaches_the_processor_inside(diffusers: Any) -> None:
    model = wan(diffusers)
    accelerate(model)
    inside = model.blocks[0].attn2.processor.processor
    assert inside._attention_backend is None
    model.set_attention_backend("native")
    assert inside._attention_backend.value == "native"
    model.reset_attention_backend()
    assert inside._attention_backend is None


def test_a_copy_of_the_model_has_siblings_of_its_own(diffusers: Any) -> None:
    model = pixart(diffusers)
    report = accelerate(model)
    twin = copy.deepcopy(model)
    with report.siblings(SIBLINGS):
        assert model.transformer_blocks[0].attn2.processor.siblings == SIBLINGS
        assert twin.transformer_blocks[0].attn2.processor.siblings == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pixart", "wan"])
def test_one_graph_holds_the_whole_model(diffusers: Any, name: str) -> None:
    model, call = build(diffusers, name), calls(name)
    before = run(model, call)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    report = accelerate(compiled, siblings=SIBLINGS)
    assert report.family == type(model).__name__
    assert error(run(compiled, call), before) < 2e-6
    with report.siblings(1):
        assert error(run(compiled, call), before) < 2e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["pixart", "wan", "wan-image"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cuda_device_gets_the_same_values(diffusers: Any, name: str, dtype: torch.dtype) -> None:
    report = accelerate(build(diffusers, name).to("cuda", dtype), siblings=SIBLINGS, check=True)
    assert report.comparison.dtype is dtype and report.comparison.max_rel <= report.comparison.tolerance


def test_the_report_is_printed(diffusers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = unirl.accelerate(pixart(diffusers, num_layers=5), siblings=SIBLINGS)
    printed = capsys.readouterr().out
    assert printed == f"{report}\n"
    assert "PixArtTransformer2DModel" in printed
    assert (
        "replaced: 5 cross-attention processors (transformer_blocks.0.attn2, transformer_blocks.1.attn2 ... "
    )
    assert "siblings: 3 consecutive rows share a prompt" in printed


def test_bagel_is_on_the_operators_already() -> None:
    from unirl.models.bagel import Bagel, preset

    with torch.device("meta"):
        model = Bagel(preset("bagel-digits"))
    layers = len(model.language_model.model.layers)
    report = accelerate(model, check=True)
    assert report.replaced == () and report.comparison is None
    assert "replaced: nothing" in str(report) and f"denoising of {layers} layers" in str(report)
    assert "nothing to compare" in str(report)
    with pytest.raises(ValueError, match="Bagel takes it in each call"):
        accelerate(model, siblings=2)
    with pytest.raises(ValueError, match="nothing was replaced in Bagel"), report.siblings(2):
        pass


def test_the_name_can_be_called_however_it_was_imported() -> None:
    import unirl.accelerate
    from unirl import accelerate as from_package
    from unirl.accelerate import accelerate as from_module

    for name in (unirl.accelerate, from_package, from_module):
        with pytest.raises(ValueError, match="Linear holds no supported transformer"):
            name(nn.Linear(1, 1))
    with pytest.raises(AttributeError, match="no attribute 'speed_up'"):
        unirl.speed_up  # noqa: B018


@pytest.mark.slow
def test_a_model_of_no_library_loads_none() -> None:
    probe = """
import sys, torch, unirl
assert "unirl.accelerate" not in sys.modules
try:
    unirl.accelerate(torch.nn.Linear(1, 1))
except ValueError as error:
    assert "Linear" in str(error)
assert not {"diffusers", "peft", "ray", "transformers", "unirl.models"} & set(sys.modules)
print("called")
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120)
    assert done.stdout == "called\n", done.stderr
