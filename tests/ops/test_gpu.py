# SPDX-License-Identifier: Apache-2.0
"""The operators on a CUDA device against the CPU and float64.

Every combination that Triton compiles takes about a second, so that the cases cover each value of each argument and
most pairs, not the product: all GPU tests of the operators together take about a minute.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unirl import ops
from unirl.ops import _backends

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_native = pytest.mark.skipif(
    _backends.why_unavailable("native", "cuda") is not None, reason="unirl._C was built without CUDA"
)
RENORMS = (None, "global", "channel", "text_channel")


def test_device_kernels_are_the_default() -> None:
    assert _backends.default_backend("flow", "cuda") == "triton"
    assert _backends.default_backend("guided_velocity", "cuda") == "triton"


@pytest.mark.parametrize("length", [1, 4, 10, 16, 64, 1024, 5000])
def test_noise_has_the_bits_of_the_cpu(length: int) -> None:
    arguments = {"seed": -5, "step": 2**31 + 3, "stream": 9}
    keys = torch.tensor([3, -4, 2**62, 0])
    device = ops.keyed_normal((4, length), row_keys=keys.cuda(), **arguments)
    assert device.is_cuda and torch.equal(
        device.cpu(), ops.keyed_normal((4, length), row_keys=keys, **arguments)
    )


@pytest.mark.parametrize(
    ("rule", "dtype", "ragged", "shape"),
    [
        ("flow", torch.float32, True, (5, 77, 64)),
        ("flow", torch.bfloat16, False, (2, 4096, 16)),
        ("cps", torch.bfloat16, True, (1, 33, 3, 5)),
        ("cps", torch.float64, False, (3, 1, 1)),
        ("dance", torch.float32, True, (5, 77, 64)),
    ],
)
def test_step_replay_and_gradient_equal_the_cpu(
    rule: str, dtype: torch.dtype, ragged: bool, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    rows = shape[0]
    x, v = torch.randn(2, *shape).to(dtype)
    sigma = torch.linspace(1, 0.2, rows)
    sigma_next = sigma * 0.7
    lengths = [max(0, shape[1] - 9 * row) for row in range(rows)] if ragged else None
    results = []
    for device in ("cpu", "cuda"):
        inputs = [tensor.to(device) for tensor in (x, v, sigma, sigma_next)]
        leaf = inputs[1].detach().requires_grad_()
        following, log_prob = ops.flow_step(
            inputs[0],
            inputs[1],
            inputs[2],
            inputs[3],
            eta=0.7,
            rule=rule,
            seed=1,
            row_keys=list(range(rows)),
            step=4,
            trajectory_dtype=torch.bfloat16,
            lengths=lengths,
        )
        replayed, mean, scale = ops.flow_log_prob(
            inputs[0],
            leaf,
            following,
            inputs[2],
            inputs[3],
            eta=0.7,
            rule=rule,
            lengths=lengths,
            return_mean=True,
        )
        assert torch.equal(replayed.detach(), log_prob)
        weights = torch.linspace(-1, 1, rows, device=device, dtype=replayed.dtype)
        (grad,) = torch.autograd.grad((replayed * weights).sum() + (mean**2).sum(), leaf)
        results.append([part.detach().cpu() for part in (following, log_prob, mean, scale, grad)])
    cpu, gpu = results
    if dtype is not torch.float64:
        assert torch.equal(gpu[0], cpu[0]) and torch.equal(gpu[2], cpu[2])
    for ours, theirs in zip(gpu, cpu, strict=True):
        tolerance = (
            {"rtol": 2e-2, "atol": 2e-2} if ours.dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        )
        torch.testing.assert_close(ours, theirs, **tolerance)


def test_a_row_alone_and_in_a_batch_has_the_same_bits_on_the_device() -> None:
    x, v = torch.randn(2, 6, 304, 64, device="cuda")
    sigma = torch.linspace(1, 0.2, 6, device="cuda")
    lengths = [304, 7, 64, 299, 128, 0]

    def step(rows: slice, size: int, counts: list[int] | None) -> tuple[Tensor, Tensor]:
        return ops.flow_step(
            x[rows, :size],
            v[rows, :size],
            sigma[rows],
            sigma[rows] * 0.5,
            eta=0.7,
            rule="flow",
            seed=0,
            row_keys=[f"r0.p0/{row}" for row in range(6)][rows],
            step=0,
            lengths=counts,
        )

    def guide(rows: slice, size: int, counts: list[int] | None, renorm: str | None) -> Tensor:
        branches = (x[rows, :size], v[rows, :size], x[rows, :size] * 0.5)
        return ops.guided_velocity(*branches, 4.0, 1.5, renorm=renorm, lengths=counts)

    whole = step(slice(0, 6), 304, lengths)
    for row, length in enumerate(lengths):
        alone = step(slice(row, row + 1), length, None)
        assert torch.equal(whole[0][row, :length], alone[0][0]) and torch.equal(whole[1][row], alone[1][0])
        for renorm in ("global", "text_channel"):
            guided = guide(slice(0, 6), 304, lengths, renorm)
            assert torch.equal(guided[row, :length], guide(slice(row, row + 1), length, None, renorm)[0])


@pytest.mark.parametrize(
    ("renorm", "dtype", "shape", "branches", "ragged"),
    [
        (None, torch.bfloat16, (4, 1, 1), "both", True),
        ("global", torch.float32, (4, 9, 64), "both", True),
        ("global", torch.bfloat16, (4, 700, 100), "text", False),
        ("global", torch.float64, (4, 9, 64), "image", True),
        ("channel", torch.float32, (4, 700, 100), "both", False),
        ("channel", torch.bfloat16, (4, 9, 64), "image", True),
        ("text_channel", torch.float32, (4, 9, 64), "both", True),
        ("text_channel", torch.bfloat16, (4, 700, 100), "text", False),
        ("text_channel", torch.float64, (4, 9, 64), "both", False),
        ("text_channel", torch.float32, (4, 700, 100), "image", True),
        ("text_channel", torch.float32, (4, 9, 64), "neither", True),
    ],
)
def test_guidance_and_its_gradient_equal_the_cpu(
    renorm: str | None, dtype: torch.dtype, shape: tuple[int, ...], branches: str, ragged: bool
) -> None:
    torch.manual_seed(0)
    has_text, has_image = branches in ("text", "both"), branches in ("image", "both")
    parts = torch.randn(4, *shape).to(dtype)
    lengths = [shape[1], 0, shape[1] // 2, shape[1]]
    results = []
    for device in ("cpu", "cuda"):
        leaves = [part.to(device).requires_grad_() for part in parts[:3]]
        text, image = leaves[1] if has_text else None, leaves[2] if has_image else None
        scales = (
            torch.tensor([4.0, 1.0, 0.5, 2.0], device=device),
            torch.tensor([1.5, 1.0, 1.2, 1.0], device=device),
        )
        out = ops.guided_velocity(
            leaves[0],
            text,
            image,
            *scales,
            renorm=renorm,
            renorm_min=0.2,
            lengths=lengths if ragged else None,
        )
        used = [leaf for leaf in (leaves[0], text, image) if leaf is not None]
        grads = torch.autograd.grad(out, used, parts[3].to(device))
        results.append([part.detach().cpu() for part in (out, *grads)])
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for ours, theirs in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


@needs_native
@pytest.mark.parametrize(
    ("dtype", "channels"),
    [
        (torch.float32, 1),
        (torch.bfloat16, 3),
        (torch.bfloat16, 64),
        (torch.int8, 1),
        (torch.bool, 16),
        (torch.complex64, 16),
    ],
)
@pytest.mark.parametrize("stride", ["contiguous", "tokens", "channels", "offset"])
def test_packing_moves_the_same_bytes_as_the_cpu(dtype: torch.dtype, channels: int, stride: str) -> None:
    # More rows than one launch takes.
    lengths = [5, 0, 300, 1, 299] + [3] * (600 if dtype is torch.float32 else 70)
    rows = []
    for length in lengths:
        row = torch.randint(0, 2, (2, 2 * length + 1, channels + 1)).to(dtype)
        if stride == "contiguous":
            row = row[:, :length, :channels].contiguous()
        elif stride == "tokens":
            row = row[:, : 2 * length : 2, :channels]
        elif stride == "channels":
            row = row[:, :length, :channels].transpose(1, 2).contiguous().transpose(1, 2)
        else:
            row = row[:, 1 : length + 1, 1:]
        rows.append(row)
    padded = ops.pad_latents([row.cuda() for row in rows], 301)
    strided = [row.cuda()[..., :] for row in rows]
    assert torch.equal(padded.cpu(), ops.pad_latents(rows, 301))
    assert torch.equal(ops.pad_latents(strided, 301), padded)
    for part, row in zip(ops.trim_latents(padded, lengths), rows, strict=True):
        assert torch.equal(part.cpu(), row)
    frames_first = padded.transpose(0, 1).contiguous().transpose(0, 1)
    for part, row in zip(ops.trim_latents(frames_first, lengths), rows, strict=True):
        assert torch.equal(part.cpu(), row)


@needs_native
def test_digests_have_the_bits_of_the_cpu() -> None:
    for size in (0, 1, 16, 127, 128, 129, 1000):
        values = torch.randint(-(2**62), 2**62, (513, size))
        assert torch.equal(ops.layout_digest(values.cuda()).cpu(), ops.layout_digest(values))
    ragged = torch.arange(1000)
    offsets = [0, 0, 3, 500, 500, 1000]
    assert torch.equal(ops.layout_digest(ragged.cuda(), offsets).cpu(), ops.layout_digest(ragged, offsets))
    base = torch.randn(1 << 20)
    tensors = [
        torch.zeros(0),
        *(base[: 4**power] for power in range(11)),
        base[1:1000],  # not on a 16-byte boundary
        base[3:70000].bfloat16()[1:],
        base[: 1 << 18].view(512, 512).t(),
        torch.tensor(True),
        torch.arange(12345, dtype=torch.int8),
        torch.zeros(2, 0, 3),
    ]
    on_device = [tensor.cuda() for tensor in tensors]
    on_device[12] = base.cuda()[1:1000]
    assert torch.equal(ops.tensor_digest(on_device).cpu(), ops.tensor_digest(tensors))
    many = [base[index : index + 33] for index in range(3000)]
    assert torch.equal(ops.tensor_digest([tensor.cuda() for tensor in many]).cpu(), ops.tensor_digest(many))
    for _ in range(5):  # the same bits in every run
        assert torch.equal(ops.tensor_digest(on_device), ops.tensor_digest(on_device))


@needs_native
def test_more_than_two_to_the_31_elements_are_addressed() -> None:
    rows = [torch.full((1, 1 << 16, 1), fill, dtype=torch.int8, device="cuda") for fill in (1, 2)]
    padded = ops.pad_latents(rows, (1 << 31) // 2 + 5)
    assert padded.numel() > 2**31
    assert int(padded[1, 0, (1 << 16) - 1, 0]) == 2 and int(padded[1, 0, 1 << 16, 0]) == 0
    assert int(padded.view(-1)[-1]) == 0
    digest = ops.tensor_digest([padded])
    assert torch.equal(digest, ops.tensor_digest([padded.clone()]))


@needs_native
def test_packing_of_pinned_rows_is_pinned() -> None:
    rows = [torch.randn(2, length, 3).pin_memory() for length in (4, 0, 7)]
    padded = ops.pad_latents(rows, 8)
    assert padded.is_pinned() and torch.equal(padded, ops.pad_latents([row.clone() for row in rows], 8))
    for part, row in zip(ops.trim_latents(padded, torch.tensor([4, 0, 7]).cuda()), rows, strict=True):
        assert part.is_pinned() or not part.numel()
        assert torch.equal(part, row)


def test_lengths_on_the_device_are_clamped_to_the_bound() -> None:
    x = torch.randn(3, 5, 64, device="cuda")
    sigma = torch.full((3,), 0.5, device="cuda")
    counts = torch.tensor([2**40, -3, 2], device="cuda")
    for backend in ("triton", "reference"):
        arguments = {"eta": 0.7, "rule": "flow", "backend": backend}
        wild, tame = (
            ops.flow_log_prob(x, x, x * 0.9, sigma, sigma * 0.5, lengths=lengths, **arguments)
            for lengths in (counts, [5, 0, 2])
        )
        assert torch.equal(wild, tame)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_operators_run_on_the_device_of_their_tensors() -> None:
    torch.cuda.set_device(0)
    x = torch.randn(2, 64, 64)
    sigma = torch.tensor([1.0, 0.5])

    def run(device: str) -> list[Tensor]:
        y, s = x.to(device), sigma.to(device)
        step = {"eta": 0.7, "rule": "flow", "seed": 0, "row_keys": [1, 2], "step": 0}
        attention = [y[:, None].bfloat16() for _ in range(5)]
        return [
            *ops.flow_step(y, y, s, s * 0.5, **step),
            ops.guided_velocity(y, y * 0.5, None, 3.0, 1.0),
            ops.pad_latents([y[:, :5], y[:, :7]]),
            ops.tensor_digest([y]),
            ops.sibling_prefix_attention(*attention, backend="triton"),
            ops.sibling_prefix_attention(*attention),
        ]

    for first, second in zip(run("cuda:0"), run("cuda:1"), strict=True):
        assert second.device.index == 1 and torch.equal(first.cpu(), second.cpu())


@pytest.mark.parametrize(
    ("dtype", "head_size", "prefix"),
    [
        (torch.bfloat16, 64, 0),
        (torch.bfloat16, 128, 333),
        (torch.bfloat16, 80, 64),
        (torch.float16, 128, 64),
        (torch.float16, 64, 333),
        (torch.float16, 80, 0),
    ],
)
def test_composite_attention_is_as_exact_as_torchs_own(
    dtype: torch.dtype, head_size: int, prefix: int
) -> None:
    torch.manual_seed(0)
    groups, siblings, length = 2, 3, 258
    shapes = [(6, 8, length), (6, 2, length), (6, 2, length), (groups, 2, prefix), (groups, 2, prefix)]
    leaves = [torch.randn(*shape, head_size, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]
    upstream = torch.randn(*shapes[0], head_size, device="cuda", dtype=dtype)
    options = {"allow_unused": True, "materialize_grads": True}
    out, lse = ops.sibling_prefix_attention(*leaves, return_lse=True, backend="composite")
    ours = [out.detach(), *torch.autograd.grad(out, leaves, upstream, **options)]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact_out, exact_lse = ops.sibling_prefix_attention(*wide, return_lse=True, backend="reference")
    exact = [exact_out.detach(), *torch.autograd.grad(exact_out, wide, upstream.double(), **options)]
    joined = [
        torch.cat([part.repeat_interleave(siblings, 0), own], dim=2)
        for part, own in ((leaves[3], leaves[1]), (leaves[4], leaves[2]))
    ]
    peer_out = torch.nn.functional.scaled_dot_product_attention(leaves[0], *joined, enable_gqa=True)
    peer = [peer_out.detach(), *torch.autograd.grad(peer_out, leaves, upstream, **options)]
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3, atol=1e-3)
    for mine, theirs, truth in zip(ours, peer, exact, strict=True):
        error, peer_error = ((tensor.double() - truth).norm() for tensor in (mine, theirs))
        assert float(error) <= 2 * float(peer_error)
