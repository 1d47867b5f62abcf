"""The documentation's job with torchft: a lighthouse, and three replicas, of which one is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hvd_compress.distributed as hvdc
from hvd_compress import Int8
from hvd_compress.diloco import DiLoCo
from tests.jobs import ROOT
from tests.torch_models import Probe

TIMEOUT = 120
SCRIPT = "docs/examples/torchft_diloco.py"
ROUND = re.compile(
    r"round (\d+): (\w+) of (\d), process (\d+), step (\d+), loss ([\d.]+), bytes ([\d.]+) of .* (\w+)"
)


class Replicas:
    """The lighthouse and the replicas."""

    def __init__(self, folder: Path) -> None:
        coordination = pytest.importorskip(
            "torchft.coordination", reason="torchft is not installed"
        )
        self._lighthouse = coordination.LighthouseServer(
            bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=3000
        )
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, rounds: int) -> subprocess.Popen[bytes]:
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path),
            "TORCHFT_LIGHTHOUSE": self._lighthouse.address(),
        }
        options = ["--rounds", str(rounds), "--pause", "0.5"]
        with Path(self._folder, name).open("ab") as printed:
            process = subprocess.Popen(
                [sys.executable, SCRIPT, name, *options],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(process)
        return process

    def printed(self, name: str) -> str:
        return Path(self._folder, name).read_text(errors="replace")

    def rounds(self, name: str) -> list[tuple[int, int, int, int, float, float, str]]:
        """Round, replicas, process, step, loss, share of the bytes and digest, as printed."""
        found = ROUND.findall(self.printed(name))
        return [
            (int(r), int(k), int(p), int(s), float(x), float(b), d)
            for r, _, k, p, s, x, b, d in found
        ]

    def until(self, met: Callable[[], bool], *names: str) -> None:
        limit = time.monotonic() + TIMEOUT
        while not met():
            assert time.monotonic() < limit, "\n".join(map(self.printed, names))
            time.sleep(0.05)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._lighthouse.shutdown()


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    made = Replicas(tmp_path)
    yield made
    made.stop()


def test_a_replica_is_killed_and_comes_back(replicas: Replicas) -> None:
    rounds = 40  # So many that the others still train when one is back.
    started = {name: replicas.start(name, rounds) for name in ("first", "second", "third")}
    replicas.until(lambda: len(replicas.rounds("third")) >= 3, "third")
    os.kill(started["third"].pid, signal.SIGKILL)
    started["third"].wait()

    def alone() -> bool:
        return any(replicas_ == 2 for _, replicas_, *_ in replicas.rounds("first"))

    replicas.until(alone, "first", "second")
    back = replicas.start("third", rounds)
    for process in (started["first"], started["second"], back):
        process.wait(TIMEOUT)
    everything = "\n".join(map(replicas.printed, started))
    assert [started["first"].returncode, started["second"].returncode, back.returncode] == [
        0,
        0,
        0,
    ], everything

    made = [one for name in started for one in replicas.rounds(name)]
    digests: dict[int, set[str]] = {}
    for number, _, _, _, _, share, digest in made:
        digests.setdefault(number, set()).add(digest)
        assert share < 0.1
    assert all(len(one) == 1 for one in digests.values()), "the same common parameters everywhere"
    assert sorted(digests) == list(range(1, rounds + 1))
    # One that comes back goes on where the others are, and takes part again.
    again = [one for one in replicas.rounds("third") if one[2] == back.pid]
    first = {one[0]: one for one in replicas.rounds("first")}
    assert again and again[0][0] > 3 and all(one[1] == 3 for one in again), everything
    assert all(one[3] == first[one[0]][3] for one in again), "as many steps"
    found = re.search(
        r"ranks \[\d\] of 3 are gone; what ranks .* of norm ([\d.]+), is missing", everything
    )
    assert found and float(found[1]) > 0, everything
    assert again[-1][4] < 0.6 * first[1][4], everything


class _Manager:
    """What a DiLoCo asks of a manager, without a lighthouse: for arguments that are wrong."""

    _use_async_quorum = True

    def start_quorum(self) -> None: ...
    def should_commit(self) -> bool: ...  # type: ignore[empty-body]
    def report_error(self, error: Exception) -> None: ...
    def register_state_dict_fn(self, key: str, load: object, save: object) -> None: ...


def test_wrong_arguments_with_a_manager() -> None:
    model = Probe({"p": (10,)})

    def make(manager: object, **options: int) -> DiLoCo:
        return DiLoCo(model, hvdc.Compressor(Int8()), sync_every=4, manager=manager, **options)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match=r"expected a torchft.Manager, got int"):
        make(3)
    with pytest.raises(ValueError, match=r"use_async_quorum=False"):
        make(_Manager())
    waiting = _Manager()
    waiting._use_async_quorum = False
    with pytest.raises(
        ValueError, match=r"Compressor\(Int8\(\), process_group=torchft.ProcessGroupGloo\(\)\)"
    ):
        make(waiting)
    with pytest.raises(ValueError, match="expected delay 0"):
        make(waiting, delay=1)
