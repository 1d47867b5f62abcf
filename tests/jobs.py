"""Jobs of ranks, in which tests run one after the other.

Starting ranks takes longer than most tests, so that those of a unit (:mod:`tests.units`) which ask for the
same ranks share a job. It is started when the first of them is wanted, and after a test that fails, for
those that are left.
Its processes are forked from one that has imported their framework, see :mod:`tests.fork_server`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

TIMEOUT = 300
"""Seconds for a test, or for a command."""

PASSED = "passed"

_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""One thread a rank: the ranks share this machine's cores."""

_PRINTED = 20_000
"""Characters of what a job printed last that stand in a failure."""


Environment = tuple[tuple[str, str], ...]
"""Names of variables and their values."""


@dataclass(frozen=True)
class Kind:
    """What tests have in common that share a job.

    Attributes:
        launcher: see :data:`LAUNCHERS`.
        ranks: how many.
        environment: variables beside this process's own.
        unit: of the tests, see :mod:`tests.units`.
    """

    launcher: str
    ranks: int
    environment: Environment
    unit: str


def _horovodrun(count: int, *options: str) -> list[str]:
    return ["benchmarks.horovodrun", "--gloo", "-np", str(count), *options]


def _two_hosts(count: int) -> list[str]:
    first = (count + 1) // 2
    return _horovodrun(count, "-H", f"localhost:{first},127.0.0.1:{count - first}")


def _torchrun(count: int) -> list[str]:
    options = ["--standalone", "--no-python", f"--nproc-per-node={count}"]
    return ["torch.distributed.run", *options]


# torch imports torch._dynamo with the first optimizer of a process, which takes as long as torch itself.
_TORCH = ("torch._dynamo", "pytest")
_HOROVOD = ("horovod.torch", "horovod.runner.launch", *_TORCH)
_DISTRIBUTED = ("torch.distributed.run", *_TORCH)
_TENSORFLOW = ("horovod.tensorflow", "horovod.runner.launch", "pytest")

LAUNCHERS: dict[str, tuple[Callable[[int], list[str]], tuple[str, ...]]] = {
    "horovodrun": (_horovodrun, _HOROVOD),
    "two hosts": (_two_hosts, _HOROVOD),
    "torchrun": (_torchrun, _DISTRIBUTED),
    "two nodes": (_torchrun, _DISTRIBUTED),
    "tensorflow": (_horovodrun, _TENSORFLOW),
    "tensorflow on two hosts": (_two_hosts, _TENSORFLOW),
    "tensorflow with a GPU": (_horovodrun, _TENSORFLOW),
}
"""A launcher's module with its arguments, and what its processes and the ranks import. ``two hosts``: half
of the ranks on what Horovod takes for another host. ``two nodes``: the same for ``torch.distributed``.
``tensorflow``: Horovod for TensorFlow, whose ranks do not know those of Horovod for torch. ``with a GPU``:
an emulated one, where the machine has none."""


def run(
    launcher: str,
    count: int,
    command: Sequence[str],
    environment: dict[str, str] | None = None,
    *,
    check: bool = False,
) -> str:
    """Runs a command on ``count`` ranks and returns what it printed, whatever became of it.

    Args:
        launcher: see :data:`LAUNCHERS`.
        count: of ranks.
        command: that each of them runs: of :func:`forked`, unless it has to begin with nothing imported.
        environment: variables beside this process's own.
        check: whether it has to succeed.
    """
    arguments, modules = LAUNCHERS[launcher]
    started = fork_server(modules, ()).command(*arguments(count), *command)
    with _Running(started, environment or {}) as running:
        late = "" if running.ended(TIMEOUT) else "\ntimed out"
        assert running.status == 0 or not check, f"{running.status}\n{running.printed()}{late}"
        return running.printed() + late


def forked(launcher: str, program: str, *arguments: str) -> list[str]:
    """The command of a process that begins with what a launcher's processes import.

    Args:
        launcher: see :data:`LAUNCHERS`.
        program: a module or a script.
        arguments: of the program.
    """
    _, modules = LAUNCHERS[launcher]
    return fork_server(modules, ()).command(program, *arguments)


class _ForkServer:
    """A server of :mod:`tests.fork_server`, until this process ends.

    Args:
        modules: that it imports.
        environment: variables that they read, beside this process's own.
    """

    def __init__(self, modules: Sequence[str], environment: Environment) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._socket = str(Path(self._folder.name, "socket"))
        serve = f"from tests.fork_server import serve; serve({self._socket!r}, {modules!r})"
        # It ends when standard input does, with this process.
        self._process = subprocess.Popen(
            [sys.executable, "-c", serve],
            cwd=ROOT,
            env={**os.environ, **_ENVIRONMENT, **dict(environment)},
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        while not Path(self._socket).exists():
            if self._process.poll() is not None:
                raise RuntimeError("expected a server that forks, got one that has ended")
            time.sleep(0.02)

    def command(self, program: str, *arguments: str) -> list[str]:
        """A command that runs a module as ``python -m`` would, or a script as ``python`` would."""
        caller = str(ROOT / "tests" / "fork_server.py")
        return [sys.executable, "-I", "-S", caller, self._socket, program, *arguments]


fork_server = functools.cache(_ForkServer)
"""The server of some modules and variables: one of each in this process."""


class _Running:
    """A command on ranks, and a file with what it prints; leaving ends all of its processes."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._file = tempfile.NamedTemporaryFile(suffix=".txt")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **_ENVIRONMENT, **environment},
            stdout=self._file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        atexit.register(self.stop)

    def __enter__(self) -> _Running:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ended(self, seconds: float) -> bool:
        """Waits for the end, and says whether it has come."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return not self.alive

    @property
    def status(self) -> int | None:
        return self._process.poll()

    def printed(self) -> str:
        return Path(self._file.name).read_text(errors="replace")

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            # Ranks have sessions of their own under horovodrun, which ends them when it is told to end.
            os.killpg(self._process.pid, signal.SIGTERM)
        if not self.ended(10):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._file.close()
        atexit.unregister(self.stop)


class Job:
    """Tests on the ranks that they ask for.

    Args:
        kind: of ranks.
        names: of the tests, ``module:function``, in their order.

    Attributes:
        over: whether a test has failed, or was the last: those that are left need another job.
    """

    def __init__(self, kind: Kind, names: Sequence[str]) -> None:
        self.names = list(names)
        self.over = False
        self._ranks = kind.ranks
        self._folder = tempfile.TemporaryDirectory()
        arguments, modules = LAUNCHERS[kind.launcher]
        # Horovod reads its variables when it is initialized.
        read = tuple(one for one in kind.environment if not one[0].startswith("HOROVOD_"))
        server = fork_server(modules, read)
        ranks = server.command("tests.ranks", kind.launcher, self._folder.name, *names)
        launcher = server.command(*arguments(kind.ranks), *ranks)
        self._running = _Running(launcher, dict(kind.environment))

    def outcomes(self, name: str) -> list[str]:
        """:data:`PASSED` or a traceback of each rank; waits for the test, or the job's end."""
        until = time.monotonic() + TIMEOUT
        # A job that has ended writes nothing more: this is asked before the outcomes are read.
        while (alive := self._running.alive) and time.monotonic() < until:
            if None not in self._read(name):
                break
            time.sleep(0.02)
        outcomes = self._read(name)
        if any(text != PASSED for text in outcomes) or name == self.names[-1]:
            # The others of a rank that raised are ended by the launcher.
            self._running.ended(max(1.0, until - time.monotonic()) if alive else 0)
            outcomes = self._read(name)
            late = "\ntimed out" if self._running.alive else ""
            printed = self._running.printed()[-_PRINTED:]
            self._running.stop()
            self.over = True
            return [text or f"did not end\n{printed}{late}" for text in outcomes]
        return [text or "" for text in outcomes]

    def _read(self, name: str) -> list[str | None]:
        paths = [outcome(self._folder.name, name, rank) for rank in range(self._ranks)]
        return [path.read_text() if path.exists() else None for path in paths]


def outcome(folder: str, name: str, rank: int) -> Path:
    """Where a rank writes what became of a test."""
    return Path(folder) / f"{name}.{rank}"


_planned: dict[Kind, list[str]] = {}
_jobs: dict[Kind, Job] = {}


def share(kind: Kind, names: Sequence[str]) -> None:
    """Has tests share a job, in this order."""
    _planned[kind] = list(names)


def outcomes(kind: Kind, name: str, *, alone: bool) -> list[str]:
    """What became of a test on each rank; starts a job if it has to.

    Args:
        kind: of ranks.
        name: ``module:function``.
        alone: whether in a job of its own.
    """
    if alone:
        return Job(kind, [name]).outcomes(name)
    job = _jobs.get(kind)
    if job is None or job.over or name not in job.names:
        names = _planned.get(kind, [])
        names = names[names.index(name) :] if name in names else [name]
        job = _jobs[kind] = Job(kind, names)
    return job.outcomes(name)
