"""Local training steps with occasional compressed exchanges of their results."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

import hvd_compress.distributed as hvdc
from hvd_compress.codecs import Codec, checks
from hvd_compress.diloco.common import CommonParameters
from hvd_compress.diloco.fragments import Fragment, Fragments, check_model, split
from hvd_compress.diloco.members import Members
from hvd_compress.diloco.quorums import Quorums, RolledBackError
from hvd_compress.distributed.begin import compressor_of, group_of
from hvd_compress.exchanges.routing import Route
from hvd_compress.process_group.values import problem_told

if TYPE_CHECKING:
    from hvd_compress.diloco.shards import Shards

_log = logging.getLogger(__name__)

AVERAGE = functools.partial(torch.optim.SGD, lr=1.0)
"""The default outer optimizer: the common parameters become the average of the ranks' parameters."""

NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""The outer optimizer of the paper. In short trainings from the beginning, it is worse than no exchange at
all (``docs/diloco.md``)."""

_LEAST_RATE = 0.1


class DiLoCo:
    """Averages the changes that each rank makes in ``sync_every`` steps by itself, encoded.

    This is distributed low-communication training (Douillard et al., 2023, algorithm 1). All ranks begin
    with the parameters of the group's first rank, including weights that are loaded into the model before
    its first gradients. Each rank makes ``sync_every`` steps with its own inner optimizer. Then
    :func:`hvd_compress.distributed.all_reduce` averages the differences between the last common parameters
    and each rank's parameters, with a codec and error feedback. The outer optimizer uses the average as a
    gradient of the common parameters, and each rank continues from the new common parameters.

    With several ``fragments``, one part of the model is exchanged at a time, at equal distances within
    ``sync_every`` steps. With a ``delay``, the ranks make ``delay`` further steps during an exchange
    (Streaming DiLoCo, Douillard et al., 2025).

    The default outer optimizer is SGD with ``lr=1`` and no momentum, which is local SGD: the parameters
    themselves are averaged. The paper's is :data:`hvd_compress.diloco.NESTEROV`.

    If a difference of some rank holds an Inf or a NaN, the round is dropped on all ranks: the common
    parameters stay unchanged, each rank takes them, and residuals become what they were.

    Args:
        model: the model; those of its parameters that require gradients now are exchanged, and may be
            frozen later, on all ranks in the same step. Each rank keeps its own buffers, such as running
            means of batch normalisation.
        codec: the codec that encodes differences, such as ``Int8()``, a :class:`~hvd_compress.Route`, or,
            for other options, a compressor of :mod:`hvd_compress.distributed` that nothing else uses. Its
            keys are the parameters' names.
        sync_every: the number of steps between two exchanges of the same parameter; 500 in most of the
            paper.
        outer_optimizer: a function that is called once with the common parameters and returns a
            ``torch.optim.Optimizer``, by default SGD with a learning rate of 1. A rate below 0.1 is a
            warning: SGD then discards most of what a round has learnt. With a mesh, the parameters are
            this rank's shards, so that an optimizer that needs whole parameters, such as for their norms,
            gives other results.
        fragments: the number of parts in which the model is exchanged; or, for each part, a list of
            patterns (``fnmatch``) of its parameters' names.
        delay: the number of steps after which the average is needed and used, below ``sync_every``; with a
            manager, below ``sync_every / fragments``. With 0, the step waits for the average.
        mixing: the weight of a rank's own parameters when it takes new common parameters, from 0 to 1; None
            is 0 without a delay and 0.5 with a delay.
        mesh: for a model that FSDP2 shards within each worker, the ``DeviceMesh`` of two dimensions,
            workers first and shards second. Each rank exchanges its shards with the ranks of the other
            workers that have the same shards; None if each rank has the whole model.
        manager: a ``torchft.Manager``, made with ``use_async_quorum=False`` and ``load_state_dict=None``:
            each exchange is made among the ranks of the manager's quorum, and counts if the manager says
            so. The compressor's ``process_group`` is the manager's.

    Attributes:
        failed_rounds: the number of this rank's exchanges that a manager has rolled back.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y". Without a manager, the other ranks
            raise an :class:`ExchangeError`, unless ``mesh`` is wrong, or the model does not fit it.
        ExchangeError: there is no process group, or this rank is not in it.
    """

    def __init__(
        self,
        model: nn.Module,
        codec: Codec | Route | str | hvdc.Compressor,
        *,
        sync_every: int,
        outer_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = AVERAGE,
        fragments: int | Sequence[Sequence[str]] = 1,
        delay: int = 0,
        mixing: float | None = None,
        manager: Any | None = None,
        mesh: Any | None = None,
    ) -> None:
        group = group_of(codec)
        shards = self._shards_on(mesh, model, manager)
        told = contextlib.ExitStack()
        if shards is not None:
            told.enter_context(shards.problem_told())
            given, group = group, shards.workers
        if manager is None:
            told.enter_context(problem_told(group))
        with told:
            compressor = compressor_of(codec, "DiLoCo", "DiLoCo(model, {}, ...)")
            if shards is not None:
                shards.check(compressor, given)
            checks.check_number("DiLoCo", "sync_every", sync_every, 1, sys.maxsize, integer=True)
            checks.check_number("DiLoCo", "delay", delay, 0, sync_every - 1, integer=True)
            mixing = (0.5 if delay else 0.0) if mixing is None else mixing
            checks.check_number("DiLoCo", "mixing", mixing, 0, 1)
            common = CommonParameters(model, outer_optimizer)
            compressor.check_patterns(list(common.kinds))
            _warn_of_small_rates(common.outer)
            parts = Fragments(
                Fragment(number, names, common, compressor, shards)
                for number, names in enumerate(split(common.own, fragments))
            )
        self._model, self._sync_every, self._delay, self._mixing = model, sync_every, delay, mixing
        settings: dict[str, Any] = {"sync_every": sync_every, "delay": delay, "mixing": mixing}
        settings["fragments"] = [fragment.names for fragment in parts]
        self._common, self._fragments = common, parts
        self._compressor, self._shards = compressor, shards
        self._members = Members(common, parts, compressor, shards, settings)
        self._device = next(iter(common.own.values())).device
        self._thread: ThreadPoolExecutor | None = None
        self._quorums: Quorums | None = None
        self._unproven = True  # As long as no exchange with these settings has ended well.
        self.failed_rounds = 0
        if manager is None:
            self.rebind(group)
        else:
            count = len(parts)
            if sync_every % count or delay >= sync_every // count:
                raise ValueError(
                    f"DiLoCo: with a manager, expected sync_every a multiple of the number of fragments, "
                    f"and delay below sync_every / fragments, as one exchange ends before the next one "
                    f"begins, got sync_every {sync_every}, {count} fragments and delay {delay}"
                )
            if delay:  # The collectives of such a group are waited for where they begin.
                self._thread = ThreadPoolExecutor(1, "hvd_compress.diloco")
            self._quorums = Quorums(manager, compressor.process_group)

    @property
    def compressor(self) -> hvdc.Compressor:
        """The compressor that sends the differences, with its counters, residuals and routes."""
        return self._compressor

    @property
    def common_parameters(self) -> Mapping[str, torch.Tensor]:
        """The parameters of the last exchanges, by name: the same on every rank, unlike the model's.

        They are float32 where the model's parameters have half precision. With a mesh, they are ``DTensor``
        like the model's.
        """
        return self._common.shown()

    @property
    def steps(self) -> int:
        """The number of calls of :meth:`step`."""
        return self._members.steps

    @property
    def rounds(self) -> int:
        """The number of exchanges of a fragment whose average was used."""
        return sum(used for used, _ in self._members.counts)

    @property
    def dropped_rounds(self) -> int:
        """The number of exchanges that were dropped for an Inf or a NaN."""
        return sum(dropped for _, dropped in self._members.counts)

    @torch.no_grad()
    def step(self) -> None:
        """Counts a training step and makes the exchanges that are due; call it after the inner optimizer.

        Every rank has to call it in every step, even if a ``GradScaler`` skips the inner optimizer's step.

        Raises:
            ExchangeError: ranks differ, or another rank has failed.
            PayloadError: a payload was altered in transit.
            ValueError: the model's trainable parameters have changed since this object was made.
        """
        self._begin()
        self._members.steps += 1
        self._fragments.note_trained()
        if self._quorums is not None:
            if (self.steps + self._delay) % (self._sync_every // len(self._fragments)) == 0:
                self._begin_round(self._quorums, self._delay)
            self._end_rounds(self.steps)
            return
        for fragment in self._fragments:
            if fragment.due == self.steps:
                self._receive(fragment)
        for number, fragment in enumerate(self._fragments):
            if self._sends(number):
                self._send(fragment, self._delay)
                if not self._delay:
                    self._receive(fragment)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchanges all fragments at once and waits, so that all ranks have the same parameters.

        Call it after the last step. The model then has the common parameters, whatever ``mixing`` is.
        With a manager, if the exchange of a fragment is rolled back, its parameters stay the rank's own.

        Raises:
            ExchangeError, PayloadError: see :meth:`step`.
        """
        self._begin()
        if self._quorums is not None:
            self._end_rounds()
            self._fragments.note_trained()
            for _ in self._fragments:
                self._begin_round(self._quorums, 0)
                for fragment in self._end_rounds():
                    fragment.take()
            return
        for fragment in self._fragments.in_progress():
            self._receive(fragment)
        self._fragments.note_trained()
        for fragment in self._fragments:
            self._send(fragment, 0)
        for fragment in self._fragments:
            self._receive(fragment)
        self._fragments.take()

    @torch.no_grad()
    def rebind(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        lost: Iterable[dict[str, Any]] = (),
    ) -> None:
        """Continues among the ranks of another process group, after ranks have left or joined.

        All ranks that stay call it; each new rank makes a ``DiLoCo``, which takes part in the same exchange
        when it is made. Ranks that are behind, which all new ranks are, take the common parameters, the
        outer optimizer's state and the number of steps from the rank with the most progress, and begin with
        these parameters. The other ranks keep their own parameters. An exchange that has failed counts on
        all ranks if one of them got its average; otherwise it counts as not begun, and its differences are
        part of the next exchange.

        The compressor's residuals keep their share in the average
        (:meth:`hvd_compress.distributed.Compressor.rebind`).

        Args:
            process_group: the ranks; None is the default group, which may differ from the one before. With
                a mesh, the ranks with the same shards; all ranks of a worker call this.
            lost: the latest available :meth:`state_dict` of each rank that has left; the same on every rank
                that stays. The residuals in these states are shared out.

        Raises:
            ExchangeError: an exchange is in progress, ranks differ, or something is wrong on another rank.
                It is raised on every rank, and training can go on as before.
            TypeError, ValueError: a state in ``lost`` does not belong to a rank that has left.
        """
        self._members.meet(process_group, list(lost))

    def state_dict(self) -> dict[str, Any]:
        """Common parameters, the outer optimizer's state, residuals, and averages that are due later.

        Waits for exchanges in progress; with a manager, they are committed or rolled back. Every rank saves
        its own state, and its model and inner optimizer, which differ between ranks as well; training then
        continues bit for bit. Tensors are references, as in ``torch.optim``.

        Raises:
            ExchangeError, PayloadError: see :meth:`step`.
        """
        for fragment in self._fragments.in_progress():
            with self._rolled_back_on_error(fragment), self._lost_ranks_noticed(fragment):
                fragment.wait()
        return {
            "steps": self.steps,
            "history": {name: list(counts) for name, counts in self._members.history.items()},
            **self._fragments.state_dict(),
            **self._common.state_dict(),
            "compressor": self._compressor.state_dict(),
            "configuration": self._members.configuration,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the :meth:`state_dict` of the same rank.

        Load the states of the model and the inner optimizer as well.

        Raises:
            TypeError: the state is not a result of :meth:`state_dict`.
            ValueError: the state has another model or other settings; or, without a manager, another rank
                or another number of ranks.
            ExchangeError: exchanges are in progress.
        """
        self._members.check("load_state_dict", state)
        with self._common.outer_restored_on_error(state):
            if self._quorums is None:
                self._compressor.load_state_dict(state["compressor"])
            else:
                self._compressor.members.load(state["compressor"])
        self._members.load(state)

    def load_resized(self, states: Iterable[dict[str, Any]]) -> None:
        """Continues with another number of ranks, from the states of all former ranks.

        The compressor's residuals are shared out as in its own ``load_resized``, so that nothing unsent is
        lost. Averages that are due are used first; then all ranks continue from the common parameters,
        without the steps that each rank has made since the last exchange.

        Args:
            states: the states of all former ranks, in rank order.

        Raises:
            TypeError: a state is not a result of :meth:`state_dict`.
            ValueError: these are not the states of all ranks of one run, or have another model or other
                settings; or there is a manager.
            ExchangeError: exchanges are in progress.
        """
        if self._quorums is not None:
            raise ValueError(
                "DiLoCo.load_resized: expected no manager, got one: load_state_dict() takes the state of a "
                "rank of any number of ranks then"
            )
        states = list(states)
        for state in states:
            self._members.check("load_resized", state)
        self._compressor.load_resized(state["compressor"] for state in states)
        self._members.load(states[0])
        for fragment in self._fragments.in_progress():
            self._receive(fragment)
        self._fragments.take()

    @staticmethod
    def _shards_on(mesh: Any, model: Any, manager: Any) -> Shards | None:
        if mesh is not None and manager is not None:
            raise ValueError("DiLoCo.mesh: expected none with a manager, got both")
        sharded = isinstance(model, nn.Module) and any(
            hasattr(parameter, "to_local") for parameter in model.parameters()
        )
        if mesh is None and sharded:
            raise ValueError(
                "DiLoCo.mesh: expected the mesh of two dimensions, workers first and shards second, for "
                "a model whose parameters a mesh shares out, got none: write DiLoCo(model, ..., mesh=mesh)"
            )
        if mesh is None:
            return None
        # Few scripts need PyTorch's DTensor, a long import.
        from hvd_compress.diloco.shards import Shards

        return Shards(model, mesh)

    def _sends(self, fragment: int) -> bool:
        offset = fragment * self._sync_every // len(self._fragments)
        return self.steps > 0 and (self.steps - offset) % self._sync_every == 0

    def _begin(self) -> None:
        """Takes the weights with which the first rank makes its first step, or those of a replica."""
        if not self._members.fresh:
            return
        if self._quorums is not None:
            self._common.take_loaded(list(self._common.loaded), None)
            self._members.fresh = False
            return
        with self._lost_ranks_noticed():
            self._members.begin()

    def _send(
        self, fragment: Fragment, delay: int, commit: Callable[[], None] | None = None
    ) -> None:
        with self._lost_ranks_noticed(fragment):
            try:
                check_model(self._model, self._common.own)
            except ValueError as error:
                self._compressor.refuse(error, self._device)
                raise
            fragment.begin(self.steps + delay, commit, self._thread)

    def _receive(self, fragment: Fragment) -> None:
        with self._lost_ranks_noticed(fragment):
            fragment.wait()
        exchanged = fragment.exchanged
        used = fragment.use(self._mixing)
        self._members.count(fragment.number, used)
        if not used:
            _log.warning(
                "step %d: an Inf or a NaN in what some rank has learnt; all ranks go back to the last "
                "common parameters (fragment %d of %d)",
                self.steps,
                fragment.number + 1,
                len(self._fragments),
            )
        if exchanged and self._quorums is None:
            self._compressor.share_norms()

    @contextlib.contextmanager
    def _lost_ranks_noticed(self, fragment: Fragment | None = None) -> Iterator[None]:
        """Ends all exchanges in progress if an exchange fails because a rank is lost."""
        try:
            number = -1 if fragment is None else fragment.number
            shards = self._shards
            with (
                contextlib.nullcontext() if shards is None else shards.verdicts.failure_told(number)
            ):
                yield
        except (hvdc.ExchangeError, hvdc.PayloadError, TypeError, ValueError):
            raise
        except Exception:
            # Ranks that wait for this one learn of it before their timeout.
            self._compressor.close()
            for other in self._fragments.in_progress():
                with contextlib.suppress(Exception):
                    self._receive(other)
            raise

    def _begin_round(self, quorums: Quorums, delay: int) -> None:
        """Begins an exchange among the ranks of a quorum; the average is due after ``delay`` more steps."""
        quorums.begin()
        fragment = self._fragments[quorums.number % len(self._fragments)]
        with self._rolled_back_on_error(fragment):
            quorums.check()
            if quorums.group is not self._compressor.process_group:
                self.rebind(quorums.group)
            # Not after the exchange: where it fails on some ranks only, others would wait for them.
            self._compressor.share_norms(early=True)
            self._send(fragment, delay, quorums.commit)

    def _end_rounds(self, due: int | None = None) -> list[Fragment]:
        """Ends the exchanges due in a step, or all of them; returns the fragments whose exchange counts."""
        ended = []
        for fragment in [one for one in self._fragments.in_progress() if due in (None, one.due)]:
            with self._rolled_back_on_error(fragment):
                self._receive(fragment)
                self._unproven = False
                ended.append(fragment)
        return ended

    @contextlib.contextmanager
    def _rolled_back_on_error(self, fragment: Fragment) -> Iterator[None]:
        """Continues without an exchange that the manager rolls back, with or without an error here."""
        try:
            yield
        except Exception as error:
            if self._quorums is None:
                raise
            self._quorums.fail(error)
            wrong = isinstance(error, hvdc.ExchangeError) and not isinstance(error, RolledBackError)
            if isinstance(error, (TypeError, ValueError)) or (wrong and self._unproven):
                raise
            self.failed_rounds += 1
            _log.warning(
                "step %d: fragment %d of %d is not exchanged, and will be later, with what is learnt until "
                "then: %s",
                self.steps,
                fragment.number + 1,
                len(self._fragments),
                error,
            )


def _warn_of_small_rates(outer: torch.optim.Optimizer) -> None:
    """Warns of what is torch's default more often than a choice: its SGD takes a rate of 0.001."""
    rate = min(float(group["lr"]) for group in outer.param_groups)
    if rate < _LEAST_RATE:
        warnings.warn(
            f"DiLoCo.outer_optimizer: expected a learning rate of {_LEAST_RATE} or more, got {rate:g}: SGD "
            f"uses only this share of what the ranks have learnt in a round, and discards the rest. "
            f"functools.partial(torch.optim.SGD, lr=1.0) uses all of it",
            stacklevel=3,
        )
