# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from PIL import Image

from unirl.config import DatasetConfig
from unirl.data import CANVASES, load_dataset, load_file
from unirl.digits import EDIT_PHRASINGS, HELD_OUT_PHRASING, PHRASINGS, WORDS


def _write(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_text_file_is_a_prompt_a_line_and_blank_lines_are_skipped(tmp_path):
    rows = list(load_file(_write(tmp_path, "p.txt", "\ufeffa three\r\n\n  a grüner four \n")))
    assert [row.prompt for row in rows] == ["a three", "a grüner four"]
    assert all(row.metadata == {} and row.image is None for row in rows)


def test_jsonl_rows_carry_metadata_and_image(tmp_path):
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    (tmp_path / "images").mkdir()
    Image.fromarray(pixels).save(tmp_path / "images" / "colour.png")
    Image.fromarray(pixels[..., 0]).save(tmp_path / "images" / "grey.png")
    dataset = load_file(
        _write(
            tmp_path,
            "p.jsonl",
            '{"prompt": "a three", "metadata": {"canvas": [12, 8], "note": "x"}}\n'
            '{"prompt": "edit", "image": "images/colour.png"}\n'
            '{"prompt": "edit", "image": "images/grey.png", "metadata": null}\n',
        )
    )
    assert dataset.has_images
    assert dataset[0].metadata == {"canvas": [12, 8], "note": "x"} and dataset[0].image is None
    assert np.array_equal(dataset[1].image, pixels)
    assert np.array_equal(dataset[2].image, pixels[..., :1])


_GOOD = '{"prompt": "ok"}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_GOOD + "{oops}\n", r"line 2: not JSON .*allowed: one object a line"),
        (_GOOD + "\n[1]\n", r"line 3: \[1\] is not an object"),
        (_GOOD + '{"metadata": {}}\n', "line 2: prompt is missing; allowed: a non-empty string"),
        (_GOOD + '{"prompt": 3}\n', "line 2: prompt is 3; allowed: a non-empty string"),
        (_GOOD + '{"prompt": " "}\n', 'line 2: prompt is " "'),
        (
            _GOOD + '{"promt": "x"}\n',
            "line 2: unknown key 'promt'; allowed: prompt, metadata, image; did you mean 'prompt'",
        ),
        (_GOOD + '{"prompt": "x", "metadata": [1]}\n', r"line 2: metadata is \[1\]; allowed: an object"),
        (
            _GOOD + '{"prompt": "x", "metadata": {"canvas": [8]}}\n',
            r"line 2: canvas is \[8\]; allowed: \[height, width\]",
        ),
        (_GOOD + '{"prompt": "x", "metadata": {"canvas": [8, -2]}}\n', "line 2: canvas"),
        (
            _GOOD + '{"prompt": "x", "image": 1}\n',
            "line 2: image is 1; allowed: a path relative to the jsonl file",
        ),
        (_GOOD + '{"prompt": "x", "image": "gone.png"}\n', "line 2: image 'gone.png' is not a file"),
        (_GOOD + '{"prompt": "x", "image": "bad.png"}\n', "line 2: image 'bad.png' cannot be read"),
        (b'{"prompt": "ok"}\n{"prompt": "\xff"}\n', "line 2: not UTF-8"),
        ("\n\n", "no prompts in it"),
    ],
)
def test_unreadable_row_names_file_and_line_and_what_is_allowed(tmp_path, text, message):
    (tmp_path / "bad.png").write_bytes(b"no image")
    path = _write(tmp_path, "p.jsonl", text)
    with pytest.raises(ValueError, match=message) as caught:
        load_file(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "data.train has neither name nor path; set exactly one"),
        (
            {"name": "digits", "path": "x.txt"},
            "both name 'digits' and path 'x.txt'; unset one of them: data.train.name=null or",
        ),
        ({"path": ""}, "data.train.path is ''; allowed: a .txt file"),
        (
            {"name": "digit_mixed"},
            "data.train.name is 'digit_mixed'; allowed: digits, .*did you mean 'digits_mixed'",
        ),
        (
            {"path": "prompts.csv"},
            r"data.train.path is 'prompts.csv'; allowed: a .txt file .* or a .jsonl file",
        ),
        ({"path": "gone.jsonl"}, "data.train.path: no file 'gone.jsonl'"),
    ],
)
def test_a_dataset_that_cannot_be_found_names_the_key(config, message):
    with pytest.raises(ValueError, match=message):
        load_dataset(DatasetConfig(**config))


def test_built_in_sets_never_train_on_the_held_out_phrasing():
    held_out = {row.prompt for row in load_dataset(DatasetConfig(name="digits_heldout"))}
    assert held_out == {HELD_OUT_PHRASING.format(word) for word in WORDS}
    for name in ("digits", "digits_mixed", "digits_edit"):
        assert not held_out & {row.prompt for row in load_dataset(DatasetConfig(name=name))}


def test_ten_consecutive_digit_rows_name_all_ten_digits():
    rows = list(load_dataset(DatasetConfig(name="digits")))
    assert len(rows) == 10 * len(PHRASINGS)
    for start in range(0, len(rows), 10):
        assert [row.metadata["digit"] for row in rows[start : start + 10]] == list(range(10))


def test_mixed_set_gives_every_canvas_an_equal_share_of_every_digit():
    rows = list(load_dataset(DatasetConfig(name="digits_mixed")))
    shares = Counter((row.metadata["digit"], tuple(row.metadata["canvas"])) for row in rows)
    assert set(shares.values()) == {len(PHRASINGS) // len(CANVASES)} and len(shares) == 30


def test_edit_set_asks_for_another_digit_than_its_source_shows():
    dataset = load_dataset(DatasetConfig(name="digits_edit"))
    assert dataset.has_images
    for row in dataset:
        assert row.image.dtype == np.uint8 and row.image.shape == (8, 8, 1) and row.image.max() > 127
        assert row.metadata["digit"] != row.metadata["source_digit"]
        assert row.prompt in {p.format(WORDS[row.metadata["digit"]]) for p in EDIT_PHRASINGS}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a", "metadata": {"x": ' + "[" * 100_000 + "]" * 100_000 + "}}", "not a row"),
        ('{"prompt": "a", "metadata": {"digit": ' + "9" * 6000 + "}}", "not a row that can be read"),
        ('{"prompt": "a \\ud800 three"}', "half of a surrogate pair"),
        ('{"prompt": "a", "metadata": {"k": ["\\udc00"]}}', "half of a surrogate pair"),
        ('{"prompt": "a", "metadata": false}', "metadata is false; allowed: an object"),
        ('{"prompt": "a", "metadata": []}', r"metadata is \[\]; allowed: an object"),
        ('{"prompt": "a", "image": "' + "x" * 5000 + '"}', "is not a file"),
    ],
    ids=["nesting", "digits", "surrogate", "surrogate-in-metadata", "false", "list", "long-name"],
)
def test_a_hostile_row_names_file_and_line(tmp_path, text, message):
    path = _write(tmp_path, "rows.jsonl", '{"prompt": "fine"}\n' + text + "\n")
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2: .*{message}"):
        load_file(path)


@pytest.mark.parametrize("extension", ["jpg", "png"])
def test_an_image_that_is_cut_short_is_found_when_the_file_is_read(tmp_path, extension):
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    whole = tmp_path / f"whole.{extension}"
    Image.fromarray(pixels).save(whole)
    (tmp_path / f"cut.{extension}").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    path = _write(tmp_path, "rows.jsonl", f'{{"prompt": "a", "image": "cut.{extension}"}}\n')
    with pytest.raises(ValueError, match=rf"line 1: image 'cut.{extension}' cannot be read"):
        load_file(path)


def test_rows_without_images_are_the_same_rows(tmp_path):
    Image.new("L", (4, 4)).save(tmp_path / "scan.png")
    rows = load_file(
        _write(tmp_path, "rows.jsonl", '{"prompt": "a", "metadata": {"digit": 1}, "image": "scan.png"}\n')
    )
    (tmp_path / "scan.png").unlink()
    (row,) = rows.without_images()
    assert (row.prompt, row.metadata, row.image) == ("a", {"digit": 1}, None) and rows.has_images


@pytest.mark.parametrize("extension", ["txt", "jsonl"])
def test_a_prompt_that_is_too_long_names_file_and_line(tmp_path, extension):
    longest = "é" * 8192
    write = '{{"prompt": "{}"}}'.format if extension == "jsonl" else str
    path = _write(tmp_path, f"rows.{extension}", f"{write(longest)}\n")
    assert load_file(path)[0].prompt == longest
    path = _write(tmp_path, f"rows.{extension}", f"{write('a')}\n{write(longest + 'x')}\n")
    with pytest.raises(
        ValueError, match=rf"rows\.{extension}, line 2: the prompt has 16385 bytes; allowed: at most 16384"
    ):
        load_file(path)
