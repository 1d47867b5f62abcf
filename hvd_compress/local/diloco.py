"""Local steps, and a compressed exchange of their result from time to time."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

import hvd_compress.distributed as hvdc
from hvd_compress.codecs import base
from hvd_compress.codecs.calls import expect_instance
from hvd_compress.distributed.begin import begin_alike
from hvd_compress.local.fragments import split

_log = logging.getLogger(__name__)

NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""The outer optimizer of the paper."""


class DiLoCo:
    """Averages what ranks have learnt in ``sync_every`` steps of their own, encoded.

    Distributed low-communication training (Douillard et al., 2023, algorithm 1). All ranks begin with the
    parameters of the group's first rank. Each makes ``sync_every`` steps with an optimizer of its own, the
    inner one. Then the differences between the last common parameters and each rank's are averaged by
    :func:`hvd_compress.distributed.all_reduce`, with a codec and error feedback. The outer optimizer takes
    the average for a gradient of the common parameters, and each rank goes on from the new ones.

    With several ``fragments``, a part of the model is exchanged at a time, at equal distances within
    ``sync_every`` steps; with a ``delay``, while the ranks make so many further steps (Streaming DiLoCo,
    Douillard et al., 2025).

    An outer SGD with ``lr=1`` and no momentum is local SGD: the parameters themselves are averaged.

    A round in which a difference of some rank holds an Inf or a NaN is dropped on all ranks: the common
    parameters stay, each rank takes them, and residuals are what they were.

    Args:
        model: whose trainable parameters are exchanged. Buffers, such as running means of batch
            normalisation, stay each rank's own.
        compressor: of :mod:`hvd_compress.distributed`, such as ``Int8()``, for the differences; it is this
            object's alone. Its keys are the parameters' names.
        sync_every: steps between two exchanges of the same parameter; 500 in most of the paper.
        outer_optimizer: called once with the common parameters; returns a ``torch.optim.Optimizer``. The
            default is SGD with Nesterov momentum 0.9 and a learning rate of 0.7.
        fragments: how many parts the model is exchanged in; or lists of patterns (``fnmatch``) of their
            parameters' names.
        delay: steps after which the average is needed and used, below ``sync_every``. 0 waits for it.
        mixing: the share of its own parameters that a rank keeps when the new ones come, from 0 to 1;
            None is 0 without a delay and 0.5 with one.

    Attributes:
        steps: calls of :meth:`step` so far.
        rounds: exchanges of a fragment whose average was used.
        dropped_rounds: exchanges that were dropped for an Inf or a NaN.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
        ExchangeError: there is no process group, or this rank is not in it.
    """

    def __init__(
        self,
        model: nn.Module,
        compressor: hvdc.Compressor,
        *,
        sync_every: int,
        outer_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = NESTEROV,
        fragments: int | Sequence[Sequence[str]] = 1,
        delay: int = 0,
        mixing: float | None = None,
    ) -> None:
        expect_instance("DiLoCo", compressor, hvdc.Compressor, "DiLoCo(model, {}, ...)", "Int8()")
        base.check_number("DiLoCo", "sync_every", sync_every, 1, sys.maxsize, integer=True)
        base.check_number("DiLoCo", "delay", delay, 0, sync_every - 1, integer=True)
        self._mixing = (0.5 if delay else 0.0) if mixing is None else mixing
        base.check_number("DiLoCo", "mixing", self._mixing, 0, 1)
        self._own = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self._own:
            raise ValueError("DiLoCo.model: expected trainable parameters, got none")
        self._fragments = split(self._own, fragments)
        self._sync_every = sync_every
        self._delay = delay
        self._compressor = compressor
        begin_alike(compressor, self._own, self._configuration())
        self._common = {name: _common(parameter) for name, parameter in self._own.items()}
        self._outer = outer_optimizer(list(self._common.values()))
        self._under_way: dict[int, _Round] = {}
        self.steps = 0
        self.rounds = 0
        self.dropped_rounds = 0

    @property
    def common_parameters(self) -> Mapping[str, torch.Tensor]:
        """The parameters of the last exchanges, by name: the same on every rank, unlike the model's.

        float32 where the model's are of half precision.
        """
        return MappingProxyType({name: common.data for name, common in self._common.items()})

    @torch.no_grad()
    def step(self) -> None:
        """Counts a step of training, and exchanges what is due; call it after the inner optimizer's.

        Every rank has to call it in every step, also where a ``GradScaler`` leaves out the optimizer's.

        Raises:
            ExchangeError: ranks differ, or another rank has failed.
            PayloadError: a payload was altered on its way.
        """
        self.steps += 1
        for fragment in list(self._under_way):
            if self._under_way[fragment].due == self.steps:
                self._receive(fragment)
        for fragment in range(len(self._fragments)):
            if self._sends(fragment):
                self._send(fragment)
                if not self._delay:
                    self._receive(fragment)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchanges everything at once, so that all ranks have the same parameters; waits for it.

        Call it after the last step. The parameters are the common ones then, whatever ``mixing`` is.

        Raises:
            ExchangeError, PayloadError: as :meth:`step`.
        """
        for fragment in sorted(self._under_way, key=lambda f: self._under_way[f].due):
            self._receive(fragment)
        for fragment in range(len(self._fragments)):
            self._send(fragment)
        for fragment in range(len(self._fragments)):
            self._receive(fragment)
        self._take_common(self._own, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Common parameters, the outer optimizer's state, residuals, and averages that are due later.

        Waits for exchanges that are under way. Every rank saves its own, beside its model and its inner
        optimizer, which differ between ranks, too; then training goes on bit for bit. Tensors are
        references, as in ``torch.optim``.
        """
        for one in self._under_way.values():
            one.wait()
        return {
            "steps": self.steps,
            "rounds": self.rounds,
            "dropped_rounds": self.dropped_rounds,
            "common": dict(self.common_parameters),
            "outer_optimizer": self._outer.state_dict(),
            "compressor": self._compressor.state_dict(),
            "due": {f: (one.due, one.differences) for f, one in self._under_way.items()},
            "configuration": self._configuration(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where :meth:`state_dict` of the same rank left off.

        Load the model's and the inner optimizer's state as well.

        Raises:
            ValueError: of another model, other settings, another rank or another number of ranks.
            ExchangeError: exchanges are under way.
        """
        self._check_state("load_state_dict", state)
        self._compressor.load_state_dict(state["compressor"])
        self._load(state)
        self._under_way = {
            fragment: _Round(due, [one.clone() for one in differences], None)
            for fragment, (due, differences) in state["due"].items()
        }

    def load_resized(self, states: Iterable[dict[str, Any]]) -> None:
        """Continues with another number of ranks, from the states of all ranks that there were.

        The compressor's residuals are shared out as by its own ``load_resized``: nothing of what was not
        sent is lost. All ranks go on from the common parameters: the steps that each had made since are
        not, and averages that were due are used first.

        Args:
            states: of every rank, in the order of their ranks.

        Raises:
            ValueError: not the states of all ranks of one run, or of another model or other settings.
            ExchangeError: exchanges are under way.
        """
        states = list(states)
        for state in states:
            self._check_state("load_resized", state)
        self._compressor.load_resized(state["compressor"] for state in states)
        first = states[0]
        self._load(first)
        for fragment, (due, differences) in first["due"].items():
            self._under_way[fragment] = _Round(due, [one.clone() for one in differences], None)
            self._receive(fragment)
        self._take_common(self._own, 0.0)

    def _sends(self, fragment: int) -> bool:
        offset = fragment * self._sync_every // len(self._fragments)
        return self.steps > 0 and (self.steps - offset) % self._sync_every == 0

    def _send(self, fragment: int) -> None:
        names = self._fragments[fragment]
        differences = [
            self._common[name].detach() - self._own[name].detach().to(self._common[name].dtype)
            for name in names
        ]
        work = hvdc.all_reduce(differences, self._compressor, key=names, async_op=True)
        self._under_way[fragment] = _Round(self.steps + self._delay, differences, work)

    def _receive(self, fragment: int) -> None:
        one = self._under_way.pop(fragment)
        one.wait()
        names = self._fragments[fragment]
        # The same bits on every rank, so that all decide alike.
        if all(bool(difference.isfinite().all()) for difference in one.differences):
            for name, difference in zip(names, one.differences, strict=True):
                self._common[name].grad = difference
            self._outer.step()
            for name in names:
                self._common[name].grad = None
            self.rounds += 1
            self._take_common(names, self._mixing)
        else:
            self.dropped_rounds += 1
            _log.warning(
                "step %d: an Inf or a NaN in what some rank has learnt; all ranks go back to the last "
                "common parameters (fragment %d of %d)",
                self.steps,
                fragment + 1,
                len(self._fragments),
            )
            self._take_common(names, 0.0)

    def _take_common(self, names: Iterable[str], mixing: float) -> None:
        for name in names:
            own, common = self._own[name], self._common[name].detach()
            if mixing:
                common = torch.lerp(common, own.detach().to(common.dtype), mixing)
            own.data.copy_(common)

    def _configuration(self) -> dict[str, Any]:
        return {
            "sync_every": self._sync_every,
            "delay": self._delay,
            "mixing": self._mixing,
            "fragments": self._fragments,
        }

    def _check_state(self, who: str, state: dict[str, Any]) -> None:
        if self._under_way:
            raise hvdc.ExchangeError(
                f"DiLoCo.{who}: expected no exchange under way; call synchronize() first"
            )
        if not isinstance(state, dict) or "configuration" not in state:
            kind = "None" if state is None else f"an object of type {type(state).__name__} without"
            raise TypeError(f"DiLoCo.{who}: expected what state_dict() returned, got {kind}")
        expected, got = self._configuration(), state["configuration"]
        for name, value in expected.items():
            if got[name] != value:
                raise ValueError(f"DiLoCo.{who}: expected {name} {value}, got {got[name]}")
        for name, common in self._common.items():
            shape = tuple(state["common"][name].shape)
            if shape != tuple(common.shape):
                raise ValueError(
                    f"DiLoCo.{who}: expected {name} of shape {tuple(common.shape)}, got {shape}"
                )

    @torch.no_grad()
    def _load(self, state: dict[str, Any]) -> None:
        self._outer.load_state_dict(state["outer_optimizer"])
        for name, common in self._common.items():
            common.data.copy_(state["common"][name])
        self.steps = state["steps"]
        self.rounds = state["rounds"]
        self.dropped_rounds = state["dropped_rounds"]


@dataclass
class _Round:
    """A fragment's exchange.

    Attributes:
        due: the step in which the average is used.
        differences: this rank's, until :meth:`wait` returns; then the average.
        work: None where the average is there.
    """

    due: int
    differences: list[torch.Tensor]
    work: hvdc.Work | None

    def wait(self) -> None:
        work, self.work = self.work, None
        if work is not None:
            work.wait()


def _common(parameter: nn.Parameter) -> nn.Parameter:
    """A copy for the outer optimizer, of 32 bits at least."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return nn.Parameter(parameter.detach().to(dtype, copy=True))
