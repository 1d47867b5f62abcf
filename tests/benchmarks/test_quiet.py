"""A library's notes stay off the terminal, and what explains an error does not."""

from __future__ import annotations

import os

import pytest

from benchmarks import quiet


def test_notes_are_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet.standard_error():
        os.write(2, b"from native code\n")
    os.write(2, b"later\n")
    assert capfd.readouterr().err == "later\n"


def test_an_exception_shows_them(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ImportError), quiet.standard_error():
        os.write(2, b"why\n")
        raise ImportError
    assert capfd.readouterr().err == "why\n"
