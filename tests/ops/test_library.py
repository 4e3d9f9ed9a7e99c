# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.unirl``: opcheck, tracing, imports, backends."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import unirl.ops as ops
from unirl.ops import _backends

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


def test_operators_trace_without_a_graph_break() -> None:
    def replay(x: torch.Tensor, v: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        guided = ops.guided_velocity(v, x, None, 2.0, 1.0, renorm="channel")
        sigma, sigma_next = torch.tensor([1.0, 0.5]), torch.tensor([0.6, 0.2])
        return ops.flow_log_prob(x, guided, y, sigma, sigma_next, eta=0.7, rule="flow").sum()

    x, v, y = torch.randn(3, 2, 3, 4).unbind(0)
    leaves = [v.clone().requires_grad_() for _ in range(2)]
    eager = replay(x, leaves[0], y)
    compiled = torch.compile(replay, backend="aot_eager", fullgraph=True)(x, leaves[1], y)
    eager.backward()
    compiled.backward()
    assert torch.equal(eager, compiled) and torch.equal(leaves[0].grad, leaves[1].grad)


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


def test_an_unavailable_backend_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setattr(_backends._native, "extension", None)
        with pytest.raises(
            ValueError, match=r"'native' is not available on cpu: the extension unirl\._C is not"
        ):
            ops.keyed_normal((1, 4), seed=0, row_keys=[0], step=0, backend="native")
        # Without it the same bits come from PyTorch, also through torch.ops.
        plain = torch.ops.unirl.keyed_normal([1, 4], 0, torch.tensor([0]), 0, 0, torch.float32)
    assert torch.equal(plain, ops.keyed_normal((1, 4), seed=0, row_keys=[0], step=0, backend="native"))
