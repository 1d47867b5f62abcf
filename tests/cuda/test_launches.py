"""A bucket takes as many launches for many tensors as for a few, in every exchange."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from benchmarks.launches import EXCHANGES, OnHost, Operations, Steps, main
from tests.cuda.executors import emulated, emulated_library

SHAPES = ((70,), (8, 40), (3000,))
MOST = 4
"""Launches of a stage, which is what a rank does without a message from the others."""


@dataclass
class Count:
    """The launches of kernels, and PyTorch's operations, by stage in the order of a step."""

    kernels: list[tuple[str, int]] = field(default_factory=list)
    others: list[tuple[str, int]] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts what is launched in the block."""
        launched = ctypes.CDLL(str(emulated_library())).hvdc_emulated_launches
        before = launched()
        with Operations() as operations:
            yield
        self.kernels.append((name, launched() - before))
        self.others.append((name, operations.count))


def counted(exchange: str, ranks: int, codec: str, copies: int) -> Count:
    """A step behind the first one, which makes plans and residuals."""
    steps = Steps(OnHost(emulated()), exchange, ranks, codec, SHAPES * copies)
    steps.run(Count().stage)
    count = Count()
    steps.run(count.stage)
    return count


@pytest.mark.parametrize("ranks", (8, 64))
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_launches_do_not_grow_with_the_tensors(exchange: str, ranks: int) -> None:
    few, many = (counted(exchange, ranks, "onebit", copies) for copies in (1, 6))
    assert few == many
    assert max(count for _, count in many.kernels) <= MOST
    # Zeros for a word or for flags, the flags themselves, and the averages' memory.
    averaging = ranks if exchange == "hierarchical" else 0
    sample = 1  # Of one gradient in a bucket, which is compared with that of its residual.
    assert max(count for _, count in many.others) <= MOST + averaging + sample


@pytest.mark.parametrize("codec", ("int8", "ternary", "ecq", "fp16"))
def test_every_codec_has_few_launches(codec: str) -> None:
    count = counted("two_shot", 8, codec, 3)
    assert max(count for _, count in count.kernels) <= MOST


def test_the_bytes_of_an_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """With feedback, nothing but the kernels moves what is as long as a gradient."""
    steps = Steps(OnHost(emulated()), "allgather", 8, "onebit", ((4096,),))
    steps.run(Count().stage)
    long: list[str] = []
    real = Operations.__torch_dispatch__

    def watched(self: Operations, func: object, types: object, args: tuple, kwargs: dict) -> object:
        if any(isinstance(one, torch.Tensor) and one.numel() >= 4096 for one in args):
            long.append(str(func))
        return real(self, func, types, args, kwargs)

    monkeypatch.setattr(Operations, "__torch_dispatch__", watched)
    steps.run(Count().stage)
    assert set(long) <= {"aten.view.default", "aten.slice.Tensor", "aten.detach.default"}


def test_the_benchmark_runs_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ranks", "8", "--tensors", "4", "--repeats", "1"]) == 0
    assert capsys.readouterr().out.count("us a tensor") == len(EXCHANGES)
