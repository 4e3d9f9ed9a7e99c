# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unirl.ops import SiblingKV, available_attention_backends, sibling_prefix_attention

BACKENDS = ("native", "composite", "reference")
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def make(
    groups: int,
    siblings: int,
    query_heads: int,
    key_heads: int,
    length: int,
    prefix: int,
    head_size: int,
    dtype: torch.dtype = torch.float32,
    size: float = 1.0,
) -> Inputs:
    generator = torch.Generator().manual_seed(length + prefix)
    rows = groups * siblings

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * size).to(dtype)

    return (
        normal(rows, query_heads, length, head_size),
        normal(rows, key_heads, length, head_size),
        normal(rows, key_heads, length, head_size),
        normal(groups, key_heads, prefix, head_size),
        normal(groups, key_heads, prefix, head_size),
    )


def joint_softmax(inputs: Inputs, lengths: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Row by row in float64, keys concatenated, straight from the definition."""
    query, key, value, prefix_key, prefix_value = (tensor.double() for tensor in inputs)
    siblings = query.shape[0] // prefix_key.shape[0]
    outs, lses = [], []
    for row in range(query.shape[0]):
        group = row // siblings
        count = prefix_key.shape[2] if lengths is None else lengths[group]
        keys = torch.cat([prefix_key[group, :, :count], key[row]], dim=1)
        values = torch.cat([prefix_value[group, :, :count], value[row]], dim=1)
        repeats = query.shape[1] // key.shape[1]
        keys, values = (part.repeat_interleave(repeats, dim=0) for part in (keys, values))
        logits = query[row] @ keys.transpose(1, 2) * query.shape[3] ** -0.5
        outs.append(torch.softmax(logits, dim=-1) @ values)
        lses.append(torch.logsumexp(logits, dim=-1))
    return torch.stack(outs), torch.stack(lses)


def relative(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm()) if exact.numel() else 0.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize(
    ("length", "prefix", "head_size"),
    [(18, 6, 16), (7, 0, 20), (1, 5, 64), (1, 0, 8), (34, 33, 128), (65, 1, 64)],
)
def test_two_parts_equal_the_joint_softmax(
    backend: str, heads: tuple[int, int], length: int, prefix: int, head_size: int
) -> None:
    inputs = make(2, 3, *heads, length, prefix, head_size)
    out, lse = sibling_prefix_attention(*inputs, return_lse=True, backend=backend)
    exact, exact_lse = joint_softmax(inputs)
    assert relative(out, exact) <= 5e-7
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5)
    # Gradients of all five inputs, the prefix's summed over siblings.
    upstream = torch.randn_like(out)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    wide = [tensor.double().requires_grad_() for tensor in inputs]
    options = {"allow_unused": True, "materialize_grads": True}
    result = sibling_prefix_attention(*leaves, backend=backend)
    grads = torch.autograd.grad(result, leaves, upstream, **options)
    exact_grads = torch.autograd.grad(joint_softmax(tuple(wide))[0], wide, upstream.double(), **options)
    for ours, theirs in zip(grads, exact_grads, strict=True):
        # With one key a row the query's gradient is a difference of equals.
        assert float((ours.double() - theirs).norm()) <= 2e-6 * max(float(theirs.norm()), 1.0)


@pytest.mark.parametrize("length", [1026, 2306])
def test_canvas_lengths_equal_the_joint_softmax(length: int) -> None:
    inputs = make(1, 1, 2, 1, length, 64, 64)
    exact, _ = joint_softmax(inputs)
    for backend in BACKENDS:
        assert relative(sibling_prefix_attention(*inputs, backend=backend), exact) <= 5e-7, backend


@pytest.mark.parametrize("backend", ["composite", "reference"])
def test_bfloat16_error_is_at_most_twice_that_of_torchs_sdpa(backend: str) -> None:
    inputs = make(2, 4, 4, 2, 66, 31, 64, torch.bfloat16)
    exact, _ = joint_softmax(inputs)
    query, key, value, prefix_key, prefix_value = inputs
    joined = [
        torch.cat([prefix.repeat_interleave(4, 0), own], dim=2)
        for prefix, own in ((prefix_key, key), (prefix_value, value))
    ]
    peer = torch.nn.functional.scaled_dot_product_attention(query, *joined, enable_gqa=True)
    assert relative(sibling_prefix_attention(*inputs, backend=backend), exact) <= 2 * relative(peer, exact)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits_stay_exact(backend: str) -> None:
    inputs = make(2, 2, 2, 1, 9, 5, 32, size=12.0)
    exact, _ = joint_softmax(inputs)
    out = sibling_prefix_attention(*inputs, backend=backend)
    assert bool(out.isfinite().all()) and relative(out, exact) <= 1e-4


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("shape", [(18, 6, 16), (5, 3, 32), (66, 30, 64)])
def test_bits_of_a_row_do_not_depend_on_siblings_groups_or_other_prefixes(
    backend: str, shape: tuple[int, int, int]
) -> None:
    inputs = make(4, 5, 4, 2, *shape)
    lengths = [shape[1], 1, 0, shape[1] // 2]
    upstream = torch.randn_like(inputs[0])

    def run(rows: slice, groups: slice, counts: list[int]) -> list[Tensor]:
        selected = [tensor[rows] for tensor in inputs[:3]] + [tensor[groups] for tensor in inputs[3:]]
        leaves = [tensor.clone().requires_grad_() for tensor in selected]
        out, lse = sibling_prefix_attention(*leaves, prefix_lengths=counts, return_lse=True, backend=backend)
        grads = torch.autograd.grad(out, leaves[:3], upstream[rows])
        return [out.detach(), lse, *grads]

    whole = run(slice(0, 20), slice(0, 4), lengths)
    for row in (0, 7, 13, 19):
        group = row // 5
        alone = run(slice(row, row + 1), slice(group, group + 1), lengths[group : group + 1])
        for batch, single in zip(whole, alone, strict=True):
            assert torch.equal(batch[row : row + 1], single)
    assert all(torch.equal(a, b) for a, b in zip(whole, run(slice(0, 20), slice(0, 4), lengths), strict=True))


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_change_bits(threads: int) -> None:
    leaves = [tensor.requires_grad_() for tensor in make(4, 8, 4, 2, 40, 20, 64)]
    upstream = torch.randn_like(leaves[0])

    def run() -> list[Tensor]:
        out = sibling_prefix_attention(*leaves, backend="native")
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run()
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(one, run(), strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_ragged_prefixes_equal_the_joint_softmax_of_each_group(backend: str) -> None:
    lengths = [6, 0, 3]
    inputs = make(3, 2, 4, 2, 9, 6, 24)
    hidden = [tensor.clone() for tensor in inputs]
    for group, count in enumerate(lengths):
        hidden[3][group, :, count:] = torch.nan  # padding may hold anything
        hidden[4][group, :, count:] = torch.nan
    exact, exact_lse = joint_softmax(inputs, lengths)
    leaves = [tensor.requires_grad_() for tensor in hidden]
    out, lse = sibling_prefix_attention(*leaves, prefix_lengths=lengths, return_lse=True, backend=backend)
    assert relative(out.detach(), exact) <= 5e-7
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5)
    grads = torch.autograd.grad(out.sum(), leaves)
    for group, count in enumerate(lengths):
        for grad in grads[3:]:
            assert bool(grad[group, :, :count].isfinite().all())
            assert float(grad[group, :, count:].abs().sum()) == 0


@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(0, 3),
    siblings=st.integers(1, 3),
    key_heads=st.integers(1, 3),
    repeats=st.integers(1, 3),
    length=st.integers(1, 20),
    prefix=st.integers(0, 20),
    head_size=st.integers(1, 40),
    layout=st.sampled_from(["heads first", "tokens first", "head size outside", "strided", "expanded"]),
    scale=st.sampled_from([None, 0.3, 1.0]),
)
def test_native_equals_the_reference_on_any_shape_and_stride(
    groups: int,
    siblings: int,
    key_heads: int,
    repeats: int,
    length: int,
    prefix: int,
    head_size: int,
    layout: str,
    scale: float | None,
) -> None:
    inputs = list(make(groups, siblings, key_heads * repeats, key_heads, length, prefix, head_size))
    if layout == "strided":
        inputs = [torch.stack([tensor, tensor], dim=-1)[..., 0] for tensor in inputs]
    elif layout == "expanded":
        inputs[3] = inputs[3][:1].expand(groups, -1, -1, -1)
    else:
        inputs = [in_layout(tensor, layout) for tensor in inputs]
    results = []
    for backend in ("native", "reference"):
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        out, lse = sibling_prefix_attention(*leaves, scale=scale, return_lse=True, backend=backend)
        grads = torch.autograd.grad((out**2).sum(), leaves, allow_unused=True, materialize_grads=True)
        results.append([out.detach(), lse, *grads])
    for native, reference in zip(*results, strict=True):
        torch.testing.assert_close(native, reference, rtol=2e-4, atol=3e-4)


@pytest.mark.parametrize("backend", ["composite", "reference"])
def test_gradient_in_float64(backend: str) -> None:
    leaves = [tensor.requires_grad_() for tensor in make(2, 2, 2, 1, 3, 2, 4, torch.float64)]

    def function(*inputs: Tensor) -> Tensor:
        return sibling_prefix_attention(*inputs, backend=backend)

    assert torch.autograd.gradcheck(function, leaves, eps=1e-6, atol=1e-4)


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    """The same values ``[rows, heads, tokens, D]`` otherwise in memory."""
    if layout == "tokens first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "head size outside":
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)
    return tensor[:1].expand_as(tensor) if layout == "expanded" else tensor


@pytest.mark.parametrize("backend", [*BACKENDS, ""])
@pytest.mark.parametrize("layout", ["heads first", "tokens first", "head size outside", "expanded"])
def test_opcheck_attention(backend: str, layout: str) -> None:
    leaves = [in_layout(tensor, layout).requires_grad_() for tensor in make(2, 2, 4, 2, 3, 5, 16)]
    options = (None if backend == "composite" else torch.tensor([1, 5]), 0.25, backend)
    attention = torch.ops.unirl.sibling_prefix_attention.default
    # Tracing with sizes as symbols takes most of the time and does not depend on the layout.
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if layout == "tokens first":
        tests.append("test_aot_dispatch_dynamic")
    results = torch.library.opcheck(attention, (*leaves, *options), test_utils=tests)
    assert set(results.values()) == {"SUCCESS"}, results
    if backend == "reference":
        return  # it differentiates by autograd, which is off in the dispatch modes of these tests
    inputs = [leaf.detach() for leaf in leaves]
    out, lse = attention(*inputs, *options)
    backward = (torch.randn_like(out), *inputs, out, lse, *options)
    results = torch.library.opcheck(
        torch.ops.unirl.sibling_prefix_attention_backward.default, backward, test_utils=tests
    )
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FC00155])
def test_a_nan_of_any_payload_spoils_its_row_and_no_other(backend: str, bits: int) -> None:
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    for which in range(5):
        inputs = make(2, 2, 2, 1, 3, 4, 5)
        inputs[which][0, 0, 0, 0] = nan
        out = sibling_prefix_attention(*inputs, backend=backend)
        spoilt = out.isnan()
        # A value spoils its column alone.
        seen = spoilt[..., 0] if which in (2, 4) else spoilt
        if which == 0:
            assert bool(seen[0, 0, 0].all()) and int(seen.sum()) == 5
        else:
            rows = 2 if which >= 3 else 1
            assert bool(seen[:rows].all()) and not bool(seen[rows:].any())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("groups", "length", "prefix"), [(0, 3, 2), (1, 0, 2), (1, 0, 0), (2, 3, 0)])
def test_empty_batches_tokens_and_prefixes_have_results_and_gradients(
    backend: str, groups: int, length: int, prefix: int
) -> None:
    leaves = [tensor.requires_grad_() for tensor in make(groups, 2, 2, 1, length, prefix, 4)]
    out, lse = sibling_prefix_attention(*leaves, return_lse=True, backend=backend)
    assert out.shape == (2 * groups, 2, length, 4) and lse.shape == out.shape[:3]
    grads = torch.autograd.grad(out.sum(), leaves, allow_unused=True, materialize_grads=True)
    for grad, leaf in zip(grads, leaves, strict=True):
        assert grad.shape == leaf.shape and bool(grad.isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_buffer_attends_to_what_was_written_without_a_copy(backend: str) -> None:
    query, key, value, prefix_key, prefix_value = make(2, 3, 4, 2, 7, 5, 16)
    packed = SiblingKV(num_groups=2, siblings=3, prefix_length=5, own_length=7, num_key_heads=2, head_size=16)
    packed.write_prefix(prefix_key, prefix_value)
    for _ in range(2):  # own rows are overwritten at every step, the prefix stays
        packed.write_own(key, value)
        expected = sibling_prefix_attention(query, key, value, prefix_key, prefix_value, backend=backend)
        torch.testing.assert_close(packed.attend(query, backend=backend), expected, rtol=1e-6, atol=1e-6)
        key, value = key + 1, value - 1
    for view in (packed.key, packed.value, packed.prefix_key, packed.prefix_value):
        assert view.untyped_storage().data_ptr() == packed.storage.untyped_storage().data_ptr()
    if backend != "composite":
        packed.write_prefix(prefix_key, prefix_value, [5, 2])
        packed.write_own(key, value)
        exact, _ = joint_softmax((query, key, value, prefix_key, prefix_value), [5, 2])
        assert relative(packed.attend(query, backend=backend), exact) <= 5e-7


def test_the_packed_buffer_names_bad_arguments() -> None:
    sizes = {"num_groups": 1, "siblings": 2, "prefix_length": 2, "own_length": 3, "num_key_heads": 1}
    for change, message in (
        ({"siblings": 0}, "siblings is 0; allowed: at least 1"),
        ({"siblings": 2.5}, "siblings is 2.5; allowed: an integer"),
        ({"dtype": torch.int32}, "dtype is torch.int32; allowed: torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            SiblingKV(**{"head_size": 4, **sizes, **change})
    packed = SiblingKV(head_size=4, **sizes)
    own, prefix = torch.zeros(2, 1, 3, 4), torch.zeros(1, 1, 2, 4)
    for write, message in (
        (lambda: packed.write_own(own.tolist(), own), "key must be a torch.Tensor, got list"),
        (lambda: packed.write_own(own, own[:1]), "value has shape"),
        (lambda: packed.write_own(own.int(), own), "key has dtype int32"),
        (lambda: packed.write_own(own, own.clone().requires_grad_()), "value requires a gradient"),
        (lambda: packed.write_prefix(prefix, prefix, [3]), "prefix_lengths holds 3; allowed: 0 to 2 tokens"),
        (lambda: packed.write_prefix(prefix, prefix, [1, 1]), "prefix_lengths has shape"),
        (lambda: packed.write_prefix(prefix, prefix, [0.5]), "a value of prefix_lengths is 0.5"),
    ):
        with pytest.raises(ValueError, match=message):
            write()
    assert packed.prefix_lengths is None and not packed.storage.requires_grad


def test_the_packed_buffer_is_attended_to_only_when_written_and_without_gradients() -> None:
    query, key, value, prefix_key, prefix_value = make(2, 2, 2, 2, 3, 4, 8)
    sizes = {"num_groups": 2, "siblings": 2, "own_length": 3, "num_key_heads": 2, "head_size": 8}
    packed = SiblingKV(prefix_length=4, **sizes)
    with pytest.raises(ValueError, match="nothing to attend to yet; call write_own and write_prefix first"):
        packed.attend(query)
    packed.write_own(key, value)
    with pytest.raises(ValueError, match="nothing to attend to yet; call write_prefix first"):
        packed.attend(query)
    packed.write_prefix(prefix_key, prefix_value)
    expected = packed.attend(query)
    with pytest.raises(ValueError, match="query requires a gradient"):
        packed.attend(query.clone().requires_grad_())
    with torch.no_grad():
        assert torch.equal(packed.attend(query.clone().requires_grad_()), expected)
    without_prefix = SiblingKV(prefix_length=0, **sizes)
    without_prefix.write_own(key, value)
    assert without_prefix.attend(query).shape == query.shape


def test_native_is_the_default_on_the_cpu_and_the_reference_takes_the_rest() -> None:
    assert available_attention_backends("cpu")[:2] == ("native", "reference")
    inputs = make(1, 2, 2, 1, 3, 2, 8)
    assert torch.equal(sibling_prefix_attention(*inputs), sibling_prefix_attention(*inputs, backend="native"))
    half = tuple(tensor.bfloat16() for tensor in inputs)
    reference = sibling_prefix_attention(*half, backend="reference")
    assert torch.equal(sibling_prefix_attention(*half), reference)


def test_bad_arguments_are_named() -> None:
    query, key, value, prefix_key, prefix_value = make(2, 2, 4, 2, 3, 5, 16)

    def attend(**change: object) -> None:
        arguments = {
            "query": query,
            "key": key,
            "value": value,
            "prefix_key": prefix_key,
            "prefix_value": prefix_value,
        }
        sibling_prefix_attention(**(arguments | change))  # type: ignore[arg-type]

    for change, message in (
        ({"query": query[0]}, "query has 3 axes"),
        ({"query": query[:, :3]}, "query has 3 heads, prefix_key 2"),
        ({"query": query.int()}, "query has dtype int32"),
        ({"key": key[:, :, :2]}, "key has shape"),
        ({"value": value.double()}, "value has dtype float64"),
        ({"prefix_value": prefix_value[:, :, :4]}, "prefix_value has shape"),
        (
            {"prefix_key": prefix_key[:1].repeat(3, 1, 1, 1)},
            "prefix_value has shape|N must be a multiple of G",
        ),
        ({"prefix_lengths": [6, 1]}, "prefix_lengths holds 6; allowed: 0 to 5 tokens"),
        ({"prefix_lengths": [1]}, "prefix_lengths has shape"),
        ({"prefix_lengths": [1.5, 2]}, "a value of prefix_lengths is 1.5; allowed: an integer"),
        ({"prefix_lengths": 2}, "prefix_lengths is 2; expected a list of integers"),
        ({"prefix_lengths": [-1, 2]}, "prefix_lengths holds -1; allowed: 0 to 5 tokens"),
        ({"prefix_lengths": torch.ones(2, device="meta", dtype=torch.int64)}, "prefix_lengths is on meta"),
        ({"key": key.to("meta")}, "key is on meta, query is on cpu"),
        ({"query": query[..., :0]}, "query has head size 0|key has shape"),
        ({"query": query[:3], "key": key[:3], "value": value[:3]}, "3 rows, prefix_key 2 groups"),
        ({"query": query.to_sparse()}, "query must be a strided tensor"),
        ({"scale": 1e300}, "scale is 1e.300; allowed: a finite number in the range of float32"),
        ({"scale": "small"}, "scale is 'small'"),
        ({"scale": float("nan")}, "scale is nan"),
        (
            {"backend": "flash"},
            "backend is 'flash'; allowed for attention on cpu: None, 'native', 'reference'",
        ),
        (
            {"backend": "composite", "prefix_lengths": [1, 2]},
            "'composite' cannot run this call on cpu: prefix",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            attend(**change)
    with pytest.raises(ValueError, match="'native' cannot run this call on cpu: dtype bfloat16"):
        sibling_prefix_attention(
            *(tensor.bfloat16() for tensor in (query, key, value, prefix_key, prefix_value)), backend="native"
        )
