# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: whole or not there, read back to the bit, damage found by name, memory bounded."""

from __future__ import annotations

import errno
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from unirl.train import checkpoint as module
from unirl.train.checkpoint import (
    CheckpointDamaged,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    verify,
)
from unirl.train.rng import load_rng, rng_tensors

SECTIONS = {
    "trained": {"a.weight": torch.arange(12.0).reshape(3, 4), "b.weight": torch.randn(5).to(torch.bfloat16)},
    "other": {
        "t": torch.arange(6).reshape(2, 3).t(),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "none": torch.zeros(0, 7),
        "bits": torch.tensor([True, False]),
        "bytes": torch.arange(5, dtype=torch.uint8),
    },
}
STATE = {"cursor": 7, "name": "x", "list": [1, 2.5, None, True], "nested": {"k": "v"}}


def save(root: Path, number: int, **options) -> Path:
    return save_checkpoint(root, number, SECTIONS, {**STATE, "cursor": number}, **options)


def test_round_trip_is_exact(tmp_path: Path):
    path = save(tmp_path / "checkpoints", 10)
    assert path.name == "step_000010" and latest_checkpoint(path.parent) == path
    read = load_checkpoint(path)
    assert read.number == 10 and read.state == {**STATE, "cursor": 10}
    assert {s: set(t) for s, t in read.sections.items()} == {s: set(t) for s, t in SECTIONS.items()}
    for section, tensors in SECTIONS.items():
        for name, tensor in tensors.items():
            back = read.sections[section][name]
            assert back.dtype == tensor.dtype and torch.equal(back, tensor)


def test_files_are_plain_safetensors_and_json(tmp_path: Path):
    path = save(tmp_path, 1)
    names = sorted(p.name for p in path.iterdir())
    assert names == ["manifest.json", "other.safetensors", "state.json", "trained.safetensors"]
    plain = load_file(path / "trained.safetensors")
    assert torch.equal(plain["a.weight"], SECTIONS["trained"]["a.weight"])
    assert json.loads((tmp_path / "latest.json").read_text()) == {"checkpoint": "step_000001"}


def test_large_sections_are_sharded_and_read_back(tmp_path: Path):
    tensors = {f"w{i}": torch.full((100,), float(i)) for i in range(7)}
    path = save_checkpoint(tmp_path, 1, {"trained": tensors}, {}, max_shard_bytes=900)
    shards = sorted(p.name for p in path.glob("trained*"))
    assert shards == [f"trained-{i:05d}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    read = load_checkpoint(path).sections["trained"]
    assert all(torch.equal(read[n], t) for n, t in tensors.items())


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors that exist while they are looked at; counts how many do at once."""

    def __init__(self, count: int) -> None:
        self.count, self.alive, self.most = count, 0, 0

    def __getitem__(self, name: str) -> torch.Tensor:
        import weakref

        tensor = torch.zeros(1000)
        self.alive += 1
        self.most = max(self.most, self.alive)

        def gone() -> None:
            self.alive -= 1

        weakref.finalize(tensor, gone)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter([f"w{i}" for i in range(self.count)])

    def __len__(self) -> int:
        return self.count


def test_saving_holds_one_tensor_at_a_time(tmp_path: Path):
    tensors = LazyTensors(50)
    save_checkpoint(tmp_path, 1, {"trained": tensors}, {})
    # The one being written and the one it is replaced by in the loop's variable.
    assert tensors.most <= 2


def test_saving_a_large_model_takes_no_memory_beyond_it(tmp_path: Path):
    script = f"""
import resource, torch
from unirl.train.checkpoint import save_checkpoint
tensors = {{f"w{{i}}": torch.ones(4 << 20) for i in range(12)}}  # 12 x 16 MiB
save_checkpoint({str(tmp_path)!r}, 0, {{"trained": {{"small": torch.ones(1)}}}}, {{}})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
save_checkpoint({str(tmp_path)!r}, 1, {{"trained": tensors}}, {{}})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    out = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=Path.cwd()
    )
    assert int(out.stdout) < 24 * 1024  # KiB: less than one shard and one tensor, far less than 192 MiB


# ---- damage


def _cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("name", ["trained.safetensors", "other.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink], ids=["cut", "flipped", "missing"])
def test_damaged_file_is_refused_by_name_and_the_one_before_it_is_offered(tmp_path: Path, name, damage):
    older, path = save(tmp_path, 1), save(tmp_path, 2)
    damage(path / name)
    with pytest.raises(CheckpointDamaged) as caught:
        load_checkpoint(path)
    assert name in str(caught.value) and "step_000002" in str(caught.value)
    assert str(older) in str(caught.value) and caught.value.fallback == older
    assert load_checkpoint(caught.value.fallback).state["cursor"] == 1
    back = pickle.loads(pickle.dumps(caught.value))
    assert (str(back), back.fallback) == (str(caught.value), older)


def test_no_whole_checkpoint_before_it_is_said(tmp_path: Path):
    first, path = save(tmp_path, 1), save(tmp_path, 2)
    _flip(first / "state.json")
    _flip(path / "state.json")
    with pytest.raises(CheckpointDamaged, match="there is no whole one before it"):
        load_checkpoint(path)


def test_folder_that_is_no_checkpoint_is_named(tmp_path: Path):
    (tmp_path / "step_000004").mkdir()
    assert "was not finished" in verify(tmp_path / "step_000004")
    assert "no such folder" in verify(tmp_path / "step_000005")


def test_list_shows_every_checkpoint_with_what_is_wrong(tmp_path: Path):
    for number in (1, 2, 3):
        save(tmp_path, number, score=0.1 * number)
    _cut(tmp_path / "step_000002" / "other.safetensors")
    infos = list_checkpoints(tmp_path)
    assert [i.number for i in infos] == [1, 2, 3]
    assert [i.problem is None for i in infos] == [True, False, True]
    assert [i.score for i in infos] == pytest.approx([0.1, 0.2, 0.3]) and all(i.size_bytes > 0 for i in infos)


# ---- what a crash or a full disk leaves


@pytest.mark.parametrize("point", ["_fill", "_publish", "_point_to"])
def test_failure_at_any_point_leaves_a_whole_checkpoint_to_resume_from(tmp_path: Path, monkeypatch, point):
    save(tmp_path, 1)
    original = getattr(module, point)

    def fails(*arguments):
        if point == "_fill":  # half of the files are there
            original(*arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, point, fails)
        with pytest.raises(OSError, match="No space left"):
            save(tmp_path, 2)
    # After the rename the checkpoint counts, pointer or not.
    expected = 2 if point == "_point_to" else 1
    assert load_checkpoint(latest_checkpoint(tmp_path)).number == expected
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []
    save(tmp_path, 2)
    assert load_checkpoint(latest_checkpoint(tmp_path)).number == 2


def test_half_written_folder_of_a_killed_process_does_not_count_and_makes_way(tmp_path: Path):
    save(tmp_path, 1)
    (tmp_path / ".step_000002.partial").mkdir()
    (tmp_path / ".step_000002.partial" / "trained.safetensors").write_bytes(b"half")
    assert latest_checkpoint(tmp_path).name == "step_000001"
    save(tmp_path, 2)
    assert verify(latest_checkpoint(tmp_path)) is None and not list(tmp_path.glob(".step*"))


def test_checkpoint_of_the_same_number_is_replaced(tmp_path: Path):
    save(tmp_path, 1)
    save_checkpoint(tmp_path, 1, SECTIONS, {"new": True})
    assert load_checkpoint(tmp_path / "step_000001").state == {"new": True}


def test_read_only_or_vanished_folder_is_an_os_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        save(tmp_path / "file" / "checkpoints", 1)


def test_last_ones_and_the_best_are_kept(tmp_path: Path):
    for number, score in enumerate([0.3, 0.9, 0.5, None, 0.6], start=1):
        save(tmp_path, number, keep_last=2, score=score)
    assert [i.number for i in list_checkpoints(tmp_path)] == [2, 4, 5]
    assert not list(tmp_path.glob(".step*"))


def test_state_must_survive_json(tmp_path: Path):
    with pytest.raises(ValueError, match="does not come back from JSON"):
        save_checkpoint(tmp_path, 1, {}, {"a": (1, 2)})
    with pytest.raises(ValueError, match=r"JSON compliant|Out of range"):
        save_checkpoint(tmp_path, 1, {}, {"a": float("nan")})
    assert latest_checkpoint(tmp_path) is None and not list(tmp_path.iterdir())


def test_random_states_come_back(tmp_path: Path):
    import random

    import numpy as np

    random.gauss(0, 1), np.random.randn(3), torch.rand(2)
    path = save_checkpoint(tmp_path, 1, {"rng": rng_tensors()}, {})
    draw = lambda: (random.gauss(0, 1), np.random.randn(3).tolist(), torch.rand(2).tolist())  # noqa: E731
    first, second = draw(), draw()
    assert first != second
    load_rng(load_checkpoint(path).sections["rng"])
    assert (draw(), draw()) == (first, second)
