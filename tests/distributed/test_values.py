"""Values that ranks of a process group exchange beside their gradients."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from hvd_compress.process_group import values
from hvd_compress.process_group.collectives import Collectives, message
from hvd_compress.process_group.values import broadcast_state, gather_states, tell
from hvd_compress.ranks.values import MOST_BYTES, serialize
from tests import pickles
from tests.ranks import on_ranks


def _claim(ranks: Collectives, length: int) -> None:
    """Tells the other ranks a length."""
    ranks.all_gather(torch.tensor([length], device=ranks.device))[1].wait()


def _refused(call: Callable[[], Any], match: str) -> None:
    with pytest.raises(hvdc.ExchangeError, match=match):
        call()


@on_ranks(2, launcher="torchrun")
def test_values_of_other_lengths() -> None:
    ranks = Collectives(None)
    rank = dist.get_rank()
    value = {"rank": rank, "numbers": [float("inf"), None, -0.0] * rank, "text": "é" * rank}
    assert [one["rank"] for one in tell(ranks, value)] == [0, 1]
    assert tell(ranks, value)[rank] == value
    if rank == 0:
        _refused(lambda: tell(ranks, 1), "rank 1: ValueError: what is wrong")
    else:
        with pytest.raises(ValueError, match="what is wrong"):
            tell(ranks, 1, ValueError("what is wrong"))


class _OnASmallDevice(Collectives):
    """Collectives of a device with memory for 100 bytes of messages at a time."""

    def gather(self, message: torch.Tensor) -> torch.Tensor | None:
        assert message.numel() * self.size <= 100
        return super().gather(message)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        assert tensor.numel() <= 100
        super().broadcast(tensor, source)


@on_ranks(2, launcher="torchrun")
def test_states_go_through_a_device_in_parts() -> None:
    ranks, rank = _OnASmallDevice(None), dist.get_rank()
    states = [{"w": torch.arange(1.0 + 100 * rank)} for rank in range(2)]
    with mock.patch.object(values, "_PART_BYTES", 100):
        gathered = gather_states(ranks, states[rank], 1000)
        got = broadcast_state(ranks, states[rank], 1, 1000)
    assert torch.equal(got["w"].cpu(), states[1]["w"].cpu())
    assert (gathered is None) == (rank == 1)
    for one, expected in zip(gathered or states, states, strict=True):
        assert torch.equal(one["w"].cpu(), expected["w"].cpu())


@on_ranks(2, launcher="torchrun")
def test_a_length_beyond_all_bounds_is_an_error_on_every_rank() -> None:
    """No rank takes memory for it."""
    ranks = Collectives(None)
    value = "a" * (MOST_BYTES if dist.get_rank() else 1)
    _refused(lambda: tell(ranks, value), f"expected messages of at most {MOST_BYTES} bytes, got")
    state = {"w": torch.zeros(MOST_BYTES // 4 if dist.get_rank() else 1)}
    most = f"expected messages of at most {MOST_BYTES + 64 * 10} bytes, got"
    _refused(lambda: gather_states(ranks, state, 10), most)
    _refused(lambda: broadcast_state(ranks, state, 1, 10), most)
    for call in (lambda: tell(ranks, 1), lambda: gather_states(ranks, {}, 10)):
        if dist.get_rank():
            _claim(ranks, 1 << 62)
        else:
            _refused(call, "expected messages of at most")


@on_ranks(2, launcher="torchrun")
def test_a_pickle_of_another_rank_is_not_read() -> None:
    ranks = Collectives(None)
    value, state = "a" * 1000, {"w": torch.zeros(1000)}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace")
        if dist.get_rank() == 0:
            _refused(lambda: tell(ranks, value), "expected a value as JSON from rank 1, got")
            _refused(lambda: gather_states(ranks, state, 1000), "expected a state of tensors")
            _refused(lambda: broadcast_state(ranks, None, 1, 1000), "expected a state of tensors")
        else:
            bad = pickles.leaving(trace)
            _claim(ranks, len(bad))
            ranks.all_gather(message(bad, len(serialize([value, None])), ranks.device))[1].wait()
            bad = pickles.saved_leaving(trace)
            _claim(ranks, len(bad))
            ranks.gather(message(bad, len(pickles.saved(state)), ranks.device))
            _claim(ranks, len(bad))
            ranks.broadcast(message(bad, len(bad), ranks.device), 1)
        dist.barrier()
        assert not trace.exists()
