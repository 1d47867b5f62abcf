"""Runs one rank of a job: ``python -m tests.faults.rank FRONTEND EXCHANGE FAULT FOLDER``.

The rank logs its steps to a file, which :mod:`tests.faults.run` reads. The fault happens to the last rank.
"""

from __future__ import annotations

import datetime
import faulthandler
import itertools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from tests import ranks
from tests.contract.beside import Beside
from tests.contract.cases import gradients
from tests.contract.frontend import Job
from tests.faults import frontends, memory, stock
from tests.faults.cases import BEGIN, FAULTS, STEPS, STOCK, Case


class Log:
    """A rank's log.

    Args:
        path: the path of the log's file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, what: str, detail: object = "") -> None:
        """Appends a line of JSON with the time, a kind of event, its details and the process id."""
        line = {"time": time.time(), "what": what, "detail": detail, "process": os.getpid()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def main(frontend: str, exchange: str, fault: str, folder: str) -> None:
    """Trains until the fault, or through it."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # Shows where a rank waits.
    case, does = Case(frontend, exchange, fault), FAULTS[fault]
    row = frontends.load(frontend)
    timeout = None if does.timeout is None else datetime.timedelta(seconds=does.timeout)
    launcher = row.launcher_of_hosts if case.hosts else row.launcher
    rank, *_ = ranks.start(launcher, timeout)
    log = Log(Path(folder, str(rank)))
    try:
        with memory.scarce(case) if fault == "memory" else nullcontext(_nothing) as end:
            _train(case, rank, log, end)
    except BaseException as error:
        log("error", f"{type(error).__name__}: {error}")
        raise
    log("done")


def _nothing() -> None:
    """Leaves the memory as it is."""


def _train(case: Case, rank: int, log: Log, end_memory: Callable[[], None]) -> None:
    fault = FAULTS[case.fault]
    job: Job | None = None
    run: Callable[[int], object]
    row = frontends.load(case.frontend)
    shapes = dict(row.shapes)
    if case.exchange == STOCK:
        step = stock.make(case.frontend, shapes)
        run = lambda number: step(gradients(rank, number, shapes))  # noqa: E731
    else:
        beside = Beside(row, case.exchange, shapes=shapes)
        job = beside.job
        if fault.ends:
            run = lambda number: beside.job.step(gradients(rank, number, shapes))  # noqa: E731
        elif beside.exact:
            run = beside.step
        else:
            run = partial(_step_alike, beside)
    for number in itertools.count() if fault.ends else range(STEPS):
        log("step", number)
        if rank == case.ranks - 1 and not fault.signal and number >= BEGIN:
            _happen(case, number, job, log)
            end_memory()
        run(number)
        time.sleep(0.002)


def _step_alike(beside: Beside, number: int) -> None:
    """A step whose results are the same on all ranks: after many, rounding has led the reference away."""
    row = beside.frontend
    got = beside.job.step(gradients(row.rank, number, beside.shapes))
    shards = 2 if row.name == "fsdp" else 1
    assert len(set(row.gather(b"".join(got[name].tobytes() for name in sorted(got))))) == shards


def _happen(case: Case, number: int, job: Job | None, log: Log) -> None:
    """Causes the fault on the last rank, unless it is a signal."""
    if case.fault == "slow" and number < BEGIN + 10:
        time.sleep(0.2)
    elif number == BEGIN:
        log("fault")
        if case.fault == "raise":
            raise ArithmeticError("on purpose")
        if case.fault == "leave":
            sys.exit(0)
        if case.fault == "wait":
            time.sleep(10_000)
        if case.fault == "full disk" and job is not None:
            log("refused", _save_where_nothing_fits(job))


def _save_where_nothing_fits(job: Job) -> str:
    """Saves a checkpoint while files cannot grow; returns the frontend's error."""
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = Path(f"/tmp/full-{os.getpid()}")
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    try:
        saved = job.save()
        if isinstance(saved, bytes):
            with path.open("wb") as file:
                file.write(saved)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
        path.unlink(missing_ok=True)
    raise AssertionError("expected an error, got a checkpoint")


if __name__ == "__main__":
    main(*sys.argv[1:])
