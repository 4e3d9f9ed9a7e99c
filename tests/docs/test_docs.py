# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from unirl.config import RunConfig, to_plain

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
ROW = re.compile(r"^\| `([\w.]+)` \| (.*?) \| .*\|$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#([\w-]+))?\)|\[[^\]]*\]\(#([\w-]+)\)")


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, to_plain(value)


def test_every_key_of_a_recipe_is_documented_with_its_default_and_no_other_is() -> None:
    documented = dict(ROW.findall((ROOT / "docs" / "configuration.md").read_text()))
    actual = dict(leaves(RunConfig()))
    assert sorted(documented) == sorted(actual)
    targets = documented.pop("model.lora.targets")
    assert "generation expert" in targets and all("moe_gen" in name for name in actual["model.lora.targets"])
    for key, written in documented.items():
        value = None if written == "-" else yaml.safe_load(written.strip("`"))
        if isinstance(actual[key], float):
            value = float(value)
        assert value == actual[key], f"{key}: documented {written}, actual {actual[key]!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target, anchor, own_anchor in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), f"{page.name}: {target} does not exist"
        if anchor or own_anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert (anchor or own_anchor) in {slug(heading) for heading in headings}, (
                f"{page.name}: #{anchor or own_anchor}"
            )


def slug(heading: str) -> str:
    """A heading's anchor as repository hosts make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# The design speaks of the whole house, rooms that are not built yet included.
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "design.md"], ids=lambda page: page.name
)
def test_files_and_modules_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    for path in re.findall(r"`((?:examples|unirl|tests|docs|csrc|benchmarks)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"
    for recipe in re.findall(r"--config-name=([\w/]+)", text):
        assert (ROOT / "examples" / f"{recipe}.yaml").exists(), f"{page.name} names recipe {recipe}"
