"""A step of a whole network: what overlaps, and what travels together."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.predict.layers import Layer, Network, network_of
from benchmarks.predict.step import Computation, LayerTime, StepTime, predict, tensors_of
from hvd_compress.codecs import Codec, NoCompression, OneBit, Ternary
from hvd_compress.codecs.feedback import OFF
from hvd_compress.exchanges.routing import UNCOMPRESSED_ROUTE, Route, Router
from hvd_compress.planner.cost import seconds, wire_bytes
from hvd_compress.planner.machines import Cluster, CodecSpeed, Link
from hvd_compress.ranks.counters import Counters
from tests.planner.strategies import CLUSTERS, ROUTES, SPEEDS, TRIES, route_of

FREE = Link(math.inf)
SIZES = st.lists(st.integers(1, 2_000_000), min_size=1, max_size=6)
TIMES = st.floats(0, 0.1)


def network(sizes: list[int]) -> Network:
    """One parameter a layer."""
    return Network(
        "net", tuple(Layer(f"l{i}", {f"l{i}.weight": (n,)}, n) for i, n in enumerate(sizes))
    )


def computation(sizes: list[int], forward: float = 0.01, backward: float = 0.02) -> Computation:
    return Computation(tuple(LayerTime(forward, backward) for _ in sizes), optimizer=0.005)


def predicted(
    sizes: list[int],
    route: Route,
    cluster: Cluster,
    speed: CodecSpeed = CodecSpeed(),  # noqa: B008
    backward: float = 0.02,
    **options: bool,
) -> StepTime:
    return predict(
        network(sizes),
        computation(sizes, backward=backward),
        Router(route),
        lambda _: speed,
        cluster,
        **options,
    )


@TRIES
@given(SIZES, ROUTES, SPEEDS, CLUSTERS, TIMES)
def test_a_step_is_no_shorter_than_any_of_its_parts(
    sizes: list[int], route: Route, speed: CodecSpeed, cluster: Cluster, backward: float
) -> None:
    step = predicted(sizes, route, cluster, speed, backward)
    waiting = predicted(sizes, route, cluster, speed, backward, overlap=False)
    everything = step.computation + step.exchange.total
    assert step.computation <= step.seconds * (1 + 1e-9)
    assert step.exchange.wire <= step.seconds * (1 + 1e-9)
    assert step.seconds <= everything * (1 + 1e-9)
    # Fused or not, the same bytes; later, never sooner.
    assert math.isclose(step.exchange.sent, waiting.exchange.sent)
    assert waiting.seconds <= waiting.computation + waiting.exchange.total + (1e-9)


def test_one_tensor_after_the_backward_pass_is_the_model_of_one_tensor() -> None:
    speed, cluster = CodecSpeed(3e-9, 2e-9, 1e-9), Cluster(4, 2, Link(1e8, 1e-4), Link(1e9), 1e-3)
    for exchange in ("allgather", "two_shot", "hierarchical"):
        route = route_of(OneBit(), exchange)
        step = predicted([500_000], route, cluster, speed)
        cost = seconds((500_000,), route, speed, cluster)
        # Its token travels meanwhile, or behind it on the same wire.
        assert 0 <= step.exposed - cost.total < 2e-3 + 14 * 1e-4


def test_bytes_are_those_that_horovods_ranks_counted() -> None:
    """AlexNet on two ranks: what ``benchmarks.train`` wrote for wire_bytes_per_step."""
    alexnet = network_of(str(Path(__file__).parent.parent.parent / "docs/examples/alexnet.json"))
    times = Computation(tuple(LayerTime(0, 0) for _ in alexnet.layers))
    for route, counted in (
        (Route(NoCompression(), OFF), 244_403_360),
        (route_of(OneBit(), "allgather"), 8_123_736),
    ):
        step = predict(
            alexnet, times, Router(route), lambda _: CodecSpeed(), Cluster(2, 1, Link(1e8))
        )
        assert step.exchange.sent == counted


def test_no_parameter_of_a_layer_is_left_out(tmp_path: Path) -> None:
    """A layer may have more than a weight and a bias, as ``torch.nn.LSTM`` has."""
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    path = tmp_path / "lstm.json"
    path.write_text(json.dumps({"head": [9], **{f"lstm.{name}": [400, 100] for name in names}}))
    lstm, cluster = network_of(str(path)), Cluster(2, 1, Link(1e8))
    times = Computation((LayerTime(0, 0),) * 2)
    step = predict(lstm, times, Router(UNCOMPRESSED_ROUTE), lambda _: CodecSpeed(), cluster)
    assert step.exchange.sent == 4 * lstm.elements == 4 * (4 * 400 * 100 + 9)
    tensors = tensors_of(lstm, Router(UNCOMPRESSED_ROUTE))
    assert [t.name for layer in tensors for t in layer] == ["head", *(f"lstm.{n}" for n in names)]


def test_bytes_are_those_of_all_tensors_and_tokens() -> None:
    sizes, cluster = [5_000, 2_000_000, 100, 70_000], Cluster(3, 2, Link(1e8), Link(1e9))
    for exchange in ("allgather", "two_shot", "hierarchical"):
        router = Router(route_of(OneBit(), exchange))
        tensors = [tensor for layer in tensors_of(network(sizes), router) for tensor in layer]
        tokens = Counters()
        tokens.add_allreduce(6, 12 * sum(not tensor.route.uncompressed for tensor in tensors))
        expected = sum(wire_bytes(t.shape, t.route, cluster) for t in tensors) + tokens.wire_bytes
        step = predicted(sizes, route_of(OneBit(), exchange), cluster)
        assert math.isclose(step.exchange.sent, expected)


def test_the_first_gradients_hide_behind_the_backward_pass() -> None:
    """Two tensors take as long as a layer's backward pass each; the last layer's is hidden."""
    count, link = 250_000, Link(1e8)
    each = seconds((count,), Route(NoCompression(), OFF), CodecSpeed(), Cluster(2, 1, link)).wire
    step = predicted([count] * 2, Route(NoCompression(), OFF), Cluster(2, 1, link), backward=each)
    assert math.isclose(step.exchange.wire, 2 * each)
    assert math.isclose(step.exposed, each)
    waiting = predicted(
        [count] * 2, Route(NoCompression(), OFF), Cluster(2, 1, link), backward=each, overlap=False
    )
    assert math.isclose(waiting.exposed, 2 * each)


def test_what_waits_is_fused_and_pays_latency_once() -> None:
    """All gradients there at once: one message, but for what is above the fusion threshold."""
    cluster = Cluster(2, 1, Link(math.inf, 1e-3))
    dense = Route(NoCompression(), OFF)
    message = 2 * 1e-3
    small = predicted([10_000] * 5, dense, cluster, backward=0.0, overlap=False)
    assert math.isclose(small.exchange.wire, message)
    large = predicted([12_000_000] * 3, dense, cluster, backward=0.0, overlap=False)
    assert math.isclose(large.exchange.wire, 3 * message)


@pytest.mark.parametrize(
    ("exchange", "codec", "rounds", "tokens"),
    (
        ("allgather", OneBit(), 1, 2),
        ("two_shot", OneBit(), 2 + 1, 2),
        ("hierarchical", OneBit(), 1, 2),  # One rank a host: only the gather between hosts is left.
        ("integer_sum", Ternary(), 2 + 2, 0),  # Horovod sends them along with the norms.
    ),
)
def test_gradients_travel_in_the_buckets_of_training(
    exchange: str, codec: Codec, rounds: int, tokens: int
) -> None:
    """Twenty small gradients make one message a stage, however far apart they are ready."""
    cluster = Cluster(2, 1, Link(math.inf, 1e-3))
    route = route_of(codec, exchange)
    together = predicted([50_000] * 20, route, cluster, backward=1.0)
    assert math.isclose(together.exchange.wire, (rounds + tokens) * 1e-3)
    apart = predicted([2**20] * 20, route, cluster, backward=1.0)
    assert math.isclose(apart.exchange.wire, (20 * rounds + tokens) * 1e-3)
