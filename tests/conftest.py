"""Tests that need the same ranks follow each other, and share a job."""

from __future__ import annotations

import pytest

from tests import jobs


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves each test on ranks to the first of its folder that needs the same ones."""
    sharing: dict[jobs.Kind, list[pytest.Item]] = {}
    for item in items:
        if (kind := _shared_kind(item)) is not None:
            sharing.setdefault(kind, []).append(item)
    ordered: dict[pytest.Item, None] = {}
    for item in items:
        kind = _shared_kind(item)
        ordered.update(dict.fromkeys(sharing[kind] if kind is not None else [item]))
    items[:] = ordered
    for kind, together in sharing.items():
        jobs.share(kind, [item.function.job_name for item in together])  # type: ignore[attr-defined]


def _shared_kind(item: pytest.Item) -> jobs.Kind | None:
    return getattr(getattr(item, "function", None), "shared_kind", None)
