"""Gives tests their markers, and orders them so that tests on the same ranks can share a job."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import hypothesis
import pytest

from tests import jobs, units

# Triton is installed with PyPI's PyTorch. Imported after TensorFlow, it ends in a segmentation fault.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

# On a machine with other users, an example can take arbitrarily long.
hypothesis.settings.register_profile(
    "shared machine",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("shared machine")

MARKERS = {
    "codecs": ("quick",),
    "exchanges": ("quick",),
    "golden": ("quick",),
    "kernels": ("quick",),
    "planner": ("quick",),
    "docs/test_format_page.py": ("quick",),
    "test_imports.py": ("quick",),
    "signatures/test_frontends.py": ("torch", "ddp", "tensorflow"),
    "contract/test_torch.py": ("torch",),
    "contract/test_distributed.py": ("ddp",),
    "contract/test_ddp.py": ("ddp",),
    "contract/test_tensorflow.py": ("tensorflow", "exhaustive"),
    "torch": ("torch",),
    "torch/test_parity.py": ("ddp",),
    "distributed": ("ddp",),
    "ddp": ("ddp",),
    "diloco": ("ddp",),
    "fsdp": ("ddp",),
    "hostdev": ("ddp", "exhaustive"),
    "papers": ("ddp", "torch"),
    "tensorflow": ("tensorflow",),
    "keras": ("tensorflow",),
    "suites": ("ddp", "exhaustive"),
    "suites/test_ddp.py": ("solo",),
    "lab": ("lab", "exhaustive", "solo"),
    "native": ("native", "exhaustive"),
    "cuda": ("native", "exhaustive"),
    "benchmarks": ("exhaustive",),
    "benchmarks/test_churn.py": ("solo",),
    "diloco/test_torchft.py": ("exhaustive", "solo"),
    "ddp/test_cuda.py": ("exhaustive",),
    "ddp/test_restarts.py": ("exhaustive", "solo"),
    "ddp/test_trainers.py": ("exhaustive",),
    "distributed/test_leaving.py": ("exhaustive", "solo"),
    "diloco/test_rebind.py": ("exhaustive",),
    "diloco/test_sharded_states.py": ("exhaustive",),
    "diloco/test_shards.py": ("exhaustive",),
    "docs/test_cluster_page.py": ("exhaustive",),
    "docs/test_docstrings.py": ("exhaustive",),
    "docs/test_pages.py": ("exhaustive",),
    "docs/test_examples.py": ("exhaustive",),
    "docs/test_recipes.py": ("exhaustive",),
    "faults": ("exhaustive", "solo"),
    "fsdp/test_beside_stock.py": ("exhaustive",),
    "keras/test_elastic.py": ("exhaustive", "solo"),
    "keras/test_legacy.py": ("exhaustive",),
    "keras/test_recipes.py": ("exhaustive",),
    "tensorflow/test_auto.py": ("exhaustive",),
    "tensorflow/test_build.py": ("exhaustive",),
    "tensorflow/test_elastic.py": ("exhaustive",),
    "tensorflow/test_gpu.py": ("exhaustive",),
    "tensorflow/test_stages.py": ("exhaustive",),
    "test_doctor.py": ("exhaustive",),
    "test_gpu_check.py": ("exhaustive",),
    "torch/test_auto.py": ("exhaustive",),
    "torch/test_cuda.py": ("exhaustive",),
    "torch/test_elastic.py": ("exhaustive", "solo"),
    "torch/test_hierarchical.py": ("exhaustive",),
    "torch/test_two_shot_errors.py": ("exhaustive",),
    "scripts/test_release.py": ("exhaustive",),
    "unused": ("exhaustive",),
}
"""The markers of tests, by the path of a folder or file within tests. Tests on ranks are never quick;
the contract on more than two ranks is exhaustive. Tests that are solo are exhaustive."""

USUAL = {
    "fsdp/test_beside_stock.py": (
        "test_a_divisor_of_the_users_own",
        "test_replicas_that_use_different_parameters",
    ),
}
"""The tests of exhaustive files that are not exhaustive, as nothing else tries what they try."""


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks a test before ``-m`` selects tests."""
    place = _place(item)
    on_ranks = hasattr(getattr(item, "function", None), "job_name")
    for path in (place, *place.parents):
        for marker in MARKERS.get(path.as_posix(), ()):
            usual = marker == "exhaustive" and item.name in USUAL.get(place.as_posix(), ())
            if not (usual or (on_ranks and marker == "quick")):
                item.add_marker(marker)
    if place.parts[0] == "contract" and item.function.ranks > 2:  # type: ignore[attr-defined]
        item.add_marker("exhaustive")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Moves each test on ranks behind the first test of its unit that needs the same ranks."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: units.place(_place(item).as_posix()))
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
        run = [item for item in together if not _skipped(item)]
        jobs.share(kind, [item.function.job_name for item in run])  # type: ignore[attr-defined]


def pytest_collection_finish() -> None:
    """Excludes the tests and all that they import from garbage collection."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _temporary_files_of_others() -> Iterator[None]:
    """Removes the temporary files that torchrun, TensorFlow and killed ranks leave behind."""
    tempfile.gettempdir()  # Cached, so that files of failed tests, which pytest keeps, are not removed.
    with (
        tempfile.TemporaryDirectory(prefix="hvdc_", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The number of processes for ``-n auto``: just this one for chosen tests, which are soon over."""
    chosen = config.option.file_or_dir or config.option.keyword
    return 0 if chosen else units.PROCESSES


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The scheduler that distributes units if ``-n`` asks for several processes."""
    return units.scheduler(config, log)


def _place(item: pytest.Item) -> PurePath:
    return item.path.relative_to(Path(__file__).parent)


def _skipped(item: pytest.Item) -> bool:
    """Whether a mark skips a test on ranks, whose body its job must not run either."""
    return any(mark.args[0] for mark in item.iter_markers("skipif"))


def _shared_kind(item: pytest.Item) -> jobs.Kind | None:
    return getattr(getattr(item, "function", None), "shared_kind", None)
