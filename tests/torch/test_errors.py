"""Ranks that differ, operations that cannot work: an error on every rank that says so, and no hang."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from unittest import mock

import horovod.torch as hvd
import pytest
import torch

import hvd_compress.ddp
import hvd_compress.torch as hvdc
from hvd_compress import ErrorFeedback, Route
from hvd_compress.codecs import Int8, OneBit
from hvd_compress.ranks import names
from tests import jobs
from tests.again import initialize_again
from tests.ranks import on_ranks
from tests.torch.probes import assert_identical_on_all_ranks, distributed, exchange, watch
from tests.torch_models import Probe, assert_same_bits, targets, two_valued

SHAPES = {"a": (40, 70), "b": (3000,), "small": (10,)}


def _raises_in_first_step(
    make: Callable[[Probe], hvdc.Compressor],
    error: type[Exception],
    message: str,
    shapes: dict | None = None,
    **options: object,
) -> None:
    shapes = SHAPES if shapes is None else shapes
    model = Probe(shapes)
    optimizer = distributed(model, make(model), **options)
    with pytest.raises(error, match=message):
        exchange(model, optimizer, targets(shapes, hvd.rank(), 0))


@on_ranks(2, alone=True)
def test_another_shape() -> None:
    shapes = {**SHAPES, "a": (40, 70) if hvd.rank() == 0 else (70, 40)}
    _raises_in_first_step(
        lambda m: hvdc.OneBit(m.named_parameters(), threshold=0),
        hvdc.ExchangeError,
        r"gradient of a: float32 \[40, 70\].* on rank 0, float32 \[70, 40\].* on rank 1",
        shapes,
    )


@on_ranks(2, alone=True)
def test_a_rank_that_was_replaced_without_its_state() -> None:
    """The others have long agreed; the new one asks them to compare."""
    model = Probe(SHAPES)
    optimizer = distributed(model, hvdc.OneBit(model, threshold=0))
    for step in range(2):
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), step))
    if hvd.rank() == 1:
        names.count_from({})  # A new process has made none.
        optimizer._compression = hvdc.OneBit(model, threshold=0)
    with pytest.raises(hvdc.ExchangeError, match=r"step 2 on rank 0, .*step 0 on rank 1"):
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), 2))


@on_ranks(2, alone=True)
def test_a_place_that_is_taken_anew_in_the_middle_of_a_step() -> None:
    model = Probe(SHAPES)
    compressor = hvdc.OneBit(model, threshold=0)
    optimizer = distributed(model, compressor)
    gradients = targets(SHAPES, hvd.rank(), 0)
    exchange(model, optimizer, gradients)
    model(gradients).backward()
    compressor.rebind()
    with pytest.raises(hvdc.ExchangeError, match=r"before rebind\(\), which has forgotten it"):
        optimizer.synchronize()


@on_ranks(3, alone=True)
def test_horovod_initialized_again_with_fewer_ranks() -> None:
    """An error as long as the compressor does not know; then it goes on, with its part in the average."""
    model = Probe(SHAPES)
    compressor = hvdc.OneBit(model, threshold=100)
    optimizer = distributed(model, compressor)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))
    unsent = compressor.residual_norm()
    rank = hvd.rank()
    if not initialize_again(hvd, 2):
        return
    before = compressor.counters.message_bytes
    with pytest.raises(
        hvdc.ExchangeError,
        match=rf"expected rank {rank} of 3 with 3 on this host.*got rank {rank} of 2 .*rebind\(\)",
    ):
        exchange(model, optimizer, targets(SHAPES, rank, 1))
    assert compressor.counters.message_bytes == before
    optimizer.load_state_dict(optimizer.state_dict())  # Horovod's own way to forget a step.
    compressor.rebind()
    assert math.isclose(compressor.residual_norm(), unsent * 2 / 3, rel_tol=1e-6)
    compressor.reset_counters()
    for step in range(1, 3):
        exchange(model, optimizer, targets(SHAPES, rank, step))
    assert_identical_on_all_ranks(model)
    assert compressor.counters.message_bytes < 0.1 * compressor.counters.uncompressed_bytes


@on_ranks(2, alone=True)
def test_minimum() -> None:
    _raises_in_first_step(
        lambda m: hvdc.OneBit(m.named_parameters(), threshold=0),
        hvdc.ExchangeError,
        "expected op=Average or op=Sum.*Min, Max, Product or Adasum",
        op=hvd.Min,
    )


@on_ranks(2, alone=True)
def test_adasum() -> None:
    _raises_in_first_step(
        lambda m: hvdc.OneBit(m.named_parameters(), threshold=0),
        ValueError,
        "expected a gradient, got a parameter: op=Adasum",
        op=hvd.Adasum,
    )


@on_ranks(3, alone=True, environment={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_the_optimizers_process_set_is_not_the_compressors() -> None:
    from hvd_compress.torch import step

    step._TIMEOUT_OF_SOME = step._TIMEOUT_IN_BACKWARD = 2.0
    step._TIMEOUT = 1e6  # Is not needed: the token tells.
    members = hvd.add_process_set([0, 2])
    if hvd.rank() == 1:
        hvd.barrier(process_set=hvd.add_process_set([1]))
        with pytest.raises(Exception, match="shut down"):
            hvd.allreduce(torch.zeros(1), name="waits until the others have gone")
        return
    hvd.add_process_set([1])
    _raises_in_first_step(
        lambda m: hvdc.OneBit(m.named_parameters(), threshold=0),
        hvdc.ExchangeError,
        "expected all 3 ranks of the compressor's process set",
        process_set=members,
    )
    hvd.barrier(process_set=members)
    raise jobs.Leave


@on_ranks(2)
def test_a_pause_in_the_first_backward_pass() -> None:
    """A rank that compiles, or is debugged, is waited for as long as Horovod waits; the log tells."""
    from hvd_compress.torch import step

    model, lines = Probe(SHAPES), []
    compressor = hvdc.OneBit(model, threshold=0)
    optimizer = distributed(model, compressor)

    def pause(_: torch.Tensor) -> None:
        # At the end of the backward pass, but before the compressor comes to that.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: time.sleep(3))

    loss = model(targets(SHAPES, hvd.rank(), 0))
    if hvd.rank() == 1:
        loss.register_hook(pause)
    limits = {"_TIMEOUT": 1.0, "_TIMEOUT_IN_BACKWARD": 0.1, "_REPORTED": 0.2}
    with (
        mock.patch.multiple(step, **limits),
        mock.patch.object(step._log, "warning", lambda *line: lines.append(line)),
    ):
        loss.backward()
        optimizer.step()
    assert_identical_on_all_ranks(model)
    assert hvd.rank() == 1 or lines


@on_ranks(2)
def test_gradients_of_another_model() -> None:
    model, other = Probe(SHAPES), Probe(SHAPES)
    compressor = hvdc.OneBit(model.named_parameters(), threshold=0)
    with pytest.raises(ValueError, match="gradient of a parameter that this compressor was made"):
        compressor.compress(torch.ones_like(other.a))
    with pytest.raises(ValueError, match="op=Adasum"):
        compressor.compress(model.a)


@on_ranks(2, alone=True)
def test_an_altered_payload() -> None:
    model = Probe(SHAPES)
    compressor = hvdc.OneBit(model.named_parameters(), threshold=100)
    optimizer = distributed(model, compressor)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))

    def flip_a_bit(name: str, rows: torch.Tensor) -> None:
        rows[1, 40] ^= 16

    watch(compressor, result=flip_a_bit)
    with pytest.raises(hvdc.PayloadError, match="rank 1's payload: expected checksum"):
        exchange(model, optimizer, targets(SHAPES, hvd.rank(), 1))


@on_ranks(3)
def test_join_before_ranks_have_agreed_again() -> None:
    """A rank runs out of data; the others, which all change the codec, go on as with plain Horovod."""
    model, plain = Probe(SHAPES), Probe(SHAPES)
    # Quantized once, so that two values are sent exactly.
    compressor = hvdc.OneBit(model.named_parameters(), threshold=100, exchange="allgather")
    ours = distributed(model, compressor)
    stock = distributed(plain, hvd.Compression.none)
    next_epoch: list[list[dict[str, torch.Tensor]]] = []
    for m, o in ((plain, stock), (model, ours)):
        for step in range(2 if hvd.rank() == 1 else 4):
            exchange(m, o, two_valued(SHAPES, hvd.rank(), step))
            if m is model and step == 1:
                compressor.set_codec(OneBit(512))
        hvd.join()
        next_epoch.append(
            [exchange(m, o, two_valued(SHAPES, hvd.rank(), step)) for step in range(4, 7)]
        )
    for expected, got in zip(*next_epoch, strict=True):
        assert_same_bits(got, expected)
    parameters = [{n: p.detach() for n, p in m.named_parameters()} for m in (model, plain)]
    if hvd.rank() != 1:
        assert_same_bits(*parameters)
    assert compressor.residual_norm() == 0  # Two-valued gradients leave no residual.


@on_ranks(1)
def test_wrong_arguments_fail_at_construction() -> None:
    parameters = list(Probe(SHAPES).named_parameters())
    double = [("d", torch.nn.Parameter(torch.zeros(5000, dtype=torch.float64)))]
    wrong: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "expected pairs", lambda: hvdc.OneBit(parameters[0][1])),
        (TypeError, "expected pairs", lambda: hvdc.OneBit([p for _, p in parameters])),
        (
            ValueError,
            r"weight: expected a parameter with memory, .* call model\.to_empty\(\)",
            lambda: hvdc.OneBit(torch.nn.Linear(9, 9, device="meta")),
        ),
        (ValueError, "got none", lambda: hvdc.OneBit(iter(()))),
        (ValueError, "distinct names", lambda: hvdc.OneBit(parameters + parameters[:1])),
        (TypeError, "unexpected keyword", lambda: hvdc.OneBit(parameters, levels=4)),
        (ValueError, "alpha", lambda: hvdc.OneBit(parameters, feedback=ErrorFeedback(1.5))),
        (TypeError, "warmup_steps", lambda: hvdc.OneBit(parameters, warmup_steps=1.0)),
        (ValueError, "seed", lambda: hvdc.OneBit(parameters, seed=2**32)),
        (ValueError, "threads", lambda: hvdc.OneBit(parameters, threads=0)),
        (TypeError, "GradScaler", lambda: hvdc.OneBit(parameters, grad_scaler=2.0)),
        (ValueError, "expected one of", lambda: hvdc.Compressor(parameters, "zip")),
        (
            hvdc.ExchangeError,
            "registered process set",
            lambda: hvdc.OneBit(parameters, process_set=hvd.ProcessSet([0])),
        ),
    ]
    for error, message, call in wrong:
        with pytest.raises(error, match=message):
            call()
    hvdc.OneBit(double, exclude=["d"])
    hvdc.OneBit(parameters, layers={"a": "int8", "b": Int8("linear"), "small": None})


def test_a_compressor_needs_horovod_to_be_initialized() -> None:
    with pytest.raises(hvdc.ExchangeError, match=re.escape("expected hvd.init()")):
        hvdc.OneBit(Probe(SHAPES).named_parameters())


@on_ranks(1)
def test_compressors_are_compared_by_identity() -> None:
    parameters = list(Probe(SHAPES).named_parameters())
    one, other = hvdc.OneBit(parameters), hvdc.OneBit(parameters)
    assert one != other
    assert len({one, other}) == 2


@on_ranks(1, environment={"HOROVOD_ELASTIC": "1"})
def test_a_second_gradient_before_the_first_has_come_back() -> None:
    model = Probe(SHAPES)
    compressor = hvdc.OneBit(model.named_parameters(), threshold=0)
    model(targets(SHAPES, 0, 0)).backward()
    token, context = compressor.compress(model.a.grad)
    with pytest.raises(hvdc.ExchangeError, match="a: expected its last gradient"):
        compressor.compress(model.a.grad)
    reduced = hvd.allreduce(token, name="token")
    assert torch.equal(compressor.decompress(reduced, context), model.a.grad)
    assert compressor.routes()["a"].codec == OneBit()


@on_ranks(2, alone=True)
def test_what_is_no_compressor() -> None:
    """A codec, a route, a compressor of another frontend, or the class of one of them."""
    model = Probe(SHAPES)
    of_ddp = hvd_compress.ddp.Compressor(model, Int8())
    for given, got in (
        (Int8(), "the codec Int8: write compression=hvdc.Compressor\\(model, Int8\\(\\)\\)"),
        (Int8, "the codec Int8"),
        (Route(Int8()), "a Route"),
        (of_ddp, "one of hvd_compress.ddp.compressor"),
        (type(of_ddp), "one of hvd_compress.ddp.compressor"),
    ):
        _raises_in_first_step(
            lambda _, given=given: given,  # type: ignore[misc]
            TypeError,
            f"compression: expected a compressor of Horovod's frontends, got {got}",
        )
