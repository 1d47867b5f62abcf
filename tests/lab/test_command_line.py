"""The lab checks its arguments before it changes anything."""

from __future__ import annotations

import io
import os
import shutil

import pytest

from benchmarks.lab import __main__ as lab
from benchmarks.lab import change_rate, link, rate
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


@pytest.mark.parametrize(
    ("text", "seconds"), [("40ms", 0.04), ("0.1S", 0.1), ("1ms", 0.001), ("2s", 2), ("none", 0)]
)
def test_round_trips(text, seconds):
    assert link.parse_rtt(text).seconds == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "40", "-40ms", "40us", "0ms", "0.9ms", "3s", "1e1ms"])
def test_wrong_round_trips(text):
    with pytest.raises(ValueError, match=r"expected a round trip such as 40ms, 0\.1s or none"):
        link.parse_rtt(text)


@pytest.mark.parametrize(("text", "share"), [("0.1%", 0.001), ("50%", 0.5), ("0%", 0), ("none", 0)])
def test_losses(text, share):
    assert link.parse_loss(text).share == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "0.1", "-1%", "50.1%", "100%", "1 %", "1e-3%"])
def test_wrong_losses(text):
    with pytest.raises(ValueError, match=r"expected a share of packets such as 0\.1% or none"):
        link.parse_loss(text)


def test_queues_and_buffers_grow_with_the_distance():
    near = link.Link(rate.parse("100mbit"), link.parse_rtt("40ms"))
    far = link.Link(rate.parse("100mbit"), link.parse_rtt("200ms"))
    assert near.queue_seconds == 0.05 and far.queue_seconds == 0.2
    assert near.window == 1_125_000 and far.window == 5_000_000
    assert far.socket_buffer > 2 * far.window
    assert near.is_distant and not link.Link(rate.parse("100mbit")).is_distant


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
        (["--rtt", "far", "--", "true"], "expected a round trip such as 40ms, 0.1s or none"),
        (["--rtt", "3s", "--", "true"], "between 1ms and 2s, got '3s'"),
        (["--loss", "0.1", "--", "true"], "expected a share of packets such as 0.1% or none"),
        (["--loss", "60%", "--", "true"], "at most 50%, got '60%'"),
        (["--hosts", "1", "--rtt", "1ms", "--", "true"], "expected two hosts or more"),
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
