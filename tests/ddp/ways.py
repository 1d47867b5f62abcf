"""What holds for every exchange whose ranks the oracle simulates, whichever it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

import hvd_compress.ddp as hvdc
from hvd_compress.codecs import Codec, ErrorFeedback
from tests.ddp.probes import Probe, assert_equal_on_all_ranks, distributed, exchange
from tests.torch.probes import assert_same_bits, targets

SHAPES = {"a": (40, 170), "b": (3000,), "c": (8, 3, 5, 5), "tiny": (3,), "scalar": ()}
"""7, 3 and 1 grains: uneven shards, ranks without a part, and tensors smaller than the number of ranks."""

NONE = ErrorFeedback(alpha=0.0)

FORMS: tuple[dict[str, Any], ...] = (
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"bucket_cap_mb": 25},
    {"bucket_cap_mb": 1e-6},
)
"""Of DDP, with the same gradients."""


class Simulation(Protocol):
    """All ranks, by the oracle."""

    def average(self, gradients: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """What a step's gradients of all ranks become."""


@dataclass(frozen=True)
class Way:
    """An exchange under test.

    Attributes:
        name: of the exchange.
        codec: what its tests encode with, unless they say otherwise.
        feedback: and its error feedback.
        simulate: makes a simulation of a codec, its feedback, so many ranks and a seed.
        expected: this rank's residuals in a simulation, called as :meth:`residuals` calls them.
        spread: the factor on an odd rank's gradients, by step.
    """

    name: str
    codec: Codec
    feedback: ErrorFeedback
    simulate: Callable[[Codec, ErrorFeedback, int, int], Any]
    expected: Callable[[Any], Mapping[str, np.ndarray]]
    spread: Callable[[int], float] = lambda step: 1.0

    def start(
        self, codec: Codec | None = None, feedback: ErrorFeedback | None = None, **options: Any
    ) -> tuple[Any, hvdc.Compressor]:
        """A model and its compressor, see :func:`distributed`."""
        codec, feedback = codec or self.codec, feedback or self.feedback
        return distributed(Probe(SHAPES), codec, feedback, **{"exchange": self.name, **options})

    def simulation(self, ranks: int | None = None) -> Any:
        """Of the usual codec, all ranks unless told otherwise."""
        return self.simulate(self.codec, self.feedback, ranks or dist.get_world_size(), 0)

    def gradients(self, step: int) -> list[dict[str, torch.Tensor]]:
        """Of all ranks."""
        size = dist.get_world_size()
        return [targets(SHAPES, r, step, self.spread(step) if r % 2 else 1.0) for r in range(size)]

    def residuals(self, compressor: hvdc.Compressor) -> dict[str, torch.Tensor]:
        """Of this rank, for its own gradients and for the averages that it owns, where it has them."""
        kept = {}
        for name, tensor in compressor.state_dict()["tensors"].items():
            if tensor["residual"] is not None:
                kept[name] = tensor["residual"].clone()
            if tensor.get("owned") is not None:
                kept[f"{name}, owned"] = tensor["owned"]["residual"].clone()
        return kept

    def assert_residuals(self, compressor: hvdc.Compressor, simulation: Any) -> None:
        """They are the simulation's, bit for bit."""
        expected = {n: torch.from_numpy(h) for n, h in self.expected(simulation).items()}
        assert_same_bits(self.residuals(compressor), expected)

    def follows(self, ddp: Any, simulation: Simulation, steps: int = 3) -> dict[str, torch.Tensor]:
        """Makes steps, each equal to the simulation's; the last one's gradients."""
        for step in range(steps):
            gradients = self.gradients(step)
            got = exchange(ddp, gradients[dist.get_rank()])
            assert_same_bits(got, simulation.average(gradients))
        return got


def every_codec(way: Way, rows: Sequence[tuple[Codec, ErrorFeedback]]) -> None:
    """Averages and residuals are the simulation's, and averages the same on all ranks."""
    for codec, feedback in rows:
        ddp, compressor = way.start(codec, feedback, seed=7)
        simulation = way.simulate(codec, feedback, dist.get_world_size(), 7)
        assert_equal_on_all_ranks(way.follows(ddp, simulation))
        if feedback.enabled:
            way.assert_residuals(compressor, simulation)


def forms_of_ddp(way: Way, *more: dict[str, Any]) -> None:
    """However DDP is made."""
    for form in (*FORMS, *more):
        ddp, compressor = way.start(**form)
        simulation = way.simulation()
        way.follows(ddp, simulation)
        way.assert_residuals(compressor, simulation)


def memory_in_another_order_and_half_precision(way: Way) -> None:
    """Channels last, in every dtype."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model = Probe(SHAPES, dtype).to(memory_format=torch.channels_last)
        ddp, _ = distributed(model, way.codec, way.feedback, exchange=way.name)
        simulation = way.simulation()
        for step in range(2):
            gradients = [
                {name: g.to(dtype) for name, g in targets(SHAPES, r, step).items()}
                for r in range(dist.get_world_size())
            ]
            got = exchange(ddp, gradients[dist.get_rank()])
            wide = [{name: g.float() for name, g in one.items()} for one in gradients]
            expected = simulation.average(wide)
            assert_same_bits(got, {name: value.to(dtype) for name, value in expected.items()})
        assert not model.c.grad.is_contiguous()


def a_process_group_of_some_ranks(way: Way) -> None:
    """Ranks 0 and 2, while rank 1 does something else."""
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        ddp, _ = way.start(process_group=group)
        simulation = way.simulation(2)
        for step in range(3):
            gradients = [targets(SHAPES, r, step) for r in (0, 2)]
            got = exchange(ddp, gradients[dist.get_rank(group)])
            assert_same_bits(got, simulation.average(gradients))


def parameters_that_are_not_used(way: Way, absent: Sequence[set[str]]) -> None:
    """By some ranks: they send zeros, and their residuals. By none: residuals stay what they were.

    Args:
        way: the exchange.
        absent: what each rank leaves out, in turns.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    for view in (False, True):
        ddp, compressor = way.start(find_unused_parameters=True, gradient_as_bucket_view=view)
        simulation = way.simulation()
        for step in range(3):
            gradients = way.gradients(step)
            for r in range(size):
                for name in absent[(r + step) % size]:
                    gradients[r][name].zero_()
            used = [name for name in SHAPES if name not in absent[(rank + step) % size]]
            got = exchange(ddp, gradients[rank], used)
            assert_same_bits(got, simulation.average(gradients))
        way.assert_residuals(compressor, simulation)
        before = way.residuals(compressor)
        got = exchange(ddp, targets(SHAPES, rank, 3), [name for name in SHAPES if name != "b"])
        assert "b" not in got
        for name, after in way.residuals(compressor).items():
            if name.startswith("b"):
                assert torch.equal(after, before[name]), name
            elif name.startswith("a"):
                assert not torch.equal(after, before[name]), name


def uneven_inputs(way: Way, steps: Sequence[int]) -> None:
    """A rank that has joined goes on as an owner, and sends zeros with what is left of its residual.

    Args:
        way: the exchange.
        steps: that each rank makes.
    """
    ddp, compressor = way.start()
    simulation = way.simulation()
    rank, size = dist.get_rank(), dist.get_world_size()
    for_all = []
    for step in range(max(steps)):
        gradients = [targets(SHAPES, r, step) for r in range(size)]
        for r in range(size):
            if step >= steps[r]:
                gradients[r] = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for_all.append(simulation.average(gradients))
    with ddp.join():
        for step in range(steps[rank]):
            assert_same_bits(exchange(ddp, targets(SHAPES, rank, step)), for_all[step])
    way.assert_residuals(compressor, simulation)
    assert compressor.counters.steps == max(steps)
