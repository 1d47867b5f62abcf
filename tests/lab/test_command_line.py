"""The lab checks its arguments before it changes anything."""

from __future__ import annotations

import io
import os
import shutil

import pytest

from benchmarks.lab import __main__ as lab
from benchmarks.lab import link, rate
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


@pytest.mark.parametrize(
    ("text", "seconds"), [("40ms", 0.04), ("0.1S", 0.1), ("1ms", 0.001), ("2s", 2), ("none", 0)]
)
def test_round_trips(text, seconds):
    assert link.parse_rtt(text).seconds == pytest.approx(seconds)


@pytest.mark.parametrize(("text", "share"), [("0.1%", 0.001), ("50%", 0.5), ("0%", 0), ("none", 0)])
def test_losses(text, share):
    assert link.parse_loss(text).share == pytest.approx(share)


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


def test_whoever_is_not_root_is_told_so(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    assert lab.main(["--", "true"]) == 1

    assert "expected root" in (said := capsys.readouterr().err) and "use sudo" in said


def test_a_missing_program_is_named_with_its_package(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else f"/bin/{name}")

    assert lab.main(["--", "true"]) == 1

    assert "expected the program tc, got none: apt-get install iproute2" in capsys.readouterr().err


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
