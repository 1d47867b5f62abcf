"""What the lab says before it touches anything."""

from __future__ import annotations

import io
import os
import shutil

import pytest

from benchmarks.lab import __main__ as lab
from benchmarks.lab import change_rate, rate
from benchmarks.lab.streams import Prefixed


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("1gbit", 10**9),
        ("200mbit", 2 * 10**8),
        ("2.5GBIT", 25 * 10**8),
        ("100kbit", 10**5),
        ("1000000bit", 10**6),
        ("none", None),
    ],
)
def test_rates(text, bits):
    assert rate.parse(text).bits == bits


@pytest.mark.parametrize("text", ["", "1", "1g", "1gbps", "-1gbit", "0mbit", "99kbit", "1e3gbit"])
def test_wrong_rates(text):
    with pytest.raises(ValueError, match="expected a rate such as 1gbit"):
        rate.parse(text)


def test_a_bucket_holds_two_milliseconds_or_one_segment():
    assert rate.parse("10gbit").burst == 2_500_000
    assert rate.parse("1gbit").burst == 250_000
    assert rate.parse("10mbit").burst > 65_536 + 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "0", "--", "true"], "expected a positive integer, got '0'"),
        (["--hosts", "two", "--", "true"], "expected a positive integer, got 'two'"),
        (["--hosts", "1001", "--", "true"], "expected at most 1000 hosts"),
        (["--slots", "-1", "--", "true"], "expected a positive integer"),
        (["--rate", "fast", "--", "true"], "expected a rate such as 1gbit, 200mbit or none"),
        (["--grace", "-2", "--", "true"], "expected seconds, 0 or more, got '-2'"),
        (["--grace", "nan", "--", "true"], "expected seconds, 0 or more"),
        (["--hosts", "2"], "required: COMMAND"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as raised:
        lab.main(arguments)

    assert raised.value.code == 2 and message in capsys.readouterr().err


def test_whoever_is_not_root_is_told_so(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    assert lab.main(["--", "true"]) == 1

    assert "expected root" in (said := capsys.readouterr().err) and "use sudo" in said


def test_a_missing_program_is_named_with_its_package(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else f"/bin/{name}")

    assert lab.main(["--", "true"]) == 1

    assert "expected the program tc, got none: apt-get install iproute2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1gbit"], "expected to be started by a rank of python -m benchmarks.lab"),
        (["fast"], "expected a rate"),
        ([], "expected one rate, got 0"),
    ],
)
def test_the_rate_is_changed_from_within(arguments, message, monkeypatch, capsys):
    monkeypatch.delenv("LAB_HOSTS", raising=False)

    assert change_rate.main(arguments) == 1

    assert message in capsys.readouterr().err


def test_output_is_prefixed_line_by_line():
    out = io.BytesIO()
    lines = Prefixed(out, 3, "stdout")

    for part in (b"on", b"e\ntwo\r", b"\n", b"\r50%\r100%\n\nlast\n", b"rest"):
        lines.write(part)
    before = out.getvalue()
    lines.close()

    whole = (b"one", b"two", b"50%", b"100%", b"", b"last")
    assert before == b"".join(b"[3]<stdout>:%b\n" % line for line in whole)
    assert out.getvalue() == before + b"[3]<stdout>:rest\n"
