# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from rollouts import MIX_TOKENS, groups_of, tables

from unirl.schedule.cost import TokenCount
from unirl.schedule.units import (
    Group,
    UnitTable,
    Workload,
    build_unit_table,
    contiguous_owners,
)


def one_group(num_rows: int) -> list[Group]:
    return groups_of([4], [0], [num_rows])


def sizes(table: UnitTable) -> list[int]:
    return [unit.num_rows for unit in table.units]


@given(tables())
def test_units_cover_every_row_once_in_order(drawn: tuple[UnitTable, int]) -> None:
    table, _ = drawn
    assert table.rows_of([unit.unit_id for unit in table.units]) == table.row_ids
    assert [unit.unit_id for unit in table.units] == list(range(len(table.units)))


@given(tables())
def test_the_cost_of_the_units_is_the_cost_of_the_calls_they_make(drawn: tuple[UnitTable, int]) -> None:
    table, _ = drawn
    assert sum(unit.cost for unit in table.units) >= table.total_cost - 1e-9


def test_a_group_becomes_as_few_units_as_the_micro_batch_allows() -> None:
    assert sizes(build_unit_table(one_group(16), TokenCount(), max_rows=16)) == [16]
    assert sizes(build_unit_table(one_group(16), TokenCount(), max_rows=8)) == [8, 8]
    assert sizes(build_unit_table(one_group(10), TokenCount(), max_rows=4)) == [4, 3, 3]


def test_atoms_are_as_small_as_the_engine_packs() -> None:
    assert sizes(build_unit_table(one_group(10), TokenCount(), max_rows=10, min_rows=1)) == [1] * 10
    assert sizes(build_unit_table(one_group(10), TokenCount(), max_rows=10, min_rows=4)) == [5, 5]
    assert sizes(build_unit_table(one_group(3), TokenCount(), max_rows=8, min_rows=4)) == [3]


def test_an_engine_that_packs_more_than_a_micro_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"micro_batch_size is 4; raise it to 8"):
        build_unit_table(one_group(16), TokenCount(), max_rows=4, min_rows=8)
    with pytest.raises(ValueError, match="micro_batch_size is 0"):
        build_unit_table(one_group(16), TokenCount(), max_rows=0)


def test_two_groups_of_one_id_are_refused() -> None:
    with pytest.raises(ValueError, match="same id"):
        build_unit_table(one_group(2) + one_group(2), TokenCount(), max_rows=4)


def test_every_rank_derives_the_same_table() -> None:
    """In another process with another hash seed."""
    groups = groups_of(MIX_TOKENS, contiguous_owners(32, 8), [10] * 32)
    here = build_unit_table(groups, TokenCount(), max_rows=4)
    code = (
        "import pickle, sys\n"
        "from unirl.schedule.cost import TokenCount\n"
        "from unirl.schedule.units import build_unit_table\n"
        "groups = pickle.loads(sys.stdin.buffer.read())\n"
        "print(build_unit_table(groups, TokenCount(), max_rows=4).digest)\n"
    )
    there = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(groups),
        capture_output=True,
        check=True,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
    )
    assert there.stdout.decode().strip() == here.digest


@pytest.mark.parametrize("change", ["owner", "row", "micro_batch_size", "cost"])
def test_the_digest_tells_tables_apart(change: str) -> None:
    def table(owner: int = 0, row: str = "g/1", max_rows: int = 2, tokens: int = 4) -> UnitTable:
        groups = [Group("g", ("g/0", row), Workload(tokens), owner)]
        return build_unit_table(groups, TokenCount(), max_rows=max_rows)

    changed = {
        "owner": table(owner=1),
        "row": table(row="g/2"),
        "micro_batch_size": table(max_rows=1),
        "cost": table(tokens=9),
    }
    assert changed[change].digest != table().digest
    assert table().digest == table().digest


def test_owners_are_contiguous_and_equal() -> None:
    assert contiguous_owners(8, 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert contiguous_owners(5, 3) == [0, 0, 1, 1, 2]
    assert contiguous_owners(2, 3) == [0, 1]


def test_scheduling_imports_neither_ray_nor_torch() -> None:
    code = (
        "import importlib, pkgutil, sys, unirl.schedule as package\n"
        "for module in pkgutil.iter_modules(package.__path__):\n"
        "    importlib.import_module(f'unirl.schedule.{module.name}')\n"
        "sys.exit(bool({'ray', 'torch'} & set(sys.modules)))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
