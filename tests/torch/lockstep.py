"""All ranks of an exchange in one process, where they start their collectives as drivers do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.engine.batch import Batch, judge
from hvd_compress.engine.batches import Batches
from hvd_compress.engine.executors import Executors
from hvd_compress.engine.parameters import Slot
from hvd_compress.engine.plan import Common
from hvd_compress.engine.run import Run
from hvd_compress.exchanges.comm import Collective, Group
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.routing import Route
from hvd_compress.ranks.counters import Counters

Gradients = Mapping[str, torch.Tensor]


class Lockstep:
    """Ranks that make steps.

    It fails where real ranks would wait for ever, or start collectives that do not fit together.

    Args:
        exchange: the exchange's name.
        codec: the codec of all gradients.
        feedback: the error feedback of all gradients.
        shapes: the shapes of the gradients.
        size: the number of ranks.
        local: the number of ranks on a host.
        owner_step: the same as the compressors'.

    Attributes:
        started: the labels and lengths of what each rank has started in the last step.
        errors: the errors of the last step's ranks.
        counters: the counters of each rank.
    """

    def __init__(
        self,
        exchange: str,
        codec: Codec,
        feedback: ErrorFeedback,
        shapes: Mapping[str, tuple[int, ...]],
        size: int,
        local: int = 1,
        owner_step: Callable[[torch.Tensor, dict[str, Any]], None] | None = None,
    ) -> None:
        route = Route(codec, feedback, exchange)
        self._groups = [Group(rank, size, Hosts(size, local)) for rank in range(size)]
        self.slots = [
            [Slot(name, i, torch.empty(s), route) for i, (name, s) in enumerate(shapes.items())]
            for _ in range(size)
        ]
        self.batches = [
            Batches(Common(Executors(1), group, owner_step=owner_step)) for group in self._groups
        ]
        self.started: list[list[tuple[str, int]]] = []
        self.errors: list[Exception] = []
        self.counters = [Counters() for _ in range(size)]

    def step(
        self,
        everybodys: Sequence[Gradients],
        broken: Sequence[int] = (),
        alter: Callable[[Collective, list[torch.Tensor]], None] | None = None,
    ) -> list[Gradients]:
        """One step.

        Args:
            everybodys: gradients of each rank.
            broken: ranks whose work fails.
            alter: called with each collective and what it brings every rank, which it may alter in place.

        Returns:
            What each rank has then; :attr:`errors` has what went wrong.
        """
        self.started = [[] for _ in everybodys]
        results = [{name: one.clone() for name, one in mine.items()} for mine in everybodys]
        made: list[tuple[Batch, Run]] = []
        for rank, (slots, batches) in enumerate(zip(self.slots, self.batches, strict=True)):
            batches.begin_step()
            batch, exchanging = batches.make(slots, list(results[rank].values()))
            if rank in broken:
                batch.error = RuntimeError(f"rank {rank} is broken")
            made.append((batch, Run(exchanging, batch, name="bucket")))
        while any(run.request for _, run in made):
            self._go_on([run for _, run in made], alter)
        self.errors = []
        for batch, run in made:
            try:
                if run.error is not None:
                    raise run.error
                batch.write(1 / len(made))
            except Exception as error:
                self.errors.append(error)
        if not self.errors:
            for batch, _ in made:
                batch.settle(judge([batch]))
        for (batch, _), counters in zip(made, self.counters, strict=True):
            batch.count(counters)
        return results

    def _go_on(
        self,
        everybody: Sequence[Run],
        alter: Callable[[Collective, list[torch.Tensor]], None] | None,
    ) -> None:
        """Gives the ranks that wait for one collective its results."""
        for rank, run in enumerate(everybody):
            request = run.request
            if request is None:
                continue
            members = self._groups[rank].members(request.scope)
            labels = {everybody[member].label for member in members if everybody[member].request}
            requests = [everybody[member].request for member in members]
            alike = [one for one in requests if one is not None and one.scope == request.scope]
            if len(alike) == len(members) and len(labels) == 1:
                for member, one in zip(members, alike, strict=True):
                    self.started[member].append((everybody[member].label, one.message.numel()))
                results = _results(alike)
                if alter is not None:
                    results = [result.clone() for result in results]
                    alter(alike[0], results)
                for member, result in zip(members, results, strict=True):
                    everybody[member].resume(result)
                return
        waiting = [run.request and run.label for run in everybody]
        raise AssertionError(f"expected ranks that wait for the same, got {waiting}")


def _results(requests: Sequence[Collective]) -> list[torch.Tensor]:
    first = requests[0]
    for one in requests:
        assert one.kind == first.kind and one.message.numel() == first.message.numel()
        assert one.sizes == first.sizes and one.remainder == first.remainder
    messages = [one.message for one in requests]
    if first.kind == "all_gather":
        return [torch.stack(messages) for _ in requests]
    if first.kind == "all_reduce":
        total = torch.stack(messages)
        reduced = total.sum(0) if first.op == "sum" else total.amax(0)
        return [reduced.to(messages[0].dtype) for _ in requests]
    assert sum(first.sizes) == first.message.numel()
    cut = [message.split(list(first.sizes)) for message in messages]
    return [torch.stack([parts[rank] for parts in cut]) for rank in range(len(requests))]
