"""Runs test functions on real Horovod ranks.

``@on_ranks(2)`` makes a test whose body runs on two ranks under ``horovodrun``. The functions of a module
that ask for the same number of ranks share one job, because starting one takes longer than most tests; a
body that leaves Horovod unusable asks for a job of its own with ``alone=True``.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path

TIMEOUT = 180
_ROOT = Path(__file__).parent.parent


def on_ranks(
    count: int, *, alone: bool = False, environment: dict[str, str] | None = None
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A decorator: the body passes if it returns on every one of ``count`` ranks."""

    def decorate(body: Callable[[], None]) -> Callable[[], None]:
        def test() -> None:
            job = _run_alone if alone else _run_together
            settings = tuple(sorted((environment or {}).items()))
            outcomes = job(body.__module__, count, settings, body.__name__)
            failed = {rank: text for rank, text in enumerate(outcomes) if text != "passed"}
            assert not failed, "\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items())

        test.__name__ = test.__qualname__ = body.__name__
        test.__doc__ = body.__doc__
        test.__module__ = body.__module__
        test.body, test.ranks, test.alone = body, count, alone  # type: ignore[attr-defined]
        test.environment = tuple(sorted((environment or {}).items()))  # type: ignore[attr-defined]
        return test

    return decorate


def horovodrun(count: int, command: list[str], environment: dict[str, str] | None = None) -> str:
    """Runs a command on ``count`` ranks and returns what it printed, whatever became of it."""
    program = [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", str(count)]
    # One thread a rank: the ranks share this machine's cores.
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    try:
        done = subprocess.run(
            program + command,
            cwd=_ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        return (printed.decode() if isinstance(printed, bytes) else printed) + "\ntimed out"
    return done.stdout


@cache
def _job(
    module: str, count: int, environment: tuple[tuple[str, str], ...], names: tuple[str, ...]
) -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.ranks", module, folder, *names]
        printed = horovodrun(count, command, dict(environment))
        outcomes: dict[str, list[str]] = {}
        for name in names:
            outcomes[name] = []
            for rank in range(count):
                path = Path(folder) / f"{name}.{rank}"
                text = path.read_text() if path.exists() else f"did not end\n{printed}"
                outcomes[name].append(text)
    return outcomes


def _run_alone(
    module: str, count: int, environment: tuple[tuple[str, str], ...], name: str
) -> list[str]:
    return _job(module, count, environment, (name,))[name]


def _run_together(
    module: str, count: int, environment: tuple[tuple[str, str], ...], name: str
) -> list[str]:
    tests = vars(sys.modules[module]).values()
    names = tuple(
        test.__name__
        for test in tests
        if getattr(test, "ranks", None) == count
        and not test.alone
        and test.environment == environment
        and test.__module__ == module
    )
    return _job(module, count, environment, names)[name]


def _main(module: str, folder: str, *names: str) -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    tests = importlib.import_module(module)
    for name in names:
        path = Path(folder) / f"{name}.{hvd.rank()}"
        try:
            getattr(tests, name).body()
        except BaseException:
            path.write_text(traceback.format_exc())
            raise  # The other ranks' collectives would mix with those of the next test.
        path.write_text("passed")
        if not getattr(tests, name).alone:
            hvd.barrier()  # A rank that leaves early would take Horovod with it.


if __name__ == "__main__":
    _main(*sys.argv[1:])
