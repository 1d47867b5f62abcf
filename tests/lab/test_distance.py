"""Hosts with a delay between them have the time, the loss and the rate that were asked for."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys

import pytest

from tests.lab import machine, sockets_program

PROGRAM = [sys.executable, "-m", "tests.lab.sockets_program"]
NEEDED = "expected netem or "
_KILL_RELAY = (
    'for p in /proc/[0-9]*; do [ "$(cat $p/comm)" = relay ] && kill -9 ${p#/proc/}; done; sleep 60'
)


@pytest.fixture(scope="module", autouse=True)
def _can_be_made():
    if reason := machine.why_not():
        pytest.skip(reason)
    done = machine.run("--loss", "0.1%", "--", "true")
    if NEEDED in done.stderr:
        pytest.skip(done.stderr)


@pytest.fixture(autouse=True)
def _leaves_no_trace(_can_be_made):
    before = machine.traces()
    yield
    assert machine.traces() == before


@pytest.fixture(scope="module")
def has_relay(_can_be_made):
    listed = machine.run("--rtt", "1ms", "--", "sh", "-c", "cat /proc/[0-9]*/comm")
    return "stdout>:relay" in listed.stdout


def _reports(done):
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^\[\d+\]<stdout>:(\{.*)$", done.stdout, re.MULTILINE)
    found = {}
    for line in lines:
        found.update(json.loads(line))
    return found


def test_the_round_trip_and_the_rate_are_what_was_asked_for():
    done = machine.run("--rate", "100mbit", "--rtt", "40ms", "--", *PROGRAM, "distant")

    found = _reports(done)
    # No connection is faster than the round trip, and most take no longer.
    assert min(found["seconds"]) >= 0.040
    assert statistics.median(found["seconds"]) < 0.050
    # For 30 MB, the slow start of the connection takes at most half a second.
    assert 60e6 < found["bits"] < 101e6
    assert 10e6 < found["fewer"] < 21e6
    assert re.search(r"lab: round trip host0 to host1: 4\d\.\d ms .*asked for 40ms", done.stderr)
    assert re.search(r"lab: one TCP connection host0 to host1: [\d.]+ Mbit/s, ", done.stderr)


def test_packets_are_lost_each_way():
    done = machine.run("--loss", "20%", "--", *PROGRAM, "lossy")

    found, sent = _reports(done), sockets_program.DATAGRAMS
    # The standard deviation is 18 of 2000.
    assert 0.74 * sent < found["there"] < 0.86 * sent
    assert 0.74 * sent < found["back"] < 0.86 * sent


def test_no_packet_is_lost_by_distance_alone():
    done = machine.run("--rtt", "20ms", "--", *PROGRAM, "lossy")

    found = _reports(done)
    assert found["there"] == found["back"] == sockets_program.DATAGRAMS


def test_ranks_find_what_was_asked_for():
    told = "echo $LAB_RATE $LAB_RTT $LAB_LOSS"
    done = machine.run(
        *["--rate", "50mbit", "--rtt", "0.01s", "--loss", "0.5%"], "--", "sh", "-c", told
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("stdout>:50mbit 0.01s 0.5%") == 2


def test_a_broken_promise_is_an_error():
    program = [sys.executable, "-m", "tests.lab.broken_promise_program"]
    done = subprocess.run(program, cwd=machine.ROOT, capture_output=True, text=True, timeout=60)

    assert done.returncode == 1
    assert "error: expected a round trip of 40.0 ms, at most 2.0 ms off, got " in done.stderr


def test_the_job_fails_with_the_relay(has_relay):
    if not has_relay:
        pytest.skip("this kernel has netem, which needs no relay")
    done = machine.run("--rtt", "1ms", "--", "sh", "-c", _KILL_RELAY)

    assert done.returncode == 1
    assert "lab: the relay between the hosts ended with status -9" in done.stderr
