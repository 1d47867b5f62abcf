"""The documentation's job with torchft: a lighthouse, and three replicas, of which one is killed."""

from __future__ import annotations

import functools
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from hvd_compress import Int8, OneBit
from tests.diloco.nesterov import DiLoCo
from tests.jobs import ROOT
from tests.torch_models import Probe

torchft = pytest.importorskip("torchft", reason="torchft is not installed")
coordination = pytest.importorskip("torchft.coordination", reason="torchft is not installed")

TIMEOUT = 120
SCRIPT = "docs/examples/torchft_diloco.py"
ROUND = re.compile(
    r"round (\d+): (\w+) of (\d), process (\d+), step (\d+), loss ([\d.]+), bytes ([\d.]+) of .* (\w+)"
)


class Replicas:
    """The lighthouse and the replicas."""

    def __init__(self, folder: Path) -> None:
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
        r"ranks \[\d\] of 3 are gone; what ranks .* of norm ([\d.]+) before the last exchange, is missing",
        everything,
    )
    assert found and float(found[1]) > 0, everything
    # A round's loss is of 320 samples, which are others in every process: of many rounds, the mean.
    earliest = statistics.mean(one[4] for one in made if one[0] == min(first))
    latest = statistics.mean(one[4] for one in made if one[0] > rounds - 5)
    assert latest < 0.3 * earliest, everything


class _Manager:
    """The part of a manager that a DiLoCo with wrong arguments asks for, without a lighthouse."""

    _use_async_quorum = True

    def start_quorum(self) -> None: ...
    def should_commit(self) -> bool: ...  # type: ignore[empty-body]
    def report_error(self, error: Exception) -> None: ...
    def register_state_dict_fn(self, key: str, load: object, save: object) -> None: ...


def test_wrong_arguments_with_a_manager() -> None:
    model = Probe({"p": (10,), "q": (10,)})

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
    with pytest.raises(ValueError, match=r"delay below sync_every / fragments.*delay 2"):
        make(waiting, delay=2, fragments=2)


class _Replica:
    """A replica in a thread of this process: local SGD by 1-bit exchanges, of two steps in every four."""

    def __init__(
        self, number: int, lighthouse: str, compressor: Callable[..., hvdc.Compressor]
    ) -> None:
        self.number = number
        self.model = Probe({"p": (40, 8)})
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        group = torchft.ProcessGroupGloo(timeout=timedelta(seconds=30))
        self.manager = torchft.Manager(
            pg=group,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=2,
            use_async_quorum=False,
            replica_id=f"replica{number}",
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=self._store.port,
            hostname="localhost",
            lighthouse_addr=lighthouse,
            timeout=timedelta(seconds=30),
        )
        self.compressor = compressor(process_group=group, threshold=0)
        self.diloco = DiLoCo(
            self.model,
            self.compressor,
            sync_every=4,
            outer_optimizer=functools.partial(torch.optim.SGD, lr=1.0),
            delay=2,
            mixing=0.0,
            manager=self.manager,
        )
        self.learnt: dict[int, torch.Tensor] = {}
        self.common: dict[int, torch.Tensor] = {}
        self.residual: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def train(self, failing: int | None) -> None:
        """Twelve steps, with exchanges in the 4th, 8th and 12th; ``failing``: which one fails here."""
        for step in range(1, 13):
            seeded = torch.Generator().manual_seed(100 * step + self.number)
            self.learnt[step] = torch.randn(40, 8, generator=seeded)
            self.model.p.add_(self.learnt[step])
            if step == failing:
                self.manager.report_error(RuntimeError("as if a connection was lost"))
            commits = self.manager.current_step()
            self.diloco.step()
            committed = self.manager.current_step() - commits
            if (
                step % 4 != 2
            ):  # Then an exchange begins, for which a replica that is behind catches up.
                assert committed == (step % 4 == 0 and step != failing)
            if step % 4 == 0:
                self.common[step] = self.diloco.common_parameters["p"].clone()
                state = self.compressor.state_dict()["tensors"]["p"]
                self.residual[step] = state["residual"].clone().view(40, 8)

    def differences(self, *steps: int) -> torch.Tensor:
        """Returns the differences that a replica would send after learning in these steps."""
        return -sum((self.learnt[step] for step in steps), torch.zeros(40, 8))


def _one_bit(**options: Any) -> hvdc.Compressor:
    return hvdc.Compressor(OneBit(), **options)


def _together(
    work: Callable[[_Replica], None],
    compressor: Callable[..., hvdc.Compressor] = _one_bit,
) -> list[_Replica]:
    """Two replicas, of which each has done the work in a thread of its own."""
    lighthouse = coordination.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=10000
    )
    with ThreadPoolExecutor(2) as threads:
        make = functools.partial(_Replica, lighthouse=lighthouse.address(), compressor=compressor)
        replicas = list(threads.map(make, range(2)))
        list(threads.map(work, replicas))
    for one in replicas:
        one.manager.shutdown(wait=False)
    lighthouse.shutdown()
    return replicas


@pytest.mark.parametrize("failing", [(8, 8), (8, None), (None, 8), (None, None)])
def test_a_delayed_exchange_loses_nothing_where_it_fails(
    failing: tuple[int | None, int | None],
) -> None:
    """Rolled back everywhere, or by one replica only, while the other one has used the average."""
    replicas = first, second = _together(lambda one: one.train(failing[one.number]))
    assert [one.diloco.failed_rounds for one in replicas] == [int(f is not None) for f in failing]
    assert torch.equal(first.common[12], second.common[12])
    for one, fails in zip(replicas, failing, strict=True):
        if fails:
            assert torch.equal(one.common[8], one.common[4])
            assert torch.equal(one.residual[8], one.residual[4])
            assert one.residual[4].any()
    # A replica's parameters become the common ones where it uses an average, or is behind.
    sent = torch.zeros(40, 8)
    for one, fails in zip(replicas, failing, strict=True):
        if failing == (8, 8):
            sent += one.differences(5, 6, 7, 8, 9, 10)
        elif fails:
            sent += one.differences(5, 6)
        else:
            sent += one.differences(5, 6, 9, 10)
    used = 2 * (first.common[4] - first.common[12])
    before, after = (sum(one.residual[step] for one in replicas) for step in (4, 12))
    torch.testing.assert_close(used + after, before + sent, rtol=1e-5, atol=1e-4)


def test_a_replica_goes_on_during_a_delayed_exchange() -> None:
    """Its step is over before the other replica has sent anything."""
    gone_on = threading.Event()

    def work(one: _Replica) -> None:
        reduce = one.compressor.reduce

        def late(*given: Any, **named: Any) -> hvdc.Work:
            assert gone_on.wait(TIMEOUT)
            return reduce(*given, **named)

        if one.number == 1:
            one.compressor.reduce = late  # type: ignore[method-assign]
        for step in range(1, 5):
            with torch.no_grad():
                one.model.p.add_(one.number + 1.0)
            one.diloco.step()
            if step == 2 and one.number == 0:
                gone_on.set()

    first, second = _together(work)
    assert [one.diloco.rounds for one in (first, second)] == [1, 1]
    # Both have learnt in two steps what was sent then: 2 and 4, neither of which is thrown away.
    common = first.diloco.common_parameters["p"]
    torch.testing.assert_close(common.mean(), torch.tensor(3.0))
    assert torch.equal(common, second.diloco.common_parameters["p"])


def test_a_state_that_is_saved_during_a_delayed_exchange() -> None:
    """It ends the exchange: the average is saved; or what failed is rolled back, and not used later."""

    @torch.no_grad()
    def work(one: _Replica) -> None:
        for step in range(1, 9):
            one.model.p.add_(one.number + 1.0)
            one.diloco.step()
            if step == 3:
                commits = one.manager.current_step()
                ((due, (average,), *_),) = one.diloco.state_dict()["due"].values()
                assert due == 4 and one.manager.current_step() == commits + 1
                torch.testing.assert_close(average.mean(), torch.tensor(-3.0))
            if step == 7:
                one.manager.report_error(RuntimeError("as if a connection was lost"))
                assert not one.diloco.state_dict()["due"]
                assert one.diloco.failed_rounds == 1

    for one in _together(work):
        assert one.diloco.rounds == 1
        torch.testing.assert_close(one.diloco.common_parameters["p"].mean(), torch.tensor(3.0))


def test_a_replica_that_is_behind_does_not_know_what_is_frozen() -> None:
    """It catches up as the exchange begins, and sends then what the others send."""

    @torch.no_grad()
    def work(one: _Replica) -> None:
        for step in range(1, 17):
            if one.model.p.requires_grad:
                seeded = torch.Generator().manual_seed(100 * step + one.number)
                one.model.p.add_(torch.randn(40, 8, generator=seeded))
            if step == 8 and one.number == 0:
                one.manager.report_error(RuntimeError("as if a connection was lost"))
            one.diloco.step()
            one.common[step] = one.diloco.common_parameters["p"].clone()
            if step == (10 if one.number == 0 else 8):
                one.model.p.requires_grad_(False)

    first, second = _together(work)
    assert [one.diloco.failed_rounds for one in (first, second)] == [1, 0]
    assert [one.diloco.rounds for one in (first, second)] == [4, 4]
    for one in (first, second):
        assert torch.equal(one.common[16], second.common[8])
        assert torch.equal(one.model.p, second.common[8])
    assert not torch.equal(second.common[8], second.common[4])


def test_replicas_plan_together_and_anew_with_new_connections() -> None:
    """Also in the thread of a delayed exchange."""

    @torch.no_grad()
    def work(one: _Replica) -> None:
        for step in range(1, 49):
            one.model.p.add_(one.number + 1.0)
            if step == 24 and one.number == 0:
                one.manager.report_error(RuntimeError("as if a connection was lost"))
            one.diloco.step()

    replicas = _together(work, hvdc.Auto)
    assert [one.diloco.failed_rounds for one in replicas] == [1, 0]
    texts = [one.compressor.explain() for one in replicas]  # type: ignore[attr-defined]
    assert texts[0] == texts[1] and "ms" in texts[0], texts
    assert texts[0].startswith("step 5,"), "exchanges of the last connections but the first one"
    common = [one.diloco.common_parameters["p"] for one in replicas]
    assert torch.equal(*common)
