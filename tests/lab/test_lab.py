"""Labs limit rates, run jobs, and leave nothing behind, however they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.lab import machine

pytestmark = pytest.mark.skipif(bool(machine.why_not()), reason=machine.why_not())

PROGRAM = [sys.executable, "-m", "tests.lab.ranks_program"]
READY = 'echo "ready $(readlink /proc/self/ns/net)"; '
BYTES = 4 * 500_000


@pytest.fixture(autouse=True)
def _leaves_no_trace():
    before = machine.traces()
    yield
    assert machine.traces() == before


def _reports(printed):
    lines = re.findall(r"^\[\d+\]<stdout>:(\{.*)$", printed, re.MULTILINE)
    return sorted(map(json.loads, lines), key=lambda report: report["rank"])


def _start(*arguments):
    """Starts a lab, and returns it with its ranks' networks when all ranks are ready."""
    lab = subprocess.Popen(
        machine.command(*arguments), cwd=machine.ROOT, stdout=subprocess.PIPE, text=True
    )
    networks = {re.search(r"ready (net:\S+)", lab.stdout.readline())[1] for _ in range(2)}
    assert len(networks) == 2 and len(machine.processes_in(networks)) >= 2
    return lab, networks


def _gone(networks):
    deadline = time.monotonic() + 10
    while machine.processes_in(networks):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_rates_limit_a_real_allreduce():
    done = machine.run("--rate", "1gbit", "--", *PROGRAM, "rates")

    assert done.returncode == 0, done.stderr
    reports = _reports(done.stdout)
    assert [report["hostname"] for report in reports] == ["host0", "host1"]
    for report in reports:
        seconds = report["seconds"]
        # Each rank sends the tensor once. The buckets at both ends let 70 kB each through at once.
        assert seconds["100mbit"] > 0.8 * (BYTES - 140_000) / (100e6 / 8)
        assert seconds["400mbit"] > 0.8 * (BYTES - 140_000) / (400e6 / 8)
        assert 2 < seconds["100mbit"] / seconds["400mbit"] < 8
        assert seconds["none"] < seconds["400mbit"]


def test_plans_follow_the_rate():
    done = machine.run("--rate", "100mbit", "--", *PROGRAM, "plans")

    assert done.returncode == 0, done.stderr
    one, other = (report["found"] for report in _reports(done.stdout))
    assert one == other, "the ranks differ"
    first, moved, doubted, again = one
    # Uncompressed gradients have four times the bytes.
    assert re.search(r"plan \d+, decided: int8", first)
    assert "decided: none" in moved and "goes on with the plan of a saved state" in moved
    assert "is measured anew" in doubted
    assert re.search(r"plan \d+, decided: int8", again)


def test_ranks_have_hosts_slots_and_process_sets():
    done = machine.run("--slots", "2", "--rate", "1gbit", "--", *PROGRAM, "groups")

    assert done.returncode == 0, done.stderr
    for rank, report in enumerate(_reports(done.stdout)):
        assert report == {
            "rank": rank,
            "host": f"host{rank // 2}",
            "hostname": f"host{rank // 2}",
            "address": f"198.18.0.{rank // 2 + 1}",
            "local": [rank % 2, 2],
            "cross": [rank // 2, 2],
            "sum": [2, 4][rank % 2],
            "tcp": report["tcp"],
        }
        assert report["tcp"] in ("cubic", "reno")
    assert len(_reports(done.stdout)) == 4


def test_a_killed_rank_takes_the_job_down():
    start = time.monotonic()
    done = machine.run("--rate", "200mbit", "--grace", "10", "--", *PROGRAM, "death")

    assert done.returncode == 128 + signal.SIGKILL
    assert "lab: rank 1 on host1 ended with status 137" in done.stderr
    assert "[0]<stderr>:" in done.stderr and "HorovodInternalError" in done.stderr
    assert time.monotonic() - start < 40


def test_the_first_failure_decides_and_a_deaf_rank_is_killed():
    deaf = 'if [ $HOROVOD_RANK = 0 ]; then trap "" TERM; while :; do sleep 1; done; fi; exit 3'
    start = time.monotonic()
    done = machine.run("--grace", "0", "--", "sh", "-c", deaf)

    assert done.returncode == 3
    assert "lab: rank 1 on host1 ended with status 3; ending the others in 0 s" in done.stderr
    assert time.monotonic() - start < 20


def test_a_rank_may_outlive_another_that_succeeds():
    done = machine.run("--", "sh", "-c", "sleep $HOROVOD_RANK; echo done")

    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:done", "[1]<stdout>:done"]


def test_a_command_that_does_not_exist():
    done = machine.run("--grace", "0", "--", "no-such-program")

    assert done.returncode == 127 and "no-such-program: not found" in done.stderr


@pytest.mark.parametrize("victim", ["lab", "first process"])
def test_sigkill_leaves_nothing(victim):
    # The daemon is in its own session, and has no pipe to the lab.
    daemon = "setsid sleep 1000 <&- >&- 2>&- & "
    lab, networks = _start("--rate", "1gbit", "--", "sh", "-c", daemon + READY + "sleep 1000")
    with open(f"/proc/{lab.pid}/task/{lab.pid}/children") as children:
        first = int(children.read())

    os.kill(lab.pid if victim == "lab" else first, signal.SIGKILL)

    assert _gone(networks)
    assert lab.wait(60) == (-signal.SIGKILL if victim == "lab" else 128 + signal.SIGKILL)
    lab.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_are_asked_to_stop_before_the_lab_goes(number):
    polite = 'trap "echo bye; exit 7" TERM; ' + READY + "while :; do sleep 0.1; done"
    lab, networks = _start("--", "sh", "-c", polite)

    lab.send_signal(number)
    rest, _ = lab.communicate(timeout=60)

    assert lab.returncode == 128 + number
    assert sorted(rest.splitlines()) == ["[0]<stdout>:bye", "[1]<stdout>:bye"]
    assert _gone(networks)


def test_two_labs_at_once_do_not_meet():
    script = READY + "sleep 1000"
    (one, its), (other, others) = (_start("--", "sh", "-c", script) for _ in range(2))

    assert not its & others
    one.terminate()
    assert one.wait(60) == 128 + signal.SIGTERM and _gone(its)
    assert len(machine.processes_in(others)) >= 2, "the other lab goes on"
    other.terminate()
    assert other.wait(60) == 128 + signal.SIGTERM and _gone(others)
    for lab in (one, other):
        lab.stdout.close()


def test_patient_ranks_sleep_where_they_would_yield():
    program = (
        "import os, time; start = time.perf_counter(); [os.sched_yield() for _ in range(200)]; "
        "assert time.perf_counter() - start >= 200 * 100e-6; print(os.environ['LAB_PATIENT'])"
    )
    done = machine.run("--patient", "--", sys.executable, "-c", program)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("stdout>:1") == 2


@pytest.mark.parametrize(("options", "slowly"), [([], "1"), (["--keep-windows"], "0")])
def test_how_tcp_begins_after_a_pause(options, slowly):
    shown = machine.run(*options, "--", "cat", "/proc/sys/net/ipv4/tcp_slow_start_after_idle")
    assert re.findall(r"^\[\d+\]<stdout>:(\d)$", shown.stdout, re.MULTILINE) == [slowly] * 2
