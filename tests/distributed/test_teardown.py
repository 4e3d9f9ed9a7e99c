# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import pytest

from unirl.distributed.teardown import ended_by


def failing(text: str) -> Callable[[], None]:
    def end() -> None:
        raise OSError(text)

    return end


def test_the_first_exception_survives_and_a_failing_end_is_its_note() -> None:
    with (
        pytest.raises(ArithmeticError, match="loss") as caught,
        ended_by("closing", failing("no space left")),
    ):
        raise ArithmeticError("the loss is not finite")
    assert caught.value.__notes__ == ["closing failed too: OSError: no space left"]
    assert caught.traceback[-1].name == "test_the_first_exception_survives_and_a_failing_end_is_its_note"


def test_a_failing_end_with_nothing_else_wrong_propagates() -> None:
    with pytest.raises(OSError, match="no space left"), ended_by("closing", failing("no space left")):
        pass


def test_an_interrupt_survives_too_and_every_end_is_called() -> None:
    called = []
    with (
        pytest.raises(KeyboardInterrupt) as caught,
        ended_by("the outer one", lambda: called.append("outer")),
        ended_by("the inner one", failing("inner")),
    ):
        raise KeyboardInterrupt
    assert called == ["outer"] and "the inner one failed too" in caught.value.__notes__[0]
