"""Every codec through a stock DistributedOptimizer, against all ranks simulated by the oracle."""

from __future__ import annotations

import horovod.torch as hvd
import torch

import hvd_compress.torch as hvdc
from hvd_compress.codecs import (
    BF16,
    ECQ,
    Codec,
    ErrorFeedback,
    Int8,
    OneBit,
    Ternary,
)
from hvd_compress.torch.collectives import Collectives
from tests.ranks import on_ranks
from tests.torch.probes import (
    Probe,
    Simulation,
    assert_identical_on_all_ranks,
    assert_same_bits,
    distributed,
    exchange,
    process_set,
    targets,
    two_valued,
)

SHAPES = {"a": (40, 70), "b": (3000,), "c": (8, 3, 5, 5)}
NONE = ErrorFeedback(alpha=0.0)
ROWS: list[tuple[Codec, ErrorFeedback]] = [
    (OneBit(), ErrorFeedback()),
    (OneBit(), NONE),
    (OneBit("column"), ErrorFeedback()),
    (OneBit("tensor"), ErrorFeedback()),
    (Int8(), NONE),
    (Int8("linear"), ErrorFeedback()),
    (Ternary(), NONE),
    (ECQ(), ErrorFeedback(0.01, 1.0)),
    (ECQ(), NONE),
    (BF16(), NONE),
]


def _every_codec_matches_the_simulation() -> None:
    rank, size = hvd.rank(), hvd.size()
    for codec, feedback in ROWS:
        model = Probe(SHAPES)
        compressor = hvdc.Compressor(model.named_parameters(), codec, feedback, threshold=0, seed=7)
        optimizer = distributed(model, compressor)
        simulation = Simulation(codec, feedback, SHAPES, size, seed=7)
        for step in range(3):
            gradients = [targets(SHAPES, r, step) for r in range(size)]
            got = exchange(model, optimizer, gradients[rank])
            assert_same_bits(got, simulation.average(gradients))
        if feedback.enabled:
            state = compressor.state_dict()["tensors"]
            residuals = {name: state[name]["residual"] for name in SHAPES}
            expected = {n: torch.from_numpy(h) for n, h in simulation.residuals[rank].items()}
            assert_same_bits(residuals, expected)
        assert_identical_on_all_ranks(model)


@on_ranks(2)
def test_every_codec_on_two_ranks() -> None:
    _every_codec_matches_the_simulation()


@on_ranks(3)
def test_every_codec_on_three_ranks() -> None:
    _every_codec_matches_the_simulation()


@on_ranks(2)
def test_long_messages_between_two_ranks() -> None:
    """They are gathered as a sum, which must not show."""
    shapes = {"long": (2**19 + 7,), "short": (3000,)}
    model = Probe(shapes)
    optimizer = distributed(model, hvdc.Int8(model.named_parameters(), threshold=0))
    simulation = Simulation(Int8(), NONE, shapes, 2)
    gradients = [targets(shapes, rank, 0) for rank in range(2)]
    assert_same_bits(
        exchange(model, optimizer, gradients[hvd.rank()]), simulation.average(gradients)
    )
    assert_identical_on_all_ranks(model)


@on_ranks(2)
def test_any_bytes_come_through_a_sum() -> None:
    collectives = Collectives(None, "bytes")
    messages = torch.randint(
        0, 256, (2, 2**20), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    messages[:, :1024], messages[0, 1024:2048] = 255, 0
    handle = collectives.gather_alike(messages[hvd.rank()].clone(), "all")
    assert handle.own is not None  # As a sum.
    assert torch.equal(collectives.wait(handle), messages.view(-1))


def _same_as_stock(**options: object) -> None:
    """1-bit codes carry two-valued gradients without error: the result must be stock Horovod's."""
    rank = hvd.rank()
    model, plain = Probe(SHAPES), Probe(SHAPES)
    if "groups" in options and isinstance(options["groups"], list):
        names = options["groups"]
        ours = {**options, "groups": [[getattr(model, n) for n in group] for group in names]}
        stock = {**options, "groups": [[getattr(plain, n) for n in group] for group in names]}
    else:
        ours = stock = options
    optimizer = distributed(model, hvdc.OneBit(model.named_parameters(), threshold=0), **ours)
    reference = distributed(plain, hvd.Compression.none, **stock)
    for step in range(3):
        gradients = two_valued(SHAPES, rank, step)
        got = exchange(model, optimizer, gradients)
        assert_same_bits(got, exchange(plain, reference, gradients))


@on_ranks(2)
def test_average_and_sum() -> None:
    _same_as_stock(op=hvd.Average)
    _same_as_stock(op=hvd.Sum)


@on_ranks(2)
def test_predivide_factor() -> None:
    _same_as_stock(gradient_predivide_factor=2.0)
    _same_as_stock(gradient_predivide_factor=3.0)


@on_ranks(2)
def test_groups() -> None:
    _same_as_stock(groups=2)
    _same_as_stock(groups=2, op=hvd.Sum)
    _same_as_stock(groups=[["b", "a"]])
    _same_as_stock(groups=2, gradient_predivide_factor=2.0)


@on_ranks(2)
def test_hooks_in_another_order_on_each_rank() -> None:
    model = Probe(SHAPES)
    optimizer = distributed(model, hvdc.OneBit(model.named_parameters(), threshold=0))
    simulation = Simulation(OneBit(), ErrorFeedback(), SHAPES, hvd.size())
    names = list(SHAPES)
    for step in range(4):
        gradients = [targets(SHAPES, r, step) for r in range(hvd.size())]
        turn = (step + hvd.rank()) % len(names)
        order = names[turn:] + names[:turn]
        got = exchange(model, optimizer, gradients[hvd.rank()], order)
        assert_same_bits(got, simulation.average(gradients))


@on_ranks(2)
def test_gradients_missing_on_some_ranks() -> None:
    model = Probe(SHAPES)
    optimizer = distributed(model, hvdc.OneBit(model.named_parameters(), threshold=0))
    simulation = Simulation(OneBit(), ErrorFeedback(), SHAPES, hvd.size())
    absent = [{"a"}, {"b", "c"}]
    for step in range(3):
        gradients = [targets(SHAPES, r, step) for r in range(hvd.size())]
        for rank in range(hvd.size()):
            for name in absent[(rank + step) % 2]:
                gradients[rank][name].zero_()
        used = [n for n in SHAPES if n not in absent[(hvd.rank() + step) % 2]]
        got = exchange(model, optimizer, gradients[hvd.rank()], used)
        assert_same_bits(got, simulation.average(gradients))


@on_ranks(2)
def test_backward_passes_per_step() -> None:
    model = Probe(SHAPES)
    compressor = hvdc.OneBit(model.named_parameters(), threshold=0)
    optimizer = distributed(model, compressor, backward_passes_per_step=2)
    simulation = Simulation(OneBit(), ErrorFeedback(), SHAPES, hvd.size())
    for step in range(3):
        summed = []
        for rank in range(hvd.size()):
            halves = [targets(SHAPES, rank, 2 * step + half) for half in range(2)]
            summed.append({name: halves[0][name] + halves[1][name] for name in SHAPES})
        optimizer.zero_grad()
        for half in range(2):
            model(targets(SHAPES, hvd.rank(), 2 * step + half)).backward()
        optimizer.step()
        got = {name: p.grad for name, p in model.named_parameters()}
        assert_same_bits(got, simulation.average(summed))


@on_ranks(2)
def test_synchronize_before_step() -> None:
    model = Probe(SHAPES)
    optimizer = distributed(model, hvdc.OneBit(model.named_parameters(), threshold=0))
    simulation = Simulation(OneBit(), ErrorFeedback(), SHAPES, hvd.size())
    gradients = [targets(SHAPES, r, 0) for r in range(hvd.size())]
    model(gradients[hvd.rank()]).backward()
    optimizer.synchronize()
    expected = simulation.average(gradients)
    assert_same_bits({name: p.grad for name, p in model.named_parameters()}, expected)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert_same_bits(
        {name: p.detach() for name, p in model.named_parameters()},
        {name: -gradient for name, gradient in expected.items()},
    )


@on_ranks(2)
def test_two_models_at_the_same_time() -> None:
    shapes = [{"a": (3000,), "b": (50, 60)}, {"c": (2000,), "d": (30, 90)}]
    models = [Probe(s) for s in shapes]
    optimizers = [distributed(m, hvdc.OneBit(m.named_parameters(), threshold=0)) for m in models]
    simulations = [Simulation(OneBit(), ErrorFeedback(), s, hvd.size()) for s in shapes]
    for step in range(2):
        gradients = [[targets(s, r, step) for r in range(hvd.size())] for s in shapes]
        for optimizer in optimizers:
            optimizer.zero_grad()
        mine = [g[hvd.rank()] for g in gradients]
        (models[0](mine[0]) + models[1](mine[1])).backward()
        for model, optimizer, simulation, all_ranks in zip(
            models, optimizers, simulations, gradients, strict=True
        ):
            optimizer.step()
            got = {name: p.grad for name, p in model.named_parameters()}
            assert_same_bits(got, simulation.average(all_ranks))


@on_ranks(3, environment={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_process_set() -> None:
    members = process_set(0, 2)
    model = Probe(SHAPES)
    compressor = hvdc.OneBit(model.named_parameters(), threshold=0, process_set=members)
    optimizer = distributed(model, compressor, process_set=members)
    simulation = Simulation(OneBit(), ErrorFeedback(), SHAPES, 2)
    for step in range(3):
        gradients = [targets(SHAPES, r, step) for r in (0, 2)]
        mine = targets(SHAPES, hvd.rank(), step)
        got = exchange(model, optimizer, mine)
        assert_same_bits(got, simulation.average(gradients) if hvd.rank() != 1 else mine)


@on_ranks(1, environment={"HOROVOD_ELASTIC": "1"})
def test_a_single_rank_that_exchanges_with_itself() -> None:
    _every_codec_matches_the_simulation()
    _same_as_stock(op=hvd.Average)


@on_ranks(1)
def test_a_single_rank_is_left_alone() -> None:
    model = Probe(SHAPES)
    compressor = hvdc.OneBit(model.named_parameters(), threshold=0)
    gradients = targets(SHAPES, 0, 0)
    assert_same_bits(exchange(model, distributed(model, compressor), gradients), gradients)
    assert compressor.counters.steps == 0
