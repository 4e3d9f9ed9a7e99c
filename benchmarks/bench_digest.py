# SPDX-License-Identifier: Apache-2.0
"""layout_digest of many short rows and tensor_digest of a whole state dict against their peers.

    python benchmarks/bench_digest.py [--gigabytes 28] [--seconds 30] [--quick] [--results FOLDER]

Rows are digested by one CPU thread, and by the GPU when there is one. Bytes are those read. "error" is the number of digests that
differ from the plain PyTorch evaluation (of all rows; of a sample of the tensors). "misses" names changes that a peer's hash does
not show, tried on small inputs: a flipped bit, two values exchanged, another shape, another dtype of the same bits. xxhash is no
dependency: it takes part when it can be imported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _bench import Bench, Call, parser
from torch import Tensor

from unirl.ops import layout_digest, tensor_digest

try:
    import xxhash
except ImportError:
    xxhash = None

Peers = dict[str, Callable[[Any], Any]]
NUM_ROWS, ROW_SIZE = 100_000, 16
SAMPLE_BYTES = 160 << 20


def row_peers(device: torch.device) -> Peers:
    """Hashes of the rows of int64 ``[N, F]``."""
    peers: Peers = {"ours": layout_digest}
    if hasattr(torch, "hash_tensor"):
        peers["torch.hash_tensor"] = lambda values: torch.hash_tensor(values, 1)
    if device.type == "cpu":
        if xxhash is not None:
            peers["xxh3_128, a loop"] = lambda values: [xxhash.xxh3_128_digest(row) for row in values.numpy()]
        peers["blake2b, a loop"] = lambda values: [
            hashlib.blake2b(row, digest_size=16).digest() for row in values.numpy()
        ]
    peers["torch.sum (reads only)"] = lambda values: values.sum(1)
    return peers


def tensor_peers(device: torch.device) -> Peers:
    """Hashes of each tensor of a list."""
    peers: Peers = {"ours": tensor_digest}
    if hasattr(torch, "hash_tensor"):
        peers["torch.hash_tensor"] = lambda tensors: [torch.hash_tensor(tensor) for tensor in tensors]
    if device.type == "cpu":
        if xxhash is not None:
            peers["xxh3_128"] = lambda tensors: [xxhash.xxh3_128_digest(_bytes(t)) for t in tensors]
        peers["blake2b"] = lambda tensors: [hashlib.blake2b(_bytes(t)).digest() for t in tensors]
        peers["sha256"] = lambda tensors: [hashlib.sha256(_bytes(t)).digest() for t in tensors]
    peers["torch.sum (reads only)"] = lambda tensors: [_words(tensor).sum() for tensor in tensors]
    return peers


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _words(tensor: Tensor) -> Tensor:
    """The tensor as the widest numbers that its size allows."""
    return tensor.reshape(-1).view(torch.int64 if tensor.nbytes % 8 == 0 else torch.uint8)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    return (
        all(same(a, b) for a, b in zip(left, right, strict=True)) if isinstance(left, list) else left == right
    )


def missed(peer: Callable[[Any], Any], original: Any, changed: dict[str, Any]) -> str:
    """Which changes leave the hash as it was."""
    before = peer(original)
    names = [name for name, other in changed.items() if same(before, peer(other))]
    return f"misses {', '.join(names)}" if names else ""


def changed_rows(values: Tensor) -> dict[str, Tensor]:
    flipped, exchanged = values.clone(), values.clone()
    flipped[0, 3] ^= 1
    exchanged[0, [0, 1]] = exchanged[0, [1, 0]]
    return {"a bit": flipped, "order": exchanged}


def changed_tensors(values: Tensor) -> dict[str, list[Tensor]]:
    """Changes of one bfloat16 matrix."""
    flipped, exchanged = values.clone(), values.clone()
    flipped.view(torch.int16)[0, 3] ^= 1
    exchanged[0, [0, 1]] = exchanged[0, [1, 0]]
    return {
        "a bit": [flipped],
        "order": [exchanged],
        "shape": [values.reshape(values.shape[1], values.shape[0])],
        "dtype": [values.view(torch.float16)],
    }


def state_shapes(layers: int, hidden: int, feed_forward: int, vocabulary: int) -> list[tuple[int, ...]]:
    """A decoder with two experts a layer and grouped keys, its embedding and its head."""
    key = hidden // 7
    expert = [
        (hidden, hidden), (hidden,), (key, hidden), (key,), (key, hidden), (key,), (hidden, hidden),
        (feed_forward, hidden), (feed_forward, hidden), (hidden, feed_forward), (hidden,), (hidden,),
    ]  # fmt: skip
    return [(vocabulary, hidden), *(expert * (2 * layers)), (hidden,), (vocabulary, hidden)]


def state(gigabytes: float, device: torch.device, quick: bool) -> list[Tensor]:
    """Random bfloat16 tensors of about so many GB; 28 GB are the decoder of a 7B model with two experts a layer."""
    if quick:
        shapes = state_shapes(1, 56, 112, 100)
    elif gigabytes >= 4:
        shapes = state_shapes(max(1, round((gigabytes - 2.2) / 0.932)), 3584, 18944, 152064)
    else:
        shapes = state_shapes(max(1, round((gigabytes - 0.06) / 0.06)), 896, 4864, 16000)
    return [torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for shape in shapes]


def measure_rows(bench: Bench, device: torch.device) -> None:
    rows = 500 if bench.options.quick else NUM_ROWS
    values = torch.randint(-(2**40), 2**40, (rows, ROW_SIZE), device=device)
    peers = row_peers(device)
    sample = values[:8].clone()
    wanted = layout_digest(values, backend="reference")

    def check(name: str, result: Any) -> dict[str, Any]:
        if "reads only" in name:
            return {}
        found: dict[str, Any] = {"note": missed(peers[name], sample, changed_rows(sample))}
        if name == "ours":
            found["error"] = int((result != wanted).any(1).sum())
        return found

    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        bench.measure(
            "layout_digest",
            "forward",
            {"N": rows, "F": ROW_SIZE},
            {name: lambda peer=peer: peer(values) for name, peer in peers.items()},
            check=check,
            moved_bytes=values.nbytes,
            device=device,
            dtype="int64",
            threads=torch.get_num_threads(),
        )
    finally:
        torch.set_num_threads(threads)


def measure_state(bench: Bench, gigabytes: float) -> None:
    device = bench.device
    tensors = state(gigabytes, device, bench.options.quick)
    peers = tensor_peers(device)
    # Every size once, as far as the plain evaluation's int64 words fit into memory beside the state.
    sizes = {tensor.shape: index for index, tensor in enumerate(tensors) if tensor.nbytes <= SAMPLE_BYTES}
    sample = list(sizes.values())
    wanted = tensor_digest([tensors[index] for index in sample], backend="reference")
    small = torch.randn(6, 40, device=device).bfloat16()

    def check(name: str, result: Any) -> dict[str, Any]:
        if "reads only" in name:
            return {}
        found: dict[str, Any] = {"note": missed(peers[name], [small], changed_tensors(small))}
        if name == "ours":
            found["error"] = int((result[sample] != wanted).any(1).sum())
        return found

    num_bytes = sum(tensor.nbytes for tensor in tensors)
    providers: dict[str, Call] = {name: lambda peer=peer: peer(tensors) for name, peer in peers.items()}
    bench.measure(
        "tensor_digest",
        "forward",
        {"tensors": len(tensors), "GB": round(num_bytes / 1e9, 2)},
        providers,
        check=check,
        moved_bytes=num_bytes,
        dtype="bfloat16",
    )


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument(
        "--gigabytes", type=float, help="size of the state (default: GPU 28, or 0.6 of what is free; CPU 0.3)"
    )
    arguments = options.parse_args(argv)
    if xxhash is None:
        print("xxhash is not installed: measured without it (pip install xxhash adds it)")
    on_gpu = arguments.device != "cpu" and torch.cuda.is_available()
    with Bench("digest", arguments, num_cases=3 if on_gpu else 2) as bench:
        if arguments.gigabytes is None:
            free = torch.cuda.mem_get_info()[0] / 1e9 if on_gpu else 0.0
            arguments.gigabytes = min(28.0, 0.6 * free) if on_gpu else 0.3
        measure_rows(bench, torch.device("cpu"))
        if on_gpu:
            measure_rows(bench, bench.device)
        measure_state(bench, arguments.gigabytes)


if __name__ == "__main__":
    main()
