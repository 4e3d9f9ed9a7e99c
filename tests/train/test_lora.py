# SPDX-License-Identifier: Apache-2.0
"""The adapter on the digits model: public names, reference without it, and a folder that plain peft loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from unirl.config import LoraConfig
from unirl.models.bagel import Bagel, preset
from unirl.train import lora

CONFIG = LoraConfig(rank=4, alpha=8)


def tiny(seed: int = 0) -> torch.nn.Module:
    """Two layers under names like the model's."""
    torch.manual_seed(seed)
    block = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(6, 5), "o_proj": torch.nn.Linear(5, 6)})
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList([block])})


def run(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    block = model["layers"][0]
    return block["o_proj"](torch.tanh(block["q_proj"](x)))


def randomise(model: torch.nn.Module, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lora.adapter_parameters(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


TINY = LoraConfig(rank=2, alpha=3, targets=("q_proj", "o_proj"))
X = torch.linspace(-1, 1, 12).reshape(2, 6)


def test_names_are_the_public_ones_of_every_target_in_every_layer():
    model = Bagel(preset("bagel-digits"))
    public = {name for name, _ in model.named_parameters()}
    lora.inject(model, CONFIG, seed=0)
    names = set(lora.adapter_parameters(model))
    layers = model.config.language.num_hidden_layers
    assert len(names) == layers * len(CONFIG.targets) * 2
    for name in names:
        module, side, _ = name.removeprefix("base_model.model.").rsplit(".", 2)
        assert f"{module}.weight" in public and side in ("lora_A", "lora_B")
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    assert trainable == {id(p) for p in lora.adapter_parameters(model).values()}


def test_injecting_changes_no_output_and_no_random_state():
    model = tiny()
    before, state = run(model, X), torch.get_rng_state()
    lora.inject(model, TINY, seed=5)
    assert torch.equal(run(model, X), before) and torch.equal(torch.get_rng_state(), state)


def test_start_depends_on_the_seed_alone():
    states = []
    for seed in (5, 5, 6):
        model = tiny()
        torch.rand(3)
        lora.inject(model, TINY, seed=seed)
        states.append(lora.adapter_state(model))
    same = [all(torch.equal(states[0][n], s[n]) for n in s) for s in states]
    assert same == [True, True, False]


def test_disabled_adapter_is_the_base_exactly():
    model = tiny()
    base = run(model, X)
    lora.inject(model, TINY, seed=0)
    randomise(model)
    changed = run(model, X)
    with lora.adapter_disabled(model):
        assert torch.equal(run(model, X), base)
    assert torch.equal(run(model, X), changed) and not torch.equal(changed, base)
    assert all(p.requires_grad for p in lora.adapter_parameters(model).values())
    with pytest.raises(ValueError, match="no adapter"), lora.adapter_disabled(tiny()):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_merged_weights_equal_the_unmerged_adapter_within_the_dtype(dtype):
    model = tiny().to(dtype)
    lora.inject(model, TINY, seed=0)
    randomise(model)
    x = X.to(dtype)
    unmerged = run(model, x)
    plain = tiny().to(dtype)
    state = {n: t.clone() for n, t in plain.state_dict().items()}
    merged = lora.merged_weights(model)
    assert set(merged) == {"layers.0.q_proj.weight", "layers.0.o_proj.weight"}
    plain.load_state_dict(state | merged)
    eps = torch.finfo(dtype).eps
    assert (run(plain, x) - unmerged).abs().max() <= 8 * eps * unmerged.abs().max()
    # W + (alpha / r) B A in float64.
    name = "layers.0.q_proj"
    a, b = (lora.adapter_parameters(model)[f"base_model.model.{name}.lora_{s}.weight"].double() for s in "AB")
    exact = state[f"{name}.weight"].double() + 1.5 * b @ a
    torch.testing.assert_close(merged[f"{name}.weight"].double(), exact, rtol=2 * eps, atol=2 * eps)


def test_factors_are_float32_in_a_bfloat16_model():
    model = tiny().to(torch.bfloat16)
    lora.inject(model, TINY, seed=0)
    assert {p.dtype for p in lora.adapter_parameters(model).values()} == {torch.float32}
    assert run(model, X.to(torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(targets=("q_prog",)), r"model\.lora\.targets \['q_prog'\].*q_proj"),
        (LoraConfig(targets=()), r"model\.lora\.targets"),
        (LoraConfig(dropout=0.1, targets=("q_proj",)), r"model\.lora\.dropout is 0\.1; allowed: 0"),
        (LoraConfig(rank=0, targets=("q_proj",)), r"model\.lora\.rank is 0"),
    ],
)
def test_bad_settings_name_their_key(config, message):
    with pytest.raises(ValueError, match=message):
        lora.inject(tiny(), config, seed=0)


def test_second_adapter_is_refused():
    model = tiny()
    lora.inject(model, TINY, seed=0)
    with pytest.raises(ValueError, match="already"):
        lora.inject(model, TINY, seed=0)


def test_export_loads_in_plain_peft_without_this_package(tmp_path: Path):
    model = tiny()
    lora.inject(model, TINY, seed=0)
    randomise(model)
    folder = lora.export(model, tmp_path / "adapter")
    assert sorted(p.name for p in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((folder / "adapter_config.json").read_text())["peft_type"] == "LORA"
    save_file({k: v.contiguous() for k, v in tiny().state_dict().items()}, tmp_path / "base.safetensors")
    script = f"""
import sys, torch, peft
from safetensors.torch import load_file, save_file
block = torch.nn.ModuleDict({{"q_proj": torch.nn.Linear(6, 5), "o_proj": torch.nn.Linear(5, 6)}})
base = torch.nn.ModuleDict({{"layers": torch.nn.ModuleList([block])}})
base.load_state_dict(load_file({str(tmp_path / "base.safetensors")!r}))
model = peft.PeftModel.from_pretrained(base, {str(folder)!r}).eval()
x = torch.linspace(-1, 1, 12).reshape(2, 6)
block = model.base_model.model["layers"][0]
save_file({{"y": block["o_proj"](torch.tanh(block["q_proj"](x)))}}, {str(tmp_path / "out.safetensors")!r})
assert not [m for m in sys.modules if m.split(".")[0] == "unirl"]
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
    assert torch.equal(load_file(tmp_path / "out.safetensors")["y"], run(model, X))


def test_exported_adapter_loads_back_with_its_rank_and_names(tmp_path: Path):
    model = tiny()
    lora.inject(model, TINY, seed=0)
    randomise(model)
    folder = lora.export(model, tmp_path)
    fresh = tiny()
    lora.load(fresh, folder)
    assert torch.equal(run(fresh, X), run(model, X))
    other = tiny()
    lora.inject(other, LoraConfig(rank=2, alpha=4, targets=("q_proj", "o_proj")), seed=0)
    with pytest.raises(ValueError, match=r"rank and alpha 2, 3 differ.*2, 4"):
        lora.load(other, folder)
    narrow = tiny()
    lora.inject(narrow, LoraConfig(rank=2, alpha=3, targets=("q_proj",)), seed=0)
    with pytest.raises(ValueError, match=r"2 of 4 names are bound; not in the model: .*o_proj"):
        lora.load(narrow, folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no adapter_model\.safetensors"):
        lora.load(tiny(), folder)


def test_export_of_other_values_leaves_the_model_alone(tmp_path: Path):
    model = tiny()
    lora.inject(model, TINY, seed=0)
    randomise(model)
    before = lora.adapter_state(model)
    lora.export(model, tmp_path, values={n: torch.zeros_like(t) for n, t in before.items()})
    assert all(not t.any() for t in load_file(tmp_path / "adapter_model.safetensors").values())
    assert all(torch.equal(before[n], p) for n, p in lora.adapter_parameters(model).items())
