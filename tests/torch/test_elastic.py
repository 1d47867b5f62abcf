"""Ranks that are killed, replaced and added under elastic Horovod, by the documentation's own script."""

from __future__ import annotations

from pathlib import Path

from tests.elastic_jobs import kill_replace_and_add


def test_a_rank_is_killed_and_replaced_and_another_host_comes(tmp_path: Path) -> None:
    kill_replace_and_add(tmp_path, "elastic_quickstart.py", "--steps", "2000", begun=50)
