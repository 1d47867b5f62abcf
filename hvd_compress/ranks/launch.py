"""Were the ranks started by the launcher that Horovod knows?"""

from __future__ import annotations

import os
import warnings


def warn_of_separate_jobs(size: int) -> None:
    """Warns where a launcher has started several processes, and each is a job of its own for Horovod.

    Args:
        size: ranks of the job, as Horovod has them.
    """
    started = os.environ.get("WORLD_SIZE", "")
    if size == 1 and started.isdigit() and int(started) > 1:
        warnings.warn(
            f"expected the {started} ranks of WORLD_SIZE, got a Horovod job of one rank: each process "
            f"trains alone; start the script with horovodrun, or use hvd_compress.ddp with torchrun",
            stacklevel=3,
        )
