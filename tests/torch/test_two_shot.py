"""The two-shot exchange on real ranks, against all ranks simulated by the reference."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

import hvd_compress.torch as hvdc
from hvd_compress import Route
from hvd_compress.codecs import (
    Codec,
    ErrorFeedback,
    OneBit,
)
from hvd_compress.exchanges import buckets
from tests.ranks import on_ranks
from tests.torch.probes import (
    assert_identical_on_all_ranks,
    distributed,
    exchange,
    watch,
)
from tests.torch_models import Probe, Simulation, assert_same_bits, targets

SHAPES = {"a": (40, 170), "b": (3000,), "c": (8, 3, 5, 5), "tiny": (3,), "scalar": ()}
"""7, 3 and 1 grains: uneven shards, ranks without a part, and tensors smaller than the number of ranks."""

DEFAULT_LIMIT = buckets.LIMIT


def _start(
    codec: Codec = OneBit(),  # noqa: B008
    feedback: ErrorFeedback = ErrorFeedback(),  # noqa: B008
    **options: Any,
) -> tuple[Probe, hvdc.Compressor]:
    model = Probe(SHAPES)
    compressor = hvdc.Compressor(
        model.named_parameters(),
        Route(codec, feedback),
        exchange="two_shot",
        threshold=0,
        **options,
    )
    return model, compressor


def _buckets_of(elements: int) -> None:
    """Sets the number of elements in a bucket, for compressors whose first step is still to come."""
    buckets.LIMIT = elements


@on_ranks(3)
def test_buckets_of_any_size_give_the_same_bits() -> None:
    for elements, messages in ((0, 5), (1000, 3), (5000, 2), (DEFAULT_LIMIT, 1)):
        _buckets_of(elements)
        model, compressor = _start()
        optimizer = distributed(model, compressor)
        simulation = Simulation("two_shot", OneBit(), ErrorFeedback(), SHAPES, hvd.size())
        sent: list[str] = []
        watch(compressor, started=sent.append)
        names = list(SHAPES)
        for step in range(3):
            gradients = [targets(SHAPES, r, step) for r in range(hvd.size())]
            turn = (step + hvd.rank()) % len(names)
            order = names[turn:] + names[:turn]
            got = exchange(model, optimizer, gradients[hvd.rank()], order)
            assert_same_bits(got, simulation.average(gradients))
        assert len(sent) == 6 * messages and len(set(sent)) == 2 * messages, (elements, sent)
    _buckets_of(DEFAULT_LIMIT)


@on_ranks(2)
def test_a_bucket_some_of_whose_tensors_are_frozen() -> None:
    model, compressor = _start()
    model.b.requires_grad_(False)
    optimizer = distributed(model, compressor)
    trained = {name: shape for name, shape in SHAPES.items() if name != "b"}
    simulation = Simulation("two_shot", OneBit(), ErrorFeedback(), SHAPES, hvd.size())
    for step in range(3):
        gradients = [targets(SHAPES, r, step) for r in range(hvd.size())]
        got = exchange(model, optimizer, gradients[hvd.rank()])
        expected = simulation.average(gradients)
        assert_same_bits(got, {name: expected[name] for name in trained})


class _Wait(torch.autograd.Function):
    """A function whose backward pass calls another one, which waits and returns whether it was in time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wait: Callable[[], bool]) -> torch.Tensor:
        ctx.wait = wait
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert ctx.wait(), "not as long as the backward pass runs"
        return gradient, None


@on_ranks(2)
def test_the_second_shot_starts_while_the_backward_pass_still_runs() -> None:
    _buckets_of(0)
    model, compressor = _start()
    optimizer = distributed(model, compressor)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))  # The ranks agree.
    _buckets_of(DEFAULT_LIMIT)
    threads: dict[str, str] = {}
    stages = {
        f"bucket {len(SHAPES) - 1 - list(SHAPES).index(name)}, stage 1" for name in ("a", "b")
    }
    begun = threading.Event()

    def note(name: str) -> None:
        if name in stages:
            threads[name] = threading.current_thread().name
            if len(threads) == len(stages):
                begun.set()

    def known() -> bool:
        """The next hook sends, if the ranks are known to take part."""
        check = compressor._ranks.step._participation._checking
        return check is None or check.done(60.0)

    watch(compressor, started=note)
    gradients = targets(SHAPES, hvd.rank(), 1)
    loss = (model.c * gradients["c"]).sum()
    # Backwards: a, then b, then c.
    for name, wait in (("b", lambda: begun.wait(60)), ("a", known)):
        loss = _Wait.apply(loss, wait) + (getattr(model, name) * gradients[name]).sum()
    optimizer.zero_grad()
    loss.backward()
    assert list(threads.values()) == 2 * ["hvd_compress progress"]
    optimizer.step()
    assert_identical_on_all_ranks(model)


@on_ranks(2)
def test_the_helper_sleeps() -> None:
    model, compressor = _start()
    optimizer = distributed(model, compressor)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))
    helpers = [t for t in threading.enumerate() if t.name == "hvd_compress progress"]
    clock = time.pthread_getcpuclockid(helpers[-1].ident)

    def used() -> float:
        return time.clock_gettime(clock)

    limit = time.monotonic() + 60
    before = -1.0
    while used() > before:  # It does not wait yet.
        assert time.monotonic() < limit
        before = used()
        time.sleep(0.2)
    time.sleep(0.5)
    assert used() - before < 1e-3, "nothing is on its way"
    hvd.barrier()
    if hvd.rank() == 1:
        time.sleep(1.0)
    before = used()
    model(targets(SHAPES, hvd.rank(), 1)).backward()
    if hvd.rank() == 0:
        time.sleep(0.9)
        assert used() - before < 0.2
    optimizer.step()
