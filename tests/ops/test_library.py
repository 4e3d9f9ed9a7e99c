# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.unirl``: opcheck, tracing, imports, backends."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import unirl.ops as ops
from unirl.ops import _attention_backends, _backends, _hopper_attention

ROWS = (
    torch.tensor([1.0, 0.5], dtype=torch.float64),
    torch.tensor([0.6, 0.2], dtype=torch.float64),
    torch.tensor([0.6, 0.2], dtype=torch.float64),
    torch.tensor([0.7, 0.7], dtype=torch.float64),
)
KEYS = torch.tensor([3, 4])


def opcheck(operator: torch._ops.OpOverload, arguments: tuple) -> None:
    results = torch.library.opcheck(operator, arguments)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_keyed_normal(dtype: torch.dtype) -> None:
    opcheck(torch.ops.unirl.keyed_normal.default, ([2, 3, 5], 1, KEYS, 0, 0, dtype))


@pytest.mark.parametrize("rule", ["flow", "cps", "dance"])
@pytest.mark.parametrize("lengths", [None, torch.tensor([2, 3])])
def test_opcheck_flow(rule: str, lengths: torch.Tensor | None) -> None:
    x, v, y = torch.randn(3, 2, 3, 4).unbind(0)
    opcheck(torch.ops.unirl.flow_step.default, (x, v, *ROWS, lengths, rule, 7, KEYS, 0, 1, torch.bfloat16))
    leaf = v.clone().requires_grad_()
    for with_mean in (False, True):
        opcheck(torch.ops.unirl.flow_log_prob.default, (x, leaf, y, *ROWS, lengths, rule, with_mean))
    opcheck(
        torch.ops.unirl.flow_log_prob_backward.default,
        (torch.randn(2), None, x, v, y, *ROWS, lengths, rule),
    )


@pytest.mark.parametrize("renorm", [None, "global", "channel", "text_channel"])
def test_opcheck_guided_velocity(renorm: str | None) -> None:
    cond, text, image = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(3))
    scales = torch.tensor([4.0, 1.0]).double(), torch.tensor([1.5, 2.0]).double()
    for branches in ((text, image), (text, None), (None, image)):
        inputs = (cond, *branches, *scales, torch.tensor([3, 1]), renorm, 0.1)
        opcheck(torch.ops.unirl.guided_velocity.default, inputs)
        detached = tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in inputs)
        opcheck(torch.ops.unirl.guided_velocity_backward.default, (torch.randn(2, 3, 4), *detached))


def test_opcheck_packing() -> None:
    rows = [torch.randn(2, length, 3, requires_grad=True) for length in (4, 1, 2)]
    opcheck(torch.ops.unirl.pad_latents.default, (rows, 5))
    opcheck(torch.ops.unirl.trim_latents.default, (torch.randn(2, 3, 5, 2, requires_grad=True), [5, 2]))


def test_opcheck_digests() -> None:
    values = torch.randint(0, 9, (4, 3))
    opcheck(torch.ops.unirl.layout_digest.default, (values, None))
    opcheck(torch.ops.unirl.layout_digest.default, (values.flatten(), torch.tensor([0, 5, 12])))
    opcheck(torch.ops.unirl.tensor_digest.default, ([torch.randn(3), torch.zeros(2, 2).bfloat16()],))


def traced_equals_eager(function: Callable[..., torch.Tensor]) -> None:
    x, v, y = torch.randn(3, 2, 3, 4).unbind(0)
    leaves = [v.clone().requires_grad_() for _ in range(2)]
    eager = function(x, leaves[0], y)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(x, leaves[1], y)
    eager.backward()
    compiled.backward()
    assert torch.equal(eager, compiled) and torch.equal(leaves[0].grad, leaves[1].grad)


def test_operators_trace_without_a_graph_break() -> None:
    def replay(x: torch.Tensor, v: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        guided = ops.guided_velocity(v, x, None, torch.tensor(2.0), 1.0, renorm="channel", lengths=[3, 1])
        sigma, sigma_next = torch.tensor([1.0, 0.5]), torch.tensor([0.6, 0.2])
        return ops.flow_log_prob(x, guided, y, sigma, sigma_next, eta=0.7, rule="flow").sum()

    traced_equals_eager(replay)


@pytest.mark.parametrize("backend", [None, "native"])
def test_attention_and_packing_trace_without_a_graph_break(backend: str | None) -> None:
    def pack_and_attend(x: torch.Tensor, v: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        padded = ops.pad_latents(ops.trim_latents(v.unsqueeze(1), [2, 1]), 4)
        query = padded.transpose(1, 2).contiguous().transpose(1, 2)  # tokens first in memory
        prefix = padded[:1]
        out = ops.sibling_prefix_attention(
            query, padded, padded, prefix, prefix, prefix_lengths=[3], backend=backend
        )
        return out.square().sum()

    traced_equals_eager(pack_and_attend)


def test_offsets_beyond_31_bits_are_addressed() -> None:
    # Two rows more than 2^31 bytes apart; the pages between them are never touched.
    storage = torch.empty((1 << 31) + (1 << 16), dtype=torch.uint8)

    def far(near: torch.Tensor) -> torch.Tensor:
        flat = storage.view(near.dtype)
        apart = (1 << 31) // near.element_size() + 64
        view = flat.as_strided(near.shape, (apart, *near[0].contiguous().stride()))
        return view.copy_(near)

    torch.manual_seed(0)
    x = torch.randn(2, 5, 64).bfloat16()
    sigma, sigma_next = torch.tensor([1.0, 0.5]), torch.tensor([0.6, 0.2])
    step = {"eta": 0.7, "rule": "flow", "seed": 0, "row_keys": [1, 2], "step": 0}
    near = ops.flow_step(x, x, sigma, sigma_next, **step)
    assert all(map(torch.equal, ops.flow_step(far(x), x, sigma, sigma_next, **step), near))
    guided = ops.guided_velocity(x, x * 0.5, None, 3.0, 1.0)
    assert torch.equal(ops.guided_velocity(far(x), x * 0.5, None, 3.0, 1.0), guided)
    latents = x.unsqueeze(1)
    assert all(map(torch.equal, ops.trim_latents(far(latents), [5, 2]), ops.trim_latents(latents, [5, 2])))
    assert torch.equal(ops.pad_latents([far(x)], 6), ops.pad_latents([x], 6))
    rows = torch.randint(-9, 9, (2, 7))
    assert torch.equal(ops.layout_digest(far(rows)), ops.layout_digest(rows))
    assert torch.equal(ops.tensor_digest([far(x)]), ops.tensor_digest([x]))
    heads = x.float().unsqueeze(1)
    attended = ops.sibling_prefix_attention(heads, heads, heads, heads[:1], heads[:1], backend="native")
    distant = far(heads)
    for inputs in ((distant, heads, heads), (heads, distant, distant)):
        got = ops.sibling_prefix_attention(*inputs, heads[:1], heads[:1], backend="native")
        assert torch.equal(got, attended)


def test_importing_the_operators_loads_no_framework_and_starts_nothing() -> None:
    program = (
        "import sys, threading, unirl.ops, torch\n"
        "heavy = {'ray', 'diffusers', 'transformers', 'peft', 'hydra', 'triton', 'unirl.models'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert threading.active_count() == 1\n"
        "assert not torch.cuda.is_initialized()\n"
        "import multiprocessing; assert not multiprocessing.active_children()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_the_extension_is_built_and_is_the_default_on_the_cpu() -> None:
    for operator in ("keyed_normal", "flow", "guided_velocity", "packing", "digest"):
        assert _backends.default_backend(operator, "cpu") == "native"


# Where each operator has its opcheck: beside what it needs, here or in the operator's own test file.
CHECKED = {
    "keyed_normal",
    "flow_step",
    "flow_log_prob",
    "flow_log_prob_backward",
    "guided_velocity",
    "guided_velocity_backward",
    "pad_latents",
    "trim_latents",
    "layout_digest",
    "tensor_digest",
    "sibling_prefix_attention",
    "sibling_prefix_attention_backward",
}


def test_every_operator_has_an_opcheck() -> None:
    registered = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("unirl::")
    }
    assert registered == CHECKED
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert all(f".{name}.default" in text for name in CHECKED)


def test_a_wrong_fake_rule_or_gradient_is_found() -> None:
    with torch.library._scoped_library("unirl_wrong", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.define("thrice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: (2 * x).contiguous(), "CPU")
        library.impl("thrice", lambda x: 3 * x, "CPU")
        torch.library.register_fake("unirl_wrong::twice", torch.empty_like, lib=library)  # other strides
        torch.library.register_fake("unirl_wrong::thrice", torch.empty_like, lib=library)
        torch.library.register_autograd("unirl_wrong::thrice", lambda ctx, grad: 2 * grad, lib=library)
        with pytest.raises(Exception, match="test_faketensor failed"):
            opcheck(torch.ops.unirl_wrong.twice.default, (torch.randn(3, 4).t(),))
        leaf = torch.randn(3, dtype=torch.float64, requires_grad=True)
        with pytest.raises(RuntimeError, match="Jacobian mismatch"):
            torch.autograd.gradcheck(torch.ops.unirl_wrong.thrice, (leaf,))


@pytest.fixture
def nothing_warned() -> Iterator[None]:
    """Warnings come again, whatever came before this test, and count for none that follow."""
    _backends._warn.cache_clear()
    yield
    _backends._warn.cache_clear()


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backends._native, "extension", None)
    monkeypatch.setattr(_backends, "HAS_TRITON", False)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("operator", ["keyed_normal", "flow", "guided_velocity", "packing", "digest"])
def test_a_missing_kernel_is_told_once_and_an_asked_one_is_an_error(
    operator: str, device: str, monkeypatch: pytest.MonkeyPatch, nothing_warned: None
) -> None:
    kernel = "triton" if device == "cuda" and operator not in ("packing", "digest") else "native"
    remedy = "pip install triton" if kernel == "triton" else r"run pip install -e \."
    without_kernels(monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"{operator} on {device} runs in plain PyTorch.*{remedy}"):
        assert _backends.pick(operator, torch.device(device), None) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _backends.pick(operator, torch.device(device), None) == "reference"
        assert _backends.pick(operator, torch.device(device), "reference") == "reference"
    with pytest.raises(ValueError, match=f"'{kernel}' is not available on {device}: .*{remedy}"):
        _backends.pick(operator, torch.device(device), kernel)


def test_an_extension_without_cuda_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backends._native.extension, "cuda_architectures", None)
    with pytest.raises(ValueError, match="built without CUDA; install with nvcc on the PATH"):
        _backends.pick("digest", torch.device("cuda"), "native")


@pytest.mark.parametrize("hopper", [True, False])
def test_attention_tells_of_a_missing_kernel_that_the_device_could_have(
    hopper: bool, monkeypatch: pytest.MonkeyPatch, nothing_warned: None
) -> None:
    with FakeTensorMode():
        inputs = tuple(torch.empty(2, 2, 3, 64, device="cuda", dtype=torch.bfloat16) for _ in range(5))
    without_kernels(monkeypatch)
    monkeypatch.setattr(_hopper_attention, "fits_device", lambda index: hopper)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert _attention_backends.route(inputs, None, 0.1) == "reference"
        assert _attention_backends.route(inputs, None, 0.1) == "reference"
    texts = [str(warning.message) for warning in caught]
    expected = ["hopper", "triton"] if hopper else ["triton"]
    assert all(f"without its {name} kernel" in text for name, text in zip(expected, texts, strict=True))
    assert "pip install triton" in texts[-1]
    with pytest.raises(ValueError, match="'triton' cannot run this call on cuda: Triton is not installed"):
        _attention_backends.check_requested("triton", inputs, None, 0.1)
    with pytest.raises(ValueError, match="'hopper' cannot run this call on cuda: the extension"):
        _attention_backends.check_requested("hopper", inputs, None, 0.1)


def test_attention_on_the_cpu_tells_of_a_missing_extension_but_not_of_what_it_does_not_take(
    monkeypatch: pytest.MonkeyPatch, nothing_warned: None
) -> None:
    inputs = tuple(torch.randn(2, 2, 3, 8) for _ in range(5))
    half = tuple(tensor.bfloat16() for tensor in inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _attention_backends.route(half, None, 0.1) == "reference"
    without_kernels(monkeypatch)
    with pytest.warns(RuntimeWarning, match="attention on cpu runs without its native kernel"):
        assert _attention_backends.route(inputs, None, 0.1) == "reference"


def test_an_unavailable_backend_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, nothing_warned: None
) -> None:
    with monkeypatch.context() as without:
        without.setattr(_backends._native, "extension", None)
        with pytest.raises(
            ValueError, match=r"'native' is not available on cpu: the extension unirl\._C is not"
        ):
            ops.keyed_normal((1, 4), seed=0, row_keys=[0], step=0, backend="native")
        # Without it the same bits come from PyTorch, also through torch.ops.
        with pytest.warns(RuntimeWarning, match="keyed_normal on cpu"):
            plain = torch.ops.unirl.keyed_normal([1, 4], 0, torch.tensor([0]), 0, 0, torch.float32)
    assert torch.equal(plain, ops.keyed_normal((1, 4), seed=0, row_keys=[0], step=0, backend="native"))
