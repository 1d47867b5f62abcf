"""A library that lets waiting ranks sleep, so that they leave the processor to others.

Horovod's frontends wait for a collective by polling it and yielding the processor in a loop. On a host of
its own, a rank may do so. In a lab with more ranks than cores, waiting ranks take processor time from those
that they wait for.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.lab.isolation import command

MICROSECONDS = 100
"""The time for which a rank sleeps instead of yielding, which adds to the latency of messages."""

_SOURCE = f"""
#include <time.h>
int sched_yield(void) {{
  struct timespec pause = {{0, {1000 * MICROSECONDS}}};
  return nanosleep(&pause, 0), 0;
}}
"""


def build(folder: Path) -> Path:
    """Compiles the library for the ranks' ``LD_PRELOAD``, and returns its path.

    Raises:
        LabError: there is no C compiler, or it failed.
    """
    source, library = folder / "patience.c", folder / "patience.so"
    source.write_text(_SOURCE)
    command("cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source))
    return library
