"""Says what a launcher has not started: ranks that Horovod knows, or more than one rank."""

from __future__ import annotations

import functools
import logging
import os
import warnings

_log = logging.getLogger(__name__)


def warn_of_separate_jobs(size: int) -> None:
    """Warns if a launcher has started several processes, each of which is a separate job for Horovod.

    Args:
        size: the number of ranks of the job, according to Horovod.
    """
    started = os.environ.get("WORLD_SIZE", "")
    if size == 1 and started.isdigit() and int(started) > 1:
        warnings.warn(
            f"expected the {started} ranks of WORLD_SIZE, got a Horovod job of one rank: each process "
            f"trains alone; start the script with horovodrun, or use hvd_compress.ddp with torchrun",
            stacklevel=3,
        )


@functools.cache
def say_alone() -> None:
    """Logs, once in a process, that a single rank exchanges no gradients."""
    _log.warning(
        "there is one rank: nothing is sent, and compression saves nothing; start several ranks with "
        "horovodrun or torchrun"
    )
