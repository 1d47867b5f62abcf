"""Buckets that CUDA kernels encode, on real ranks.

The kernels run on the host, for tensors of a device in its memory, and gloo stands where NCCL would: what
the hook does around kernels and collectives that only streams wait for is the same, and the device's log
shows that nothing is used that is not there yet.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hvd_compress.ddp as hvdc
import hvd_compress.distributed as of_all_reduce
from hvd_compress.codecs import Codec, ErrorFeedback, OneBit, PowerSGD
from hvd_compress.engine import low_rank
from hvd_compress.engine.batch import Batch
from hvd_compress.exchanges.comm import Collective
from hvd_compress.kernels.cuda_batch import CudaBatch
from hvd_compress.process_group import ranks as process_group_ranks
from hvd_compress.process_group import transport
from hvd_compress.process_group.collectives import Collectives
from hvd_compress.process_group.device_collectives import InStream, ThroughHost, collectives_of
from tests.contract import memory, residuals, results
from tests.contract.beside import Beside
from tests.contract.ddp import DDP
from tests.contract.frontend import Frontend
from tests.cuda.executors import emulated_library
from tests.ddp import test_exchange, test_nonfinite
from tests.ddp.probes import Probe, assert_equal_on_all_ranks, distributed, exchange
from tests.hostdev import hostdev
from tests.hostdev.races import without_races
from tests.hostdev.trainings import gloo
from tests.ranks import on_ranks
from tests.torch_models import targets

DEVICE = {"HVDC_TEST_DEVICE": hostdev.TYPE}
SHAPES = {"a": (40, 70), "b": (3000,), "c": (2000,), "small": (10,)}


@pytest.fixture(autouse=True)
def built() -> None:
    """Builds the device before the ranks start, which would build it at the same time."""
    emulated_library()
    hostdev.library()


@contextmanager
def through_the_host() -> Iterator[None]:
    """Messages are sent as those of ranks that share a GPU."""

    def staged(_: dist.ProcessGroup | None, device: torch.device) -> Collectives:
        return collectives_of(gloo(), device)

    with (
        without_races(),
        mock.patch.object(process_group_ranks, "collectives_of", staged),
    ):
        yield


def _as_on_the_cpu(
    *bodies: Callable[[], None], by: Callable[[], AbstractContextManager] = without_races
) -> None:
    for body in bodies:
        with by():
            getattr(body, "body", body)()


def _contract(exchange: str, *held: Callable[[Frontend, str], None]) -> list[Callable[[], None]]:
    return [partial(one, DDP(), exchange) for one in held]


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_one_shot() -> None:
    _as_on_the_cpu(
        *_contract(
            "allgather",
            results.every_codec,
            results.every_form,
            results.parameters_that_are_not_used,
            results.half_precision,
            results.each_tensor_its_own_route,
        ),
        test_exchange.test_a_parameter_that_no_rank_uses_keeps_its_residual,
        test_exchange.test_a_parameter_in_another_order_of_memory,
        test_exchange.test_two_models_in_one_backward_pass,
    )


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_two_shots() -> None:
    _as_on_the_cpu(
        *_contract(
            "two_shot",
            results.every_codec,
            results.every_form,
            results.parameters_that_are_not_used,
            residuals.nonfinite_gradients,
            residuals.a_sum_beyond_half_precision,
            residuals.a_change_of_codec_loses_no_mass,
            residuals.a_checkpoint_goes_on_bit_for_bit,
            residuals.a_rank_that_joins,
        )
    )


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_factors() -> None:
    _as_on_the_cpu(
        *_contract(
            "low_rank",
            results.every_codec,
            results.every_form,
            results.parameters_that_are_not_used,
            results.half_precision,
            residuals.nonfinite_gradients,
            residuals.a_step_that_the_script_drops,
            residuals.a_change_of_codec_loses_no_mass,
            residuals.a_checkpoint_goes_on_bit_for_bit,
            residuals.a_rank_that_joins,
            memory.no_message_outlives_its_results,
        ),
        _copies_of_gradients_without_a_residual,
    )


def _copies_of_gradients_without_a_residual() -> None:
    row = (PowerSGD(2), ErrorFeedback(0.0))
    Beside(DDP(), "low_rank", row, dtype="float16").steps(0, 1)


@on_ranks(4, launcher="two nodes", environment=DEVICE)
def test_hosts() -> None:
    _as_on_the_cpu(
        *_contract(
            "hierarchical",
            results.every_codec,
            residuals.nonfinite_gradients,
            memory.no_message_outlives_its_results,
        )
    )


def _a_nonfinite_gradient_in_the_first_bucket_or_the_last() -> None:
    for view in (False, True):
        for where in ("a", "c"):
            ddp, compressor = distributed(
                Probe(test_nonfinite.SHAPES),
                OneBit(),
                ErrorFeedback(),
                gradient_as_bucket_view=view,
                bucket_cap_mb=0.001,
            )
            test_nonfinite._a_bad_step(math.inf, where, compressor, ddp)


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_steps_that_are_dropped() -> None:
    """The host reads no flag, and every residual is nevertheless restored."""
    _as_on_the_cpu(
        _a_nonfinite_gradient_in_the_first_bucket_or_the_last,
        test_nonfinite.test_a_nonfinite_gradient_without_a_residual_drops_the_others_step,
        test_nonfinite.test_an_unused_parameter_in_a_dropped_step,
        test_nonfinite.test_residuals_follow_the_loss_scale,
    )


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_memory_while_the_backward_pass_goes_on() -> None:
    for name in ("allgather", "two_shot"):
        _as_on_the_cpu(*_contract(name, memory.no_message_outlives_its_results))


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_through_the_memory_of_the_host() -> None:
    _as_on_the_cpu(
        *_contract("allgather", results.each_tensor_its_own_route),
        *_contract("two_shot", results.every_form),
        _a_nonfinite_gradient_in_the_first_bucket_or_the_last,
        by=through_the_host,
    )


def _waits(steps: int, **options: Any) -> list[int]:
    """The number of times that the host waits for the device within the hooks of each step."""
    waits: list[int] = []
    reduce = hvdc.Compressor.reduce

    def counted(self: hvdc.Compressor, bucket: Any) -> Any:
        with hostdev.logged() as log:
            future = reduce(self, bucket)
        waits[-1] += sum(what.startswith("synchronize") for what, _, _ in log)
        return future

    codec = PowerSGD(2) if options.get("exchange") == "low_rank" else OneBit()
    with mock.patch.object(hvdc.Compressor, "reduce", counted):
        ddp, _ = distributed(Probe(SHAPES), codec, ErrorFeedback(), threshold=100, **options)
        for step in range(steps):
            waits.append(0)
            exchange(ddp, targets(SHAPES, dist.get_rank(), step))
    return waits


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_no_hook_waits_for_the_device() -> None:
    """Except in the first step, which may make residuals of averages, or with messages through the host."""
    for name in ("allgather", "two_shot", "low_rank"):
        assert _waits(4, exchange=name)[1:] == [0] * 3, name
    assert all(_waits(4, process_group=gloo()))


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_a_second_shot_follows_the_first_one_of_the_next_bucket() -> None:
    """On every rank, whatever takes how long."""
    first, second = "all_to_all", "all_gather"
    kinds: list[str] = []

    def noted(real: Any) -> Any:
        def start(self: InStream, collective: Collective) -> tuple[torch.Tensor, dist.Work]:
            if collective.message.numel() > 48:  # Not a comparison.
                kinds.append(collective.kind)
            time.sleep(0.02 * ((len(kinds) + dist.get_rank()) % 2))
            return real(self, collective)

        return start

    shapes = {"a": (40, 70), "b": (3000,), "c": (2000,), "d": (5000,)}
    for by, where in ((without_races, InStream), (through_the_host, ThroughHost)):
        with by(), mock.patch.object(where, "start", noted(where.start)):
            ddp, _ = distributed(
                Probe(shapes), OneBit(), ErrorFeedback(), exchange="two_shot", bucket_cap_mb=0.001
            )
            for step in range(3):
                kinds.clear()
                exchange(ddp, targets(shapes, dist.get_rank(), step))
                middle = [first, second] * (len(kinds) // 2 - 1)
                assert kinds == [first, *middle, second], (step, where, kinds)
            assert len(kinds) == 2 * len(shapes)


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_a_change_of_codec_of_one_of_several_buckets() -> None:
    with without_races():
        ddp, compressor = distributed(
            Probe(SHAPES), OneBit(), ErrorFeedback(), exchange="two_shot", bucket_cap_mb=0.001
        )
        for step, name in enumerate(("a", "b", "c")):
            exchange(ddp, targets(SHAPES, dist.get_rank(), 2 * step))
            compressor.set_codec(OneBit(512), layers=name)
            assert_equal_on_all_ranks(exchange(ddp, targets(SHAPES, dist.get_rank(), 2 * step + 1)))


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_a_rank_that_sends_no_first_shot() -> None:
    """A change of one of several buckets ends the step on every rank; nothing counts as sent."""
    with without_races():
        ddp, compressor = distributed(
            Probe(SHAPES), OneBit(), ErrorFeedback(), exchange="two_shot", bucket_cap_mb=0.001
        )
        exchange(ddp, targets(SHAPES, dist.get_rank(), 0))
        before = copy.deepcopy(compressor.state_dict())
        if dist.get_rank() == 1:
            purpose = mock.Mock(side_effect=[ArithmeticError("on purpose")])
            with (
                mock.patch.object(CudaBatch, "encode", purpose),
                pytest.raises(ArithmeticError, match="on purpose"),
            ):
                exchange(ddp, targets(SHAPES, 1, 1))
        else:
            got = exchange(ddp, targets(SHAPES, 0, 1))
            assert any(one.isnan().any() for one in got.values())
            with pytest.raises(hvdc.PayloadError, match="payload: expected the header"):
                compressor.state_dict()
        after = compressor.state_dict()
        for name, tensor in before["tensors"].items():
            assert torch.equal(after["tensors"][name]["residual"], tensor["residual"])
        dist.barrier()


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_an_altered_payload_is_nan_now_and_an_error_in_the_next_step() -> None:
    with without_races():
        shapes = {"a": (3000,)}
        ddp, compressor = distributed(Probe(shapes), OneBit(), ErrorFeedback())
        exchange(ddp, targets(shapes, dist.get_rank(), 0))
        start = InStream.start

        def altered(self: InStream, collective: Collective) -> tuple[torch.Tensor, dist.Work]:
            rows, work = start(self, collective)
            work.wait()
            rows[1, 100] ^= 16
            return rows, work

        with mock.patch.object(InStream, "start", altered):
            got = exchange(ddp, targets(shapes, dist.get_rank(), 1))
        assert torch.isnan(got["a"]).all()
        with pytest.raises(hvdc.PayloadError, match=r"^a: rank 1's payload: expected"):
            exchange(ddp, targets(shapes, dist.get_rank(), 2))
        compressor.state_dict()


@on_ranks(2, launcher="torchrun", environment=DEVICE)
def test_a_rank_that_sends_no_averages_or_factors() -> None:
    """The others cannot see it before they decode: they have NaN, and then an error, and nobody waits."""
    cases: list[tuple[tuple[int, ...], Codec, str, Any, type[Exception], str]] = [
        ((3000,), OneBit(), "two_shot", (Batch, "average"), hvdc.PayloadError,
         "payload: expected the header that OneBit"),
        ((40, 70), PowerSGD(2), "low_rank", (low_rank, "orthonormal"), hvdc.ExchangeError,
         "a: expected the factors of all 2 ranks, got"),
    ]  # fmt: skip
    for shape, codec, by, failing, kind, message in cases:
        with without_races():
            shapes = {"a": shape}
            ddp, compressor = distributed(Probe(shapes), codec, ErrorFeedback(), exchange=by)
            exchange(ddp, targets(shapes, dist.get_rank(), 0))
            before = compressor.state_dict()["tensors"]["a"]["residual"].clone()
            if dist.get_rank() == 1:
                purpose = mock.Mock(side_effect=ArithmeticError("on purpose"))
                with (
                    mock.patch.object(*failing, purpose),
                    pytest.raises(ArithmeticError, match="on purpose"),
                ):
                    exchange(ddp, targets(shapes, 1, 1))
                dist.barrier()
                continue
            got = exchange(ddp, targets(shapes, 0, 1))
            assert torch.isnan(got["a"]).any()
            dist.barrier()
            with pytest.raises(kind, match=message):
                exchange(ddp, targets(shapes, 0, 2))
            assert torch.equal(compressor.state_dict()["tensors"]["a"]["residual"], before)


@on_ranks(1, launcher="torchrun", environment=DEVICE)
def test_one_rank() -> None:
    _as_on_the_cpu(
        *_contract("two_shot", results.every_form),
        *_contract("hierarchical", results.every_codec),
    )


@on_ranks(1, launcher="torchrun")
def test_backends_that_do_not_go_with_the_parameters() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    for_cpu, for_cuda = (dist.new_group([0], backend=f"{d}:gloo") for d in ("cpu", "cuda"))
    for group, device, needed in (
        (for_cpu, cuda, "cuda"),
        (for_cuda, cpu, "cpu"),
        (for_cuda, cuda, "cpu"),
    ):
        with pytest.raises(
            ValueError,
            match=rf"a backend for {needed} tensors, got gloo for .*: use init_process_group\(",
        ):
            collectives_of(group, device)
    assert type(collectives_of(None, cpu)) is Collectives
    assert type(collectives_of(None, cuda)) is ThroughHost


@on_ranks(1, launcher="torchrun")
def test_settings_are_compared_where_the_group_has_a_backend() -> None:
    for_cuda = dist.new_group([0], backend="cuda:gloo")
    places: list[torch.device] = []

    def noted(group: dist.ProcessGroup | None, device: torch.device) -> Collectives:
        places.append(device)
        return Collectives(None)

    with (
        mock.patch.object(transport, "collectives_of", noted),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
    ):
        for group in (None, for_cuda):
            transport.ProcessGroupTransport(group).compare({}, torch.device("cpu"))()
    assert places == [torch.device("cpu"), torch.device("cuda", 0)]


@on_ranks(1, launcher="torchrun")
def test_a_graph_that_is_captured() -> None:
    ddp, _ = distributed(Probe({"a": (3000,)}), OneBit(), ErrorFeedback())
    compressor = of_all_reduce.Compressor(OneBit(), threshold=0)
    with (
        mock.patch.object(torch.cuda, "is_initialized", lambda: True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
    ):
        for step in (
            lambda: exchange(ddp, targets({"a": (3000,)}, 0, 0)),
            lambda: of_all_reduce.all_reduce(torch.ones(3000), compressor, key="a"),
        ):
            with pytest.raises(hvdc.ExchangeError, match="the capture of a CUDA graph"):
                step()


@on_ranks(1, launcher="torchrun")
def test_a_model_that_was_moved() -> None:
    ddp, compressor = distributed(Probe({"a": (3000,)}), OneBit(), ErrorFeedback())
    compressor._packer._device = torch.device("cuda", 0)
    with pytest.raises(hvdc.ExchangeError, match="a: expected a gradient on cuda:0, as when the c"):
        exchange(ddp, targets({"a": (3000,)}, 0, 0))
