# SPDX-License-Identifier: Apache-2.0
"""Triton kernels in Triton's interpreter against the CPU operators; run by test_triton.py in its own process."""

from __future__ import annotations

import itertools
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton

from unirl.ops.flow import RULES, StepArguments
from unirl.ops.guidance import RENORMS
from unirl.ops.noise import keyed_normal_reference
from unirl.ops.triton import flow, guidance, noise

SHAPE = (3, 26, 41)  # more than one chunk, and no multiple of anything
LENGTHS = torch.tensor([26, 3, 0])


def noise_has_the_bits_of_the_cpu() -> None:
    keys = torch.tensor([5, -7, 2**62])
    for shape in ((3, 10), (3, 1500)):
        for seed in (-3, 1):
            ours = noise.keyed_normal(keys, shape, seed, 7, 2, torch.float32)
            assert torch.equal(ours, keyed_normal_reference(keys, shape, seed, 7, 2))


def steps_equal_the_cpu() -> None:
    sigma = torch.tensor([1.0, 0.5, 0.2], dtype=torch.float64)
    sigma_next = torch.tensor([0.9, 0.2, 0.0], dtype=torch.float64)
    level = torch.tensor([0.7, 0.0, 0.7], dtype=torch.float64)
    keys = torch.arange(3)
    for rule, dtype, lengths in itertools.product(RULES, (torch.float32, torch.float64), (None, LENGTHS)):
        x, v = torch.randn(2, *SHAPE, dtype=dtype)
        rows = StepArguments(sigma, sigma_next, sigma_next, level, lengths)
        tail = (rule, 1, keys, 0, 1, torch.float32)
        following, log_prob = flow.flow_step(x, v, rows, *tail)
        native = torch.ops.unirl.flow_step(x, v, *rows, *tail)
        assert torch.equal(following, native[0])
        torch.testing.assert_close(log_prob, native[1], rtol=1e-6, atol=1e-6)
        replayed = flow.flow_log_prob(x, v, following, rows, rule, True)
        assert torch.equal(replayed[0], log_prob)
        native_replay = torch.ops.unirl.flow_log_prob(x, v, following, *rows, rule, True)
        for ours, theirs in zip(replayed[1:], native_replay[1:], strict=True):
            assert torch.equal(ours, theirs)
        upstream = torch.randn(3, dtype=dtype), torch.randn(SHAPE, dtype=dtype)
        for grad_mean in (None, upstream[1]):
            ours = flow.flow_log_prob_backward(upstream[0], grad_mean, x, v, following, rows, rule)
            theirs = torch.ops.unirl.flow_log_prob_backward(
                upstream[0], grad_mean, x, v, following, *rows, rule
            )
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def padding_and_neighbours_leave_every_bit() -> None:
    x, v = torch.randn(2, 2, 60, 41)
    sigma = torch.tensor([1.0, 0.5], dtype=torch.float64)
    rows = StepArguments(sigma, sigma * 0.5, sigma * 0.5, sigma * 0 + 0.7, torch.tensor([60, 7]))
    whole = flow.flow_step(x, v, rows, "flow", 1, torch.tensor([3, 4]), 0, 1, torch.bfloat16)
    alone_rows = StepArguments(*(value[1:] for value in rows[:4]), None)
    alone = flow.flow_step(
        x[1:, :7].contiguous(),
        v[1:, :7].contiguous(),
        alone_rows,
        "flow",
        1,
        torch.tensor([4]),
        0,
        1,
        torch.bfloat16,
    )
    assert torch.equal(whole[0][1, :7], alone[0][0]) and torch.equal(whole[1][1:], alone[1])
    assert float(whole[0][1, 7:].abs().sum()) == 0


def guidance_equals_the_cpu() -> None:
    scales = torch.tensor([4.0, 1.0, 0.5]).double(), torch.tensor([1.5, 1.2, 1.0]).double()
    branches = ((True, True), (True, False), (False, True), (False, False))
    for renorm, lengths, (has_text, has_image) in itertools.product(RENORMS, (None, LENGTHS), branches):
        cond, text, image, upstream = torch.randn(4, *SHAPE)
        inputs = (
            cond,
            text if has_text else None,
            image if has_image else None,
            *scales,
            lengths,
            renorm,
            0.3,
        )
        ours, theirs = guidance.guided_velocity(*inputs), torch.ops.unirl.guided_velocity(*inputs)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        gradients = guidance.guided_velocity_backward(upstream, *inputs)
        expected = torch.ops.unirl.guided_velocity_backward(upstream, *inputs)
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    torch.manual_seed(0)
    noise_has_the_bits_of_the_cpu()
    steps_equal_the_cpu()
    padding_and_neighbours_leave_every_bit()
    guidance_equals_the_cpu()
    print("equal", triton.__version__)
