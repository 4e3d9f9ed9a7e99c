# SPDX-License-Identifier: Apache-2.0
"""The order of errors at the end of things: what went wrong first is what is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ended_by(what: str, end: Callable[[], object]) -> Iterator[None]:
    """Calls `end` on the way out.

    When the body raised, that exception propagates with its traceback, and a failing `end` is attached to it as a note. When the
    body ended well, a failing `end` is the error.
    """
    try:
        yield
    except BaseException as error:
        try:
            end()
        except Exception as late:  # it must not hide what went wrong first
            error.add_note(f"{what} failed too: {type(late).__name__}: {late}")
        raise
    end()
