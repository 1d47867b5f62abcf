"""Other methods, beside what their papers define, computed by hand."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.papers.native import Native
from benchmarks.papers.training import Compression
from benchmarks.rivals import signum
from benchmarks.rivals.ef21 import EF21, Estimate
from benchmarks.rivals.momentum import Momentum
from hvd_compress.codecs import NoiseKey, TopK
from hvd_compress.exchanges.reference import Simulation
from tests.codecs.cases import normal

WORKERS, SHAPE = 3, (5, 40)


def gradients(step: int, workers: int = WORKERS) -> torch.Tensor:
    """Shape=(workers, 5, 40), with some zeros."""
    drawn = normal((workers * 200,), seed=step).reshape(workers, *SHAPE)
    drawn[:, 0, :7] = 0
    return torch.from_numpy(drawn)


def simulation(compression: Compression, **options: object) -> Simulation:
    assert compression.codec is not None
    given = {"feedback": compression.feedback, "arithmetic": Native(), **options}
    feedback = given.pop("feedback")
    return Simulation(
        compression.exchange, compression.codec, feedback, {"w": SHAPE}, WORKERS, **given
    )


def send(ranks: Simulation, of_workers: torch.Tensor) -> np.ndarray:
    return ranks.average([{"w": one.numpy()} for one in of_workers])["w"]


def test_momentum_of_workers_is_torchs() -> None:
    momentum, weights = Momentum(0.9), torch.zeros(WORKERS, *SHAPE, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=1.0, momentum=0.9)
    total = torch.zeros(WORKERS, *SHAPE)
    for step in range(4):
        g = gradients(step)
        weights.grad = g.clone()
        optimizer.step()
        total += momentum({"w": g}, step)["w"]
    torch.testing.assert_close(-weights.detach(), total)


def test_a_vote_is_the_sign_of_the_sum_of_the_signs_of_momenta() -> None:
    ranks = simulation(Compression.parse(signum.SENT), owner_step=signum.vote())
    signs, velocity = signum.Signs(0.9), np.zeros((WORKERS, *SHAPE), np.float32)
    for step in range(3):
        g = gradients(step)
        velocity = np.float32(0.9) * velocity + g.numpy()
        found = send(ranks, signs({"w": g}, step)["w"])
        np.testing.assert_array_equal(found, np.sign(np.where(velocity < 0, -1, 1).sum(0)))


def test_signum_without_compression_takes_the_signs_of_the_average() -> None:
    found = signum.signs_of_average({"w": torch.tensor([0.3, -0.1, 0.0])})
    assert found["w"].tolist() == [1.0, -1.0, 0.0]


def test_a_coin_decides_a_tie() -> None:
    decide, average = signum.vote(1), np.zeros(1000, np.float32)
    average[:100], average[100:200] = 0.2, -0.2
    decide(average, {})
    assert (average[:100] == 1).all() and (average[100:200] == -1).all()
    assert set(average[200:].tolist()) == {-1.0, 1.0} and abs(average[200:].mean()) < 0.2


def test_ef21_sends_how_gradients_differ_from_estimates() -> None:
    codec = TopK(64, 8, 32)
    compression = Compression(codec, EF21(), "allgather")
    ranks, receive = simulation(compression), Estimate()
    h = np.zeros((WORKERS, 200), np.float32)
    for step in range(4):
        g = gradients(step)
        found = receive({"w": torch.from_numpy(send(ranks, g))})["w"]
        for worker, own in enumerate(g.numpy().reshape(WORKERS, 200)):
            codes = codec.quantize(own - h[worker], SHAPE, NoiseKey())
            h[worker] += codec.dequantize(*codes, SHAPE)
        np.testing.assert_allclose(found.numpy().reshape(-1), h.mean(0), rtol=1e-5, atol=1e-6)
    assert np.abs(found.numpy() - g.numpy().mean(0)).max() > 0.1, "not all was sent"


def test_ef21_reaches_gradients_that_stay() -> None:
    ranks, receive, g = (
        simulation(Compression(TopK(64, 16, 32), EF21(), "allgather")),
        Estimate(),
        gradients(0),
    )
    for _ in range(6):
        found = receive({"w": torch.from_numpy(send(ranks, g))})["w"]
    torch.testing.assert_close(found, g.mean(0), rtol=1e-5, atol=1e-6)


def test_ef21_keeps_its_estimate_where_a_number_is_not_finite() -> None:
    rule = EF21()
    h, sent = np.array([1.0, 2.0], np.float32), np.array([np.nan, 0.5], np.float32)
    kept = rule.carry(h, h, sent, NoiseKey())
    np.testing.assert_array_equal(kept, np.array([1.0, 2.5], np.float32))
