"""Jobs of ranks, in which tests run one after the other.

Starting ranks takes longer than most tests, so the tests of a unit (:mod:`tests.units`) that ask for the
same ranks share a job. A job starts with the first of these tests and ends with a test that fails; the
remaining tests run in a new one. Its processes are forked by a server (:mod:`tests.fork_server`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

TIMEOUT = 300
"""The time limit of a test, or of a command, in seconds."""

IDLE = 60
"""The time in seconds after which ranks that all wait for each other are taken to hang."""

_LEAST = 0.5
"""The processor time in seconds that ranks use together in less than :data:`IDLE` if they do not hang."""

PASSED = "passed"

GLOO_TIMEOUT = "120"
"""The seconds for which Horovod's ranks wait for each other: beside another test, 30 can be too few."""

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": GLOO_TIMEOUT}
"""Variables of all processes: one thread for each rank, because ranks share the machine's cores."""

_PRINTED = 20_000
"""The number of characters from the end of a job's output that a failure shows."""


Environment = tuple[tuple[str, str], ...]
"""Names of variables and their values."""


@dataclass(frozen=True)
class Kind:
    """The properties by which tests share a job.

    Attributes:
        launcher: a key of :data:`LAUNCHERS`.
        ranks: the number of ranks.
        environment: environment variables in addition to this process's own.
        unit: the tests' unit, see :mod:`tests.units`.
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


# A process's first optimizer imports torch._dynamo, which takes as long as importing torch.
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
    "tensorflow with a GPU": (_horovodrun, _TENSORFLOW),
}
"""For each launcher, its module and arguments for a number of ranks, and the modules that its processes
and the ranks import. ``two hosts``: half of the ranks run on what Horovod takes for another host.
``two nodes``: the same for ``torch.distributed``. ``tensorflow``: Horovod for TensorFlow, whose ranks
cannot communicate with those of Horovod for torch. ``with a GPU``: an emulated GPU if there is no other."""


def run(
    launcher: str,
    count: int,
    command: Sequence[str],
    environment: dict[str, str] | None = None,
    *,
    check: bool = False,
) -> str:
    """Runs a command on ``count`` ranks and returns its output, even if the command fails.

    Args:
        launcher: a key of :data:`LAUNCHERS`.
        count: the number of ranks.
        command: each rank's command: one from :func:`forked`, unless it must begin with nothing imported.
        environment: environment variables in addition to this process's own.
        check: whether to raise an AssertionError unless the command succeeds.
    """
    arguments, modules = LAUNCHERS[launcher]
    started = fork_server(modules, ()).command(*arguments(count), *command)
    with _Running(started, environment or {}) as running:
        late = "" if running.ended(TIMEOUT) else "\ntimed out"
        assert running.status == 0 or not check, f"{running.status}\n{running.printed()}{late}"
        return running.printed() + late


def forked(launcher: str, program: str, *arguments: str) -> list[str]:
    """The command of a process that begins with the modules of a launcher imported.

    Args:
        launcher: a key of :data:`LAUNCHERS`.
        program: a module or a script.
        arguments: the program's arguments.
    """
    _, modules = LAUNCHERS[launcher]
    return fork_server(modules, ()).command(program, *arguments)


class Leave(SystemExit):
    """Raised in a test's body, ends a rank whose part has passed, while the others go on."""


_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Makes the system end this new process when its parent ends, even if the parent is killed."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class _ForkServer:
    """A server of :mod:`tests.fork_server` that lives until this process ends.

    Args:
        modules: the modules that the server imports.
        environment: environment variables for the imports, in addition to this process's own.
    """

    def __init__(self, modules: Sequence[str], environment: Environment) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._socket = str(Path(self._folder.name, "socket"))
        serve = f"from tests.fork_server import serve; serve({self._socket!r}, {modules!r})"
        # The server ends when its standard input is closed, at the end of this process.
        self._process = subprocess.Popen(
            [sys.executable, "-c", serve],
            cwd=ROOT,
            env={**os.environ, **_ENVIRONMENT, **dict(environment)},
            stdin=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        while not Path(self._socket).exists():
            if self._process.poll() is not None:
                raise RuntimeError("expected a fork server, got a process that has ended")
            time.sleep(0.02)

    def command(self, program: str, *arguments: str) -> list[str]:
        """The command that runs a module or a script in a process forked from the server."""
        caller = str(ROOT / "tests" / "fork_server.py")
        return [sys.executable, "-I", "-S", caller, self._socket, program, *arguments]


fork_server = functools.cache(_ForkServer)
"""Returns this process's only server for the given modules and variables; starts it at the first call."""


class _Running:
    """A running command with its output in a file; leaving the context ends all of its processes."""

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
            preexec_fn=_end_with_parent,
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
        """Waits up to ``seconds`` for the command's end; returns whether it has ended."""
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
            # horovodrun's ranks have sessions of their own; it ends them when it gets SIGTERM.
            os.killpg(self._process.pid, signal.SIGTERM)
        if not self.ended(10):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._file.close()
        atexit.unregister(self.stop)


class Job:
    """A job that runs tests on ranks.

    Args:
        kind: the kind of job.
        names: the tests, as ``module:function``, in order.

    Attributes:
        over: whether the job has ended, with a test that failed or with the last one.
    """

    def __init__(self, kind: Kind, names: Sequence[str]) -> None:
        self.names = list(names)
        self.over = False
        self._ranks = kind.ranks
        self._folder = tempfile.TemporaryDirectory()
        arguments, modules = LAUNCHERS[kind.launcher]
        # Horovod reads its own variables only when it is initialized.
        read = tuple(one for one in kind.environment if not one[0].startswith("HOROVOD_"))
        server = fork_server(modules, read)
        ranks = server.command("tests.ranks", kind.launcher, self._folder.name, *names)
        launcher = server.command(*arguments(kind.ranks), *ranks)
        self._running = _Running(launcher, dict(kind.environment))

    def outcomes(self, name: str) -> list[str]:
        """Waits for a test, or the job's end; returns :data:`PASSED` or a traceback for each rank.

        A rank that does not end the test returns where its threads stand.
        """
        until = time.monotonic() + TIMEOUT
        idle = _Idle()
        # Asked before the outcomes are read: a job that has ended writes no more of them.
        while (alive := self._running.alive) and time.monotonic() < until:
            if None not in self._read(name):
                break
            if idle.long(self._processes()):
                until = time.monotonic()
            time.sleep(0.02)
        outcomes = self._read(name)
        if any(text != PASSED for text in outcomes) or name == self.names[-1]:
            # If a rank has raised, the launcher ends the others.
            self._running.ended(max(1.0, until - time.monotonic()) if alive else 0)
            outcomes = self._read(name)
            late = "\ntimed out" if self._running.alive else ""
            stands = self._stand() if None in outcomes and late else {}
            printed = self._running.printed()[-_PRINTED:]
            self._running.stop()
            self.over = True
            return [
                text or f"did not end\n{stands.get(rank, '')}{printed}{late}"
                for rank, text in enumerate(outcomes)
            ]
        return [text or "" for text in outcomes]

    def _processes(self) -> dict[int, int]:
        """The process of each rank that has started, by rank."""
        files = {rank: process(self._folder.name, rank) for rank in range(self._ranks)}
        return {rank: int(file.read_text()) for rank, file in files.items() if file.exists()}

    def _stand(self) -> dict[int, str]:
        """Where the threads of each rank stand, as far as the rank can still say that."""
        for number in self._processes().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGUSR1)
        time.sleep(1)
        files = {rank: standing(self._folder.name, rank) for rank in self._processes()}
        return {rank: file.read_text() for rank, file in files.items()}

    def _read(self, name: str) -> list[str | None]:
        paths = [outcome(self._folder.name, name, rank) for rank in range(self._ranks)]
        return [path.read_text() if path.exists() else None for path in paths]


class _Idle:
    """Finds out whether processes wait for each other: together, they compute next to nothing."""

    def __init__(self) -> None:
        self._since, self._used, self._asked = time.monotonic(), 0.0, 0.0

    def long(self, processes: Mapping[int, int]) -> bool:
        """Whether the processes have been idle for :data:`IDLE` seconds; looks every second."""
        now = time.monotonic()
        if now < self._asked + 1:
            return False
        self._asked = now
        used = sum(map(_processor_time, processes.values()))
        if not processes or used > self._used + _LEAST:
            self._since, self._used = now, used
        return now > self._since + IDLE


def _processor_time(number: int) -> float:
    """The processor time of a process in seconds; 0 once it has ended."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def process(folder: str, rank: int) -> Path:
    """The path of the file to which a rank writes the number of its process."""
    return Path(folder) / f"process.{rank}"


def standing(folder: str, rank: int) -> Path:
    """The path of the file to which a rank writes where it stands."""
    return Path(folder) / f"standing.{rank}"


def outcome(folder: str, name: str, rank: int) -> Path:
    """The path of the file to which a rank writes a test's outcome."""
    return Path(folder) / f"{name}.{rank}"


_planned: dict[Kind, list[str]] = {}
_jobs: dict[Kind, Job] = {}


def share(kind: Kind, names: Sequence[str]) -> None:
    """Plans a job that runs tests in this order."""
    _planned[kind] = list(names)


def outcomes(kind: Kind, name: str, *, alone: bool) -> list[str]:
    """A test's outcomes by rank, from a job that is started if there is none.

    Args:
        kind: the kind of job.
        name: the test, as ``module:function``.
        alone: whether the test needs a job of its own.
    """
    if alone:
        return Job(kind, [name]).outcomes(name)
    job = _jobs.get(kind)
    if job is None or job.over or name not in job.names:
        names = _planned.get(kind, [])
        names = names[names.index(name) :] if name in names else [name]
        job = _jobs[kind] = Job(kind, names)
    return job.outcomes(name)
