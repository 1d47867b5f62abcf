"""``hvd-compress doctor -- SCRIPT``: runs a PyTorch script until ``Auto`` has measured its steps."""

from __future__ import annotations

import inspect
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

_KEPT = (
    "hvd-compress doctor: the script's own communication hook is not used, so that Auto can measure"
)


class _Watch:
    """Ends the script with ``SystemExit`` when the first model that it trains has been measured.

    Attributes:
        auto: the compressor of the first model; None before the script has made one.
    """

    auto: Any = None
    _steps = 0

    def step(self) -> None:
        """Called on every rank at the same place of each step; steps before the first one do not count."""
        self._steps += 1
        if self._steps > 1 and self.auto.settled:
            raise SystemExit


def measure(command: Sequence[str], launcher: str) -> str:
    """Runs a script with ``Auto`` on its first model, and returns what ``Auto`` explains.

    Args:
        command: the script and its arguments, or ``-m``, a module and its arguments; ``python`` in front is
            ignored.
        launcher: ``"Horovod"``, or ``"torch.distributed"`` for a script that uses DDP.

    Raises:
        ValueError: there is no script; or the script has ended before it has trained a model.
    """
    watch = _Watch()
    watching = _horovod(watch) if launcher == "Horovod" else _ddp(watch)
    with watching:
        try:
            _run(command)
        except SystemExit as end:
            if end.code and not (watch.auto and watch.auto.settled):
                raise
    if watch.auto is None:
        made = "hvd.DistributedOptimizer" if launcher == "Horovod" else "DistributedDataParallel"
        raise ValueError(f"expected a PyTorch script that makes a {made}, got one that made none")
    explained: str = watch.auto.explain()
    return explained


def _run(command: Sequence[str]) -> None:
    words = list(command)
    if words and os.path.basename(words[0]).startswith("python"):
        del words[0]
    if not words or words == ["-m"]:
        raise ValueError("expected a script after --, as in -- train.py --epochs 1, got none")
    if words[0] == "-m":
        del words[0]
        with mock.patch.object(sys, "argv", words):
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    folder = os.path.dirname(os.path.abspath(words[0]))
    with mock.patch.object(sys, "argv", words), mock.patch.object(sys, "path", [folder, *sys.path]):
        runpy.run_path(words[0], run_name="__main__")


@contextmanager
def _ddp(watch: _Watch) -> Iterator[None]:
    """Registers ``Auto`` on the first DDP model that is made in the block."""
    from torch.nn.parallel import DistributedDataParallel

    import hvd_compress.ddp as hvdc

    made: Callable[..., None] = DistributedDataParallel.__init__

    def init(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        made(model, *args, **kwargs)
        if watch.auto is None:
            watch.auto = hvdc.register(model, "auto")
            model.register_comm_hook = lambda *args, **kwargs: print(_KEPT)  # type: ignore[method-assign]
            model.register_forward_pre_hook(lambda *args: watch.step())

    with mock.patch.object(DistributedDataParallel, "__init__", init):
        yield


@contextmanager
def _horovod(watch: _Watch) -> Iterator[None]:
    """Gives ``Auto`` to the first ``hvd.DistributedOptimizer`` that is made in the block."""
    import horovod.torch as hvd

    import hvd_compress.torch as hvdc

    made = hvd.DistributedOptimizer
    signature = inspect.signature(made)

    def distributed(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if watch.auto is not None:
            return made(*args, **kwargs)
        parameters = given.arguments.get("named_parameters")
        if parameters is None:
            raise ValueError(
                "expected named_parameters= of hvd.DistributedOptimizer, by which Auto knows the "
                "gradients, got none"
            )
        named = list(parameters)
        watch.auto = hvdc.Auto(named)
        given.arguments.update(named_parameters=named, compression=watch.auto)
        optimizer = made(*given.args, **given.kwargs)
        optimizer.register_step_post_hook(lambda *args: watch.step())
        return optimizer

    with mock.patch.object(hvd, "DistributedOptimizer", distributed):
        yield
