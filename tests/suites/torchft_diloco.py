"""Runs torchft's own tests of DiLoCo with this package's DiLoCo.

``python -m tests.suites.torchft_diloco MODE FILE [PATTERN]`` prints a line of JSON for each test of a file
of torchft's repository. ``MODE`` is ``stock`` or a codec's name. Replicas are threads of one process, with
real managers and a real lighthouse.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchft import local_sgd
from torchft._test import diloco_trainer

import hvd_compress.distributed as hvdc
from hvd_compress.diloco import DiLoCo
from tests.suites import running


class _Compressed:
    """This package's DiLoCo with torchft's interface, a context that counts the inner optimizer's steps."""

    codec = ""

    def __init__(
        self, manager: Any, model: nn.Module, inner: torch.optim.Optimizer, **options: Any
    ) -> None:
        self._inner = inner
        group = getattr(manager._pg, "parent", None) if _fake(manager._pg) else manager._pg
        compressor = hvdc.Compressor(self.codec, process_group=group, threshold=1)
        self._diloco = DiLoCo(model, compressor, manager=manager, **options)
        running.count_compressor()
        if _fake(manager._pg):
            compressor.reduce = _failing(compressor.reduce, manager._pg)  # type: ignore[method-assign]
        for fragment in range(len(self._diloco._fragments)):
            # Only for the tests' comparisons: DiLoCo loads the state that it has registered itself.
            key = f"StreamingDiLoCoFragment_{fragment}"
            save = functools.partial(self._state, f"{fragment}.")
            manager.register_state_dict_fn(key, lambda _: None, save)

    def _state(self, prefix: str) -> dict[str, Any]:
        common = self._diloco.common_parameters
        outer = self._diloco._common.state_dict()["outer_optimizer"]
        return {
            "original_parameters": {
                name.removeprefix(prefix): one.clone()
                for name, one in common.items()
                if name.startswith(prefix)
            },
            "outer_optimizer": outer,
        }

    def __enter__(self) -> _Compressed:
        self._hook = self._inner.register_step_post_hook(lambda *_: self._diloco.step())
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


def _fake(group: Any) -> bool:
    return type(group).__name__ == "FakeProcessGroupWrapper"


def _failing(reduce: Any, group: Any) -> Any:
    """Wraps ``reduce`` so that it fails, after the exchange, if the test wants an all-reduce to fail."""

    def failing(*given: Any, accept: Any) -> hvdc.Work:
        error, group._future_error = group._future_error, None

        def check() -> None:
            if error is not None:
                raise error
            accept()

        work: hvdc.Work = reduce(*given, accept=check)
        return work

    return failing


def _diloco(
    manager: Any,
    fragments: Sequence[nn.Module],
    inner_optimizer: torch.optim.Optimizer,
    outer_optimizer: Any,
    sync_every: int,
    backup_device: object = None,
    fragment_sync_delay: int = 0,
    fragment_update_alpha: float = 0.0,
) -> _Compressed:
    outer = outer_optimizer[0] if isinstance(outer_optimizer, list) else outer_optimizer
    return _Compressed(
        manager,
        nn.ModuleList(fragments),
        inner_optimizer,
        sync_every=sync_every,
        delay=fragment_sync_delay,
        mixing=fragment_update_alpha,
        fragments=[[f"{number}.*"] for number in range(len(fragments))],
        outer_optimizer=lambda parameters: type(outer)(parameters, **outer.defaults),
    )


def _local_sgd(
    manager: Any, model: nn.Module, optimizer: torch.optim.Optimizer, sync_every: int
) -> _Compressed:
    average = functools.partial(torch.optim.SGD, lr=1.0)
    return _Compressed(manager, model, optimizer, sync_every=sync_every, outer_optimizer=average)


def _main(mode: str, file: str, pattern: str = ".") -> None:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if mode != "stock":
        _Compressed.codec = mode
        local_sgd.DiLoCo = diloco_trainer.DiLoCo = _diloco
        local_sgd.LocalSGD = _local_sgd
    running.run(running.tests_of(running.load(Path(file), package="torchft.")), pattern)


if __name__ == "__main__":
    _main(*sys.argv[1:])
