"""Runs test functions on real ranks, of Horovod or of torch.distributed.

``@on_ranks(2)`` makes a test whose body runs on two ranks under ``horovodrun``. With
``launcher="two hosts"`` they are on two hosts, with ``launcher="torchrun"`` in a process group with gloo,
and with ``launcher="two nodes"`` in one on what they take for two hosts.
The functions of a module that ask for the same number of ranks share one job, because starting one takes
longer than most tests; a body that leaves the ranks unusable asks for a job of its own with ``alone=True``.
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
ROOT = Path(__file__).parent.parent


def on_ranks(
    count: int,
    *,
    alone: bool = False,
    environment: dict[str, str] | None = None,
    launcher: str = "horovodrun",
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A decorator: the body passes if it returns on every one of ``count`` ranks."""

    def decorate(body: Callable[[], None]) -> Callable[[], None]:
        def test() -> None:
            names = (body.__name__,) if alone else _together(test)
            outcomes = _job(launcher, body.__module__, count, test.environment, names)[  # type: ignore[attr-defined]
                body.__name__
            ]
            failed = {rank: text for rank, text in enumerate(outcomes) if text != "passed"}
            assert not failed, "\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items())

        test.__name__ = test.__qualname__ = body.__name__
        test.__doc__ = body.__doc__
        test.__module__ = body.__module__
        test.body, test.ranks, test.alone = body, count, alone  # type: ignore[attr-defined]
        test.launcher = launcher  # type: ignore[attr-defined]
        test.environment = tuple(sorted((environment or {}).items()))  # type: ignore[attr-defined]
        return test

    return decorate


def horovodrun(count: int, command: list[str], environment: dict[str, str] | None = None) -> str:
    """Runs a command on ``count`` ranks and returns what it printed, whatever became of it."""
    program = [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", str(count)]
    return _printed_by([*program, *command], environment)


def two_hosts(count: int, command: list[str], environment: dict[str, str] | None = None) -> str:
    """As :func:`horovodrun`, with half of the ranks on what Horovod takes for another host."""
    first = (count + 1) // 2
    hosts = ["-H", f"localhost:{first},127.0.0.1:{count - first}"]
    return horovodrun(count, [*hosts, *command], environment)


def torchrun(count: int, command: list[str], environment: dict[str, str] | None = None) -> str:
    """As :func:`horovodrun`, for ``torch.distributed``."""
    options = ["--standalone", "--no-python", f"--nproc-per-node={count}"]
    return _printed_by(
        [sys.executable, "-m", "torch.distributed.run", *options, *command], environment
    )


_LAUNCHERS = {
    "horovodrun": horovodrun,
    "two hosts": two_hosts,
    "torchrun": torchrun,
    "two nodes": torchrun,
    "tensorflow": horovodrun,
    "tensorflow on two hosts": two_hosts,
}
"""``tensorflow``: Horovod for TensorFlow, whose ranks do not know those of Horovod for torch."""


def _printed_by(command: list[str], environment: dict[str, str] | None) -> str:
    # One thread a rank: the ranks share this machine's cores.
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
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
    launcher: str,
    module: str,
    count: int,
    environment: tuple[tuple[str, str], ...],
    names: tuple[str, ...],
) -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.ranks", launcher, module, folder, *names]
        printed = _LAUNCHERS[launcher](count, command, dict(environment))
        outcomes: dict[str, list[str]] = {}
        for name in names:
            outcomes[name] = []
            for rank in range(count):
                path = Path(folder) / f"{name}.{rank}"
                text = path.read_text() if path.exists() else f"did not end\n{printed}"
                outcomes[name].append(text)
    return outcomes


def _together(test: Callable[[], None]) -> tuple[str, ...]:
    """The tests that share a job with this one."""

    def kind(other: object) -> tuple[object, ...]:
        names = ("ranks", "alone", "environment", "launcher", "__module__")
        return tuple(getattr(other, name, None) for name in names)

    others = vars(sys.modules[test.__module__]).values()
    return tuple(other.__name__ for other in others if kind(other) == kind(test))


def _start(launcher: str) -> tuple[int, Callable[[], None]]:
    """This rank, and a barrier among all ranks."""
    if launcher in ("horovodrun", "two hosts"):
        import horovod.torch as hvd

        hvd.init()
        return hvd.rank(), hvd.barrier
    if launcher.startswith("tensorflow"):
        import horovod.tensorflow as hvd_tensorflow
        import tensorflow as tf

        hvd_tensorflow.init()
        return hvd_tensorflow.rank(), lambda: hvd_tensorflow.allreduce(tf.zeros(1), name="barrier")
    import torch.distributed as dist

    if launcher == "two nodes":
        _take_places_on_two_nodes(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.barrier


def _take_places_on_two_nodes(rank: int, size: int) -> None:
    # Two of torchrun's agents would set the same, but take half a minute to agree on their end.
    first = (size + 1) // 2
    host, place, local = (0, rank, first) if rank < first else (1, rank - first, size - first)
    names = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, map(str, (host, place, local)), strict=True))


def _main(launcher: str, module: str, folder: str, *names: str) -> None:
    rank, barrier = _start(launcher)
    if not launcher.startswith("tensorflow"):
        import torch

        torch.set_num_threads(1)
    tests = importlib.import_module(module)
    for name in names:
        path = Path(folder) / f"{name}.{rank}"
        try:
            getattr(tests, name).body()
        except BaseException:
            path.write_text(traceback.format_exc())
            raise  # The other ranks' collectives would mix with those of the next test.
        path.write_text("passed")
        if not getattr(tests, name).alone:
            barrier()  # A rank that leaves early would take the others' connections with it.


if __name__ == "__main__":
    _main(*sys.argv[1:])
