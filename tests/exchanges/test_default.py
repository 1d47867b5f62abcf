"""The exchange that ``exchange="auto"`` stands for sends the fewest bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvd_compress.codecs import BF16, ECQ, FP16, QSGD, Codec, Int8, OneBit, Ternary
from hvd_compress.exchanges.default import exchange_for
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.registry import EXCHANGES
from hvd_compress.exchanges.routing import DEFAULT_THRESHOLD, Route, Router, route_of
from hvd_compress.exchanges.steps import Gradient, all_reduce
from hvd_compress.planner.choices import allowed

CODECS: list[Codec] = [
    OneBit(),
    OneBit("column"),
    Int8(),
    Ternary(),
    ECQ(),
    QSGD(),
    BF16(),
    Ternary(coding="entropy"),
    ECQ(bucket=4096, coding="entropy"),
]
SHAPES = [(DEFAULT_THRESHOLD,), (40, 70), (3000,), (64, 3, 7, 7), (1000, 4096), (9216, 4096)]


def _sent(exchange: str, codec: Codec, shape: tuple[int, ...], ranks: int) -> float:
    gradient = Gradient(shape, codec, 4, Hosts(ranks, 1))
    return sum(message.sent(ranks) for _, message in EXCHANGES[exchange].sends(gradient))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_it_sends_the_fewest_bytes(codec: Codec) -> None:
    """By the messages of the two exchanges, whatever the codec and the size of a tensor."""
    for shape in SHAPES:
        for ranks in (2, 3, 4, 5, 8, 32, 1000):
            chosen, _ = exchange_for(ranks)
            other = {"allgather": "two_shot", "two_shot": "allgather"}[chosen]
            sent = [_sent(one, codec, shape, ranks) for one in (chosen, other)]
            assert sent[0] <= sent[1], (shape, ranks, chosen)


def test_lengths_that_vary_are_rounded_up() -> None:
    """So that of two ranks, an allgather may send a few bytes more than two shots."""
    codec, shape = ECQ(coding="entropy"), (64, 3, 7, 7)
    gathered, shared = (_sent(one, codec, shape, 2) for one in ("allgather", "two_shot"))
    assert shared < gathered < 1.02 * shared


def test_int8_sends_less_than_fp16_whatever_the_number_of_ranks() -> None:
    for ranks in (2, 3, 4, 8, 32, 1000):
        fp16 = all_reduce(9216 * 4096, 2).sent(ranks)
        assert _sent(exchange_for(ranks)[0], Int8(), (9216, 4096), ranks) < 0.51 * fp16


def test_a_route_follows_the_number_of_ranks() -> None:
    auto = route_of("onebit", "auto", "test")
    expected = [(1, "allgather", "auto, 1 rank"), (2, "allgather", "auto, 2 ranks")]
    expected += [(n, "two_shot", f"auto, {n} ranks") for n in (3, 4, 1000)]
    route = auto
    for ranks, exchange, reason in expected:
        for one in (auto, route):  # From the setting, and from another number of ranks.
            route = one.among(ranks)
            assert (route.exchange, route.reason) == (exchange, reason)
            assert route == Route(OneBit(), exchange=exchange)
            assert str(route).endswith(f" through {exchange} ({reason})")
    assert replace(route, exchange="allgather").among(4).exchange == "allgather"
    named = Route(OneBit(), exchange="allgather")
    assert named.among(4) is named and not named.reason
    unknown = auto.among(4, divisible=False)
    assert (unknown.exchange, unknown.reason) == ("allgather", "auto, 4 ranks, unknown shape")
    assert str(route_of(FP16(), "auto", "test").among(4)) == str(FP16())


def test_layers_follow_it_too() -> None:
    """Also a route that says so where the others are named; uncompressed ones have no exchange."""
    router = Router(
        Route(OneBit(), exchange="integer_sum"), 0, layers={"a": Route(Int8(), exchange="auto")}
    )
    assert router.choose("a", (10,), "float32").among(3).exchange == "two_shot"
    assert router.choose("b", (10,), "float32").among(3).exchange == "integer_sum"


def test_the_planner_takes_exchanges_by_name() -> None:
    with pytest.raises(ValueError, match=r"Auto\.exchanges: expected one of 'all.* got 'auto'"):
        allowed(["int8"], ["auto"])
    with pytest.raises(ValueError, match=r"Auto\.codecs\.exchange: expected .* got 'auto'"):
        allowed([Route(Int8(), exchange="auto")], ["allgather"])
