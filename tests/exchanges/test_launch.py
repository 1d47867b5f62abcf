"""A launcher that Horovod does not know."""

from __future__ import annotations

import warnings

import pytest

from hvd_compress.ranks.launch import warn_of_separate_jobs


def test_processes_that_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match="expected the 4 ranks of WORLD_SIZE, got .* one rank"):
        warn_of_separate_jobs(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_separate_jobs(4)
        for value in ("1", "", "many"):
            monkeypatch.setenv("WORLD_SIZE", value)
            warn_of_separate_jobs(1)
        monkeypatch.delenv("WORLD_SIZE")
        warn_of_separate_jobs(1)
