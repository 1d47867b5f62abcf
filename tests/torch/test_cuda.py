"""Gradients that CUDA kernels encode, on real ranks.

The kernels run on the host, for tensors that are there: what the face does around kernels that cannot
raise or answer at once is the same. On a GPU, ``make gpu-check`` trains.
"""

from __future__ import annotations

import copy
import warnings
from unittest import mock

import horovod.torch as hvd
import pytest
import torch

import hvd_compress.torch as hvdc
from hvd_compress import Route
from hvd_compress.codecs import ErrorFeedback, OneBit, codec_class
from hvd_compress.engine.executors import Executors
from hvd_compress.kernels.batch import Entry
from hvd_compress.torch import step as torch_step
from tests.contract import memory, residuals, results
from tests.contract.horovod_torch import HorovodTorch
from tests.cuda.executors import deferred_kernels, emulated_library
from tests.ranks import on_ranks
from tests.stranger import installed
from tests.torch.probes import distributed, exchange, watch
from tests.torch.test_exchange import SHAPES
from tests.torch_models import Probe, Simulation, assert_same_bits, targets


class _OnADevice(HorovodTorch):
    varies = False  # Only the CPU's kernels write an entropy code.


@pytest.fixture(autouse=True)
def built() -> None:
    """Builds the emulation before the ranks start, which would build it at the same time."""
    emulated_library()


@on_ranks(2)
def test_every_codec_in_one_shot() -> None:
    with deferred_kernels():
        results.every_codec(_OnADevice(), "allgather")


@on_ranks(2)
def test_steps_that_the_script_drops() -> None:
    """Only a device may know whether all ranks have dropped the step."""
    with deferred_kernels():
        residuals.a_step_that_the_script_drops(HorovodTorch(), "allgather")
        residuals.a_step_that_the_script_drops(HorovodTorch(), "two_shot")


@on_ranks(2)
def test_memory_after_the_results_are_written() -> None:
    with deferred_kernels():
        for exchange_name in ("allgather", "two_shot"):
            memory.no_message_outlives_its_results(HorovodTorch(), exchange_name)


@on_ranks(2)
def test_every_codec_in_two_shots() -> None:
    with deferred_kernels():
        results.every_codec(_OnADevice(), "two_shot")


def _a_step_with_inf_is_dropped(exchange_name: str) -> None:
    model = Probe(SHAPES)
    compressor = hvdc.Compressor(
        model.named_parameters(),
        Route(OneBit(), ErrorFeedback()),
        threshold=0,
        exchange=exchange_name,
        name=exchange_name,
    )
    optimizer = distributed(model, compressor)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))
    before = copy.deepcopy(compressor.state_dict()["tensors"])
    gradients = targets(SHAPES, hvd.rank(), 1)
    if hvd.rank() == 1:
        gradients["b"][5] = torch.inf
    got = exchange(model, optimizer, gradients)
    assert torch.isnan(got["b"]).any()
    after = compressor.state_dict()["tensors"]
    for name, old in before.items():
        _assert_close(after[name]["residual"], old["residual"])
        if old["owned"] is not None:
            _assert_close(after[name]["owned"]["residual"], old["owned"]["residual"])


def _assert_close(got: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert (got is None) == (expected is None)
    assert got is None or expected is None or torch.allclose(got, expected, atol=1e-5)


@on_ranks(2)
def test_a_step_with_inf_is_dropped_on_all_ranks() -> None:
    """The host reads no flag, and every residual is nevertheless restored."""
    with deferred_kernels():
        for name in ("allgather", "two_shot", "hierarchical"):
            _a_step_with_inf_is_dropped(name)


@on_ranks(2)
def test_an_altered_payload_is_nan_now_and_an_error_in_the_next_step() -> None:
    """The error names the parameter and the sender, whatever comes between; no residual has changed."""
    shapes = {"a": (3000,), "b": (3000,)}
    for name, role in (("allgather", ""), ("two_shot", ", as its owner")):
        with deferred_kernels():
            model = Probe(shapes)
            route = Route(OneBit(), ErrorFeedback())
            compressor = hvdc.Compressor(
                model.named_parameters(), route, threshold=0, exchange=name, name=name
            )
            optimizer = distributed(model, compressor)
            altered: list[str] = []

            def flip_a_bit(name: str, rows: torch.Tensor, altered: list[str] = altered) -> None:
                if not altered:
                    altered.append(name)
                    rows[1, 40] ^= 1

            exchange(model, optimizer, targets(shapes, hvd.rank(), 0))
            before = copy.deepcopy(compressor.state_dict()["tensors"])
            watch(compressor, result=flip_a_bit)
            got = exchange(model, optimizer, targets(shapes, hvd.rank(), 1))
            nan = [one for one in shapes if torch.isnan(got[one]).any()]
            assert len(nan) == 1
            compressor.set_codec(Route(OneBit(), ErrorFeedback(), name))
            expected = f"^{nan[0]}{role}: rank 1's payload: expected the checksum"
            with pytest.raises(hvdc.PayloadError, match=expected):
                exchange(model, optimizer, targets(shapes, hvd.rank(), 2))
            after = compressor.state_dict()["tensors"]
            for one, old in before.items():
                assert torch.equal(after[one]["residual"], old["residual"])


class _Elsewhere(torch.Tensor):
    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


@on_ranks(2)
def test_only_a_device_that_has_another_part_of_the_model_knows_that_a_step_is_dropped() -> None:
    for dropped in (0, 1):
        model = Probe(SHAPES)
        route = Route(OneBit(), ErrorFeedback())
        compressor = hvdc.Compressor(
            model.named_parameters(), route, threshold=0, name=f"dropped {dropped}"
        )
        optimizer = distributed(model, compressor)
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))
        before = copy.deepcopy(compressor.state_dict()["tensors"])
        word = torch.tensor([dropped], dtype=torch.int32).as_subclass(_Elsewhere)
        with mock.patch.object(torch_step, "judge", lambda _, word=word: word):
            exchange(model, optimizer, targets(SHAPES, hvd.rank(), 1))
        after = compressor.state_dict()["tensors"]
        for one, old in before.items():
            assert torch.equal(after[one]["residual"], old["residual"]) == bool(dropped)


@on_ranks(2)
def test_a_codec_without_a_kernel_runs_on_copies_with_one_warning() -> None:
    with installed(), deferred_kernels(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        codec = codec_class("test", "codec", "twobit")()
        for feedback in (codec.feedback, ErrorFeedback()):
            for exchange_name in ("allgather", "two_shot"):
                model, route = Probe(SHAPES), Route(codec, feedback, exchange_name)
                compressor = hvdc.Compressor(model.named_parameters(), route, threshold=0)
                optimizer = distributed(model, compressor)
                simulation = Simulation(exchange_name, codec, feedback, SHAPES, 2)
                for step in range(4):
                    gradients = [targets(SHAPES, r, step) for r in range(2)]
                    if step == 2:  # The step is dropped, and residuals stay.
                        gradients[1]["a"].view(-1)[7] = torch.inf
                    got = exchange(model, optimizer, gradients[hvd.rank()])
                    expected = simulation.average(gradients)
                    if step == 2:
                        assert not got["a"].isfinite().all()
                    else:
                        assert_same_bits(got, expected)
                told = [str(w.message) for w in caught if "no CUDA kernel" in str(w.message)]
                assert len(told) == 1, told
                caught.clear()


def test_tensors_elsewhere_are_refused() -> None:
    with pytest.raises(TypeError, match="on the CPU or on a CUDA device, got one on meta"):
        Executors(1).batch([Entry(OneBit(), (1,))], None, torch.zeros(1, device="meta"))
