"""Timeouts of process groups that a test changes for a while."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


@contextlib.contextmanager
def timeout(group: dist.ProcessGroup, seconds: float) -> Iterator[None]:
    """Sets a group's timeout on this rank in the block, and PyTorch's default afterwards."""
    c10d: Any = dist.distributed_c10d
    c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)
    try:
        yield
    finally:
        c10d._set_pg_timeout(c10d.default_pg_timeout, group)
