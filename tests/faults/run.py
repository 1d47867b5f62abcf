"""Runs a case, and reports the outcome of each rank."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests import jobs
from tests.faults import frontends, stock
from tests.faults.cases import BEGIN, FAULTS, PAUSE, STEPS, STOCK, Case

START = 400
"""The time limit for the ranks' start and the steps before the fault, in seconds."""

MOMENTS = 0.1
"""The longest random delay of a signal in seconds."""


@dataclass
class Ending:
    """The outcome of a rank.

    Attributes:
        steps: the number of steps that the rank began.
        error: the error that the rank raised, or an empty string.
        raised: the seconds from the fault to the error; None if there was none.
        ended: the seconds from the fault to the end of the process; None if it did not end in time.
        status: the exit status, or minus the number of a signal; None if the process did not end.
    """

    steps: int = 0
    error: str = ""
    raised: float | None = None
    ended: float | None = None
    status: int | None = None


@dataclass
class Outcome:
    """The outcome of a case.

    Attributes:
        case: the case.
        endings: the outcomes of the ranks; the last one had the fault.
        failed: the reason why the fault did not happen, or an empty string.
        refused: the error that a rank's checkpoint raised, or an empty string.
        printed: the end of the output of all ranks.
    """

    case: Case
    endings: list[Ending] = field(default_factory=list)
    failed: str = ""
    refused: str = ""
    printed: str = ""

    def problems(self) -> list[str]:
        """A message for each broken promise."""
        if self.failed:
            return [self.failed]
        fault = FAULTS[self.case.fault]
        if not fault.ends:
            return [
                f"rank {rank} ended with {one.status} after {one.steps} steps: {one.error}"
                for rank, one in enumerate(self.endings)
                if one.status != 0 or one.steps != STEPS
            ]
        limit, found = fault.seconds or 0.0, []
        for rank, one in enumerate(self.endings[:-1]):
            if one.ended is None:
                found.append(f"rank {rank} goes on or waits after {limit:g} s: {one.error}")
            elif one.status == 0:
                found.append(f"rank {rank} ended as if nothing had happened")
        return found


class _Failed(Exception):
    """The job did not reach the fault."""


def run(case: Case, chance: random.Random) -> Outcome:
    """Starts the ranks, causes the fault, and waits for the outcome."""
    outcome = Outcome(case)
    with tempfile.TemporaryDirectory() as name, _Ranks(case, Path(name)) as ranks:
        try:
            _judge(ranks, outcome, chance)
        except _Failed as error:
            outcome.failed = str(error)
        outcome.printed = ranks.printed()
    return outcome


def _judge(ranks: _Ranks, outcome: Outcome, chance: random.Random) -> None:
    case, fault = outcome.case, FAULTS[outcome.case.fault]
    victim = case.ranks - 1
    if fault.signal:
        first = "first" in case.fault
        ranks.wait(lambda: min(ranks.steps()) > (0 if first else BEGIN), START)
        time.sleep(chance.uniform(0.0, MOMENTS))
        process = ranks.lines(victim)[-1]["process"]
        os.kill(process, signal.SIGKILL if "kill" in case.fault else signal.SIGSTOP)
        began = time.time()
        if case.fault == "stop":
            time.sleep(PAUSE)
            os.kill(process, signal.SIGCONT)
    elif fault.ends:
        ranks.wait(lambda: any(one["what"] == "fault" for one in ranks.lines(victim)), START)
        began = next(one["time"] for one in ranks.lines(victim) if one["what"] == "fault")
    else:
        began = time.time()
    others = range(case.ranks - 1 if fault.ends else case.ranks)
    ended = ranks.ends(others, began + (fault.seconds or START))
    if len(ended) < len(others):
        ranks.trace(set(range(case.ranks)) - ended.keys())
    outcome.endings = [ranks.ending(rank, began, ended) for rank in range(case.ranks)]
    told = [one["detail"] for one in ranks.lines(victim) if one["what"] == "refused"]
    outcome.refused = told[0] if told else ""


class _Ranks:
    """The ranks of a case, without a launcher, which would end all of them when one fails.

    Args:
        case: the case.
        folder: the folder for logs and output.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self._case, self._folder = case, folder
        self._started: list[subprocess.Popen[bytes]] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Ranks:
        case = self._case
        row = frontends.load(case.frontend)
        _, modules = jobs.LAUNCHERS[row.launcher]
        arguments = [case.frontend, case.exchange, case.fault, str(self._folder)]
        imported = stock.ENVIRONMENT.get(case.frontend, {}) if case.exchange == STOCK else {}
        server = jobs.fork_server(modules, tuple(imported.items()))
        command = server.command("tests.faults.rank", *arguments)
        fault = FAULTS[case.fault]
        of_row = row.environment.get((case.ranks, case.hosts), {})
        horovod = row.launcher != "torchrun"
        try:
            variables = self._stack.enter_context(
                _horovod(case.ranks, case.hosts) if horovod else _torchrun(case.ranks)
            )
            file = self._stack.enter_context((self._folder / "printed").open("wb"))
            for rank in range(case.ranks):
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
                environment |= {**of_row, **fault.environment, **imported, **variables[rank]}
                started = subprocess.Popen(
                    command,
                    cwd=jobs.ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
                self._started.append(started)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for rank, started in enumerate(self._started):
            if started.poll() is None:
                for line in self.lines(rank)[:1]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(line["process"], signal.SIGKILL)
                started.kill()
            started.wait()
        self._stack.close()

    def lines(self, rank: int) -> list[dict]:
        """The lines of a rank's log so far."""
        path = self._folder / str(rank)
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def steps(self) -> list[int]:
        """The number of steps that each rank has begun."""
        every = [self.lines(rank) for rank in range(self._case.ranks)]
        return [sum(one["what"] == "step" for one in lines) for lines in every]

    def wait(self, met: Callable[[], bool], seconds: float) -> None:
        """Waits until a condition is met.

        Raises:
            _Failed: the time limit has passed, or a rank has ended.
        """
        limit = time.monotonic() + seconds
        while not met():
            if any(one.poll() is not None for one in self._started):
                raise _Failed("a rank ended before the fault")
            if time.monotonic() > limit:
                raise _Failed(f"the ranks did not come to the fault within {seconds:g} s")
            time.sleep(0.01)

    def ends(self, ranks: range, until: float) -> dict[int, float]:
        """Waits for ranks to end, at most until a time; returns the times of their ends by rank."""
        ended: dict[int, float] = {}
        while len(ended) < len(ranks) and time.time() < until:
            for rank in ranks:
                if rank not in ended and self._started[rank].poll() is not None:
                    ended[rank] = time.time()
            time.sleep(0.01)
        return ended

    def trace(self, ranks: Iterable[int]) -> None:
        """Makes ranks print the stacks of their threads."""
        for rank in ranks:
            for line in self.lines(rank)[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(line["process"], signal.SIGUSR1)
                time.sleep(0.5)

    def ending(self, rank: int, began: float, ended: dict[int, float]) -> Ending:
        """The outcome of a rank."""
        lines = self.lines(rank)
        errors = [one for one in lines if one["what"] == "error"]
        return Ending(
            steps=sum(one["what"] == "step" for one in lines),
            error=_short(errors[0]["detail"]) if errors else "",
            raised=errors[0]["time"] - began if errors else None,
            ended=ended[rank] - began if rank in ended else None,
            status=self._started[rank].poll(),
        )

    def printed(self) -> str:
        """The end of the output of all ranks."""
        return (self._folder / "printed").read_text(errors="replace")[-5000:]


def _short(error: str) -> str:
    """The type of an error and the end of its message, which has the reason."""
    kind, _, text = error.partition(": ")
    return f"{kind}: ... {text[-200:]}" if len(text) > 200 else error


@contextlib.contextmanager
def _horovod(ranks: int, hosts: bool) -> Iterator[list[dict[str, str]]]:
    """Runs a rendezvous server; yields each rank's environment variables, as ``horovodrun`` sets them."""
    from horovod.runner import gloo_run
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.http.http_server import RendezvousServer

    names = (
        {"localhost": ranks - ranks // 2, "127.0.0.1": ranks // 2}
        if hosts
        else {"localhost": ranks}
    )
    plan = get_host_assignments([HostInfo(*one) for one in names.items()], ranks)
    server = RendezvousServer()
    port = server.start()
    server.init(plan)
    shared = gloo_run.create_run_env_vars("127.0.0.1", ["lo"], port)
    try:
        every = [{**shared, **gloo_run.create_slot_env_vars(slot)} for slot in plan]
        yield [{name: str(value) for name, value in one.items()} for one in every]
    finally:
        server.stop()


@contextlib.contextmanager
def _torchrun(ranks: int) -> Iterator[list[dict[str, str]]]:
    """Holds a store, as the process of ``torchrun`` does; yields each rank's environment variables."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    yield [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    del store
