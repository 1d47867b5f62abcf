"""Runs test functions on real ranks of Horovod or torch.distributed.

``@on_ranks(2)`` makes a test whose body runs on two ranks under ``horovodrun``; for other launchers, see
:data:`tests.jobs.LAUNCHERS`. The tests of a unit that ask for the same ranks share a job. A test that
leaves its ranks unusable, or concerns a job's beginning or end, needs its own job (``alone=True``).
"""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from tests import device, jobs, units


def on_ranks(
    count: int,
    *,
    alone: bool = False,
    environment: dict[str, str] | None = None,
    launcher: str = "horovodrun",
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Returns a decorator that makes a test of a body, which passes if it returns on all ranks.

    Args:
        count: the number of ranks.
        alone: whether the test needs a job of its own.
        environment: environment variables of the ranks, in addition to this process's own.
        launcher: a key of :data:`tests.jobs.LAUNCHERS`.
    """

    def decorate(body: Callable[[], None]) -> Callable[[], None]:
        path = body.__module__.partition(".")[2].replace(".", "/") + ".py"
        variables = tuple(sorted((environment or {}).items()))
        kind = jobs.Kind(launcher, count, variables, units.unit(path))
        name = f"{body.__module__}:{body.__name__}"

        def test() -> None:
            outcomes = jobs.outcomes(kind, name, alone=alone)
            failed = {rank: text for rank, text in enumerate(outcomes) if text != jobs.PASSED}
            assert not failed, "\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items())

        test.__name__ = test.__qualname__ = body.__name__
        test.__doc__ = body.__doc__
        test.__module__ = body.__module__
        test.body, test.job_name, test.ranks = body, name, count  # type: ignore[attr-defined]
        test.shared_kind = None if alone else kind  # type: ignore[attr-defined]
        return test

    return decorate


def start(
    launcher: str, timeout: datetime.timedelta | None = None
) -> tuple[int, int, Callable[[], None]]:
    """Initializes the framework; returns this rank's number, the number of ranks, and their barrier.

    Args:
        launcher: a key of :data:`tests.jobs.LAUNCHERS`.
        timeout: the timeout of a process group; None: PyTorch's default.
    """
    if launcher in ("horovodrun", "two hosts"):
        import horovod.torch as hvd

        hvd.init()
        return hvd.rank(), hvd.size(), hvd.barrier
    if launcher.startswith("tensorflow"):
        import horovod.tensorflow as hvd_tensorflow
        import tensorflow as tf

        if launcher.endswith("GPU"):
            from tests.tensorflow import emulated

            emulated.plug_in()
        hvd_tensorflow.init()
        rank, size = hvd_tensorflow.rank(), hvd_tensorflow.size()
        return rank, size, lambda: hvd_tensorflow.allreduce(tf.zeros(1), name="barrier")
    import torch.distributed as dist

    if launcher == "two nodes":
        _take_places_on_two_nodes(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.init_process_group(_backend(int(os.environ["WORLD_SIZE"])), timeout=timeout)
    return dist.get_rank(), dist.get_world_size(), dist.barrier


def _backend(ranks: int) -> str:
    """The backend: with NCCL for tests on GPUs, unless ranks share a GPU, which NCCL refuses."""
    import torch

    from tests.hostdev import hostdev

    if device.TYPE == hostdev.TYPE:
        return f"cpu:gloo,{device.TYPE}:{hostdev.BACKEND}"
    by_nccl = device.TYPE == "cuda" and ranks <= torch.cuda.device_count()
    return "cpu:gloo,cuda:nccl" if by_nccl else "gloo"


def _use_device() -> None:
    """Makes the tested device the default, and lets a single rank run its collectives, too."""
    import torch

    from hvd_compress.exchanges.comm import Collective
    from tests.torch_models import DEVICE

    local = int(os.environ.get("LOCAL_RANK") or os.environ.get("HOROVOD_LOCAL_RANK") or 0)
    module = torch.get_device_module(DEVICE)
    module.set_device(local % module.device_count())
    torch.set_default_device(DEVICE)
    ranks = os.environ.get("WORLD_SIZE") or os.environ.get("HOROVOD_SIZE")
    Collective.skips_alone = ranks != "1"


def _take_places_on_two_nodes(rank: int, size: int) -> None:
    # Two agents of torchrun would set the same values, but take half a minute to end.
    first = (size + 1) // 2
    host, place, local = (0, rank, first) if rank < first else (1, rank - first, size - first)
    names = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, map(str, (host, place, local)), strict=True))


def _main(launcher: str, folder: str, *names: str) -> None:
    for_torch = not launcher.startswith("tensorflow")
    if for_torch and device.TYPE != "cpu":
        _use_device()
    rank, ranks, barrier = start(launcher)
    # SIGUSR1 makes a rank write where its threads stand; a job that hangs asks for that.
    standing = open(jobs.standing(folder, rank), "w", encoding="utf-8")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=standing, all_threads=True)
    _write(jobs.process(folder, rank), str(os.getpid()))
    if for_torch:
        import torch

        torch.set_num_threads(1)
    for name in names:
        module, _, function = name.partition(":")
        test = getattr(importlib.import_module(module), function)
        paths = [jobs.outcome(folder, name, one) for one in range(ranks)]
        try:
            test.body()
        except jobs.Leave:
            _write(paths[rank], jobs.PASSED)
            raise
        except BaseException:
            _write(paths[rank], traceback.format_exc())
            raise  # In a further test, this rank's collectives would not match those of the others.
        _write(paths[rank], jobs.PASSED)
        if test.shared_kind is not None:
            barrier()  # What the test has left in progress ends before the next one.
        # A rank that left early would close its connections to the others.
        while not all(path.exists() for path in paths):
            time.sleep(0.002)


def _write(path: os.PathLike[str], text: str) -> None:
    # Renamed when complete, because a reader takes the file as soon as it exists.
    whole = f"{os.fspath(path)}.part"
    with open(whole, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(whole, path)


if __name__ == "__main__":
    _main(*sys.argv[1:])
