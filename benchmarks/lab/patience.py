"""Ranks that wait without taking the processor from those that work.

Horovod's frontends wait for a collective by asking for it, and yielding the processor, again and again. On
a host of its own a rank may do that: its processor has nothing else to do. In a lab with more ranks than
cores, those that wait take turns with those that they wait for.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.lab.isolation import command

MICROSECONDS = 100
"""How long a rank sleeps where it would have yielded: some messages' latency."""

_SOURCE = f"""
#include <time.h>
int sched_yield(void) {{
  struct timespec pause = {{0, {1000 * MICROSECONDS}}};
  return nanosleep(&pause, 0), 0;
}}
"""


def build(folder: Path) -> Path:
    """Compiles the library that ranks have to be started with, as ``LD_PRELOAD``.

    Raises:
        LabError: there is no C compiler, or it failed.
    """
    source, library = folder / "patience.c", folder / "patience.so"
    source.write_text(_SOURCE)
    command("cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source))
    return library
