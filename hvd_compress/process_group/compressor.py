"""The base of the compressors that send by torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Unpack

import torch

from hvd_compress.codecs import Codec
from hvd_compress.codecs.refusal import refuse
from hvd_compress.engine.compressor import CompressorBase
from hvd_compress.engine.executors import device_of
from hvd_compress.engine.options import Options
from hvd_compress.engine.parameters import Slot
from hvd_compress.exchanges.routing import Route
from hvd_compress.process_group.agreement import Agreement
from hvd_compress.process_group.packing import Packer
from hvd_compress.process_group.ranks import GroupRanks
from hvd_compress.process_group.stateful import expect_own_names
from hvd_compress.process_group.step import Bucket, Step


class ProcessGroupCompressor(CompressorBase):
    """A :class:`CompressorBase` among the ranks of a process group: the base of the frontends' compressors.

    A frontend puts tensors into buckets with :attr:`_packer`, and adds the buckets to a step, which
    :meth:`_begin` makes.

    Args:
        slots: see :class:`CompressorBase`, also for ``codec`` and ``options``.
        ranks: the ranks.
    """

    _chained = True
    _ranks: GroupRanks
    _packer: Packer
    _choices: Sequence[Route] = ()
    """The routes among which a planner chooses."""

    def __init__(
        self,
        slots: Iterable[Slot],
        codec: Codec | Route | str,
        ranks: GroupRanks,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(slots, codec, ranks, **options)
        self._options = options

    @classmethod
    def compress(cls, tensor: Any) -> NoReturn:
        """Raises ``TypeError``: Horovod calls it if this compressor was given as ``compression``."""
        refuse(f"one of {cls.__module__}", "codec")

    def __getstate__(self) -> dict[str, Any]:
        """The arguments, and what has changed since; the first use of the copy joins the process group.

        Raises:
            TypeError: the compressor is not one of the default process group.
            ExchangeError: gradients are being exchanged.
        """
        self._ranks.expect_default("pickle or copy")
        self._ranks.expect_idle("pickle or copy")
        self._kernels.settle()
        group = self._ranks.group if self._ranks.joined else None
        return {
            "slots": list(self._slots),
            "codec": self._routes.router.route,
            "options": {**self._options, "grad_scaler": self._grad_scaler},
            "rules": self._routes.rules,
            "counters": self.counters,
            "exchanged": self._use.exchanged,
            "origin": (group.rank, group.size) if group else self._ranks.origin,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        ranks, options = GroupRanks(), state["options"]
        ProcessGroupCompressor.__init__(self, state["slots"], state["codec"], ranks, **options)
        continue_copy(self, state)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, noise positions and owned parts; every rank saves its own state.

        For the rest, see :meth:`.CompressorBase.state_dict`.

        Raises:
            TypeError: torch.distributed.checkpoint asks for it, and not for that of a ``RankStates``.
        """
        expect_own_names("state_dict")
        return super().state_dict()

    def _bind(self) -> None:
        ranks = self._ranks
        if ranks.joined:
            return
        ranks.connect(device_of(slot.parameter for slot in self._slots))
        self._join()
        self._packer = Packer(self._batches, self._routes, ranks.device)
        if ranks.origin is None:
            self._routes.choose(list(self._slots))
        else:
            ranks.expect_origin(self._slots)
            self._routes.check_again()
        ranks.joined = True

    def _join(self) -> None:
        router = self._routes.router
        possible = (router.route, *router.encoding, *self._choices)
        self._ranks.join(hierarchical=any(one.exchange == "hierarchical" for one in possible))
        super()._join()

    def _between_steps(self) -> None:
        """Called by every rank before a step's first gradient, when none is being exchanged."""

    def _agree(self) -> None:
        """Waits for the other ranks, unless they are known to agree; :meth:`_begin` does not wait.

        Raises:
            ExchangeError: the ranks' configurations differ (raised on every rank).
        """
        if not self._ranks.agreed:
            self._ranks.agree(self._configuration(), self._slots)

    def _begin(
        self,
        *,
        asks: bool = False,
        anywhere: Callable[[bool | torch.Tensor], bool | torch.Tensor] | None = None,
    ) -> Step:
        """Begins a step.

        Args:
            asks: whether the step compares the ranks' configurations before it sends.
            anywhere: see :class:`Step`.
        """
        ranks = self._ranks
        self._begin_encoding()
        ranks.begin_step()
        asked = Agreement(ranks.collectives, self._configuration()) if asks else None

        def count(buckets: Iterable[Bucket]) -> None:
            for bucket in buckets:
                bucket.count(self.counters)

        return Step(
            ranks.collectives,
            ranks.driver,
            asked,
            lambda: ranks.prepare(self._slots),
            count,
            anywhere,
        )


def continue_copy(copy: ProcessGroupCompressor, state: dict[str, Any]) -> None:
    """Gives a copy, made with the same arguments, what has changed since."""
    copy._routes.rules = state["rules"]
    copy.counters = state["counters"]
    if state["exchanged"]:
        copy._use.begin()
    copy._ranks.origin = state["origin"]
    if copy.counters.encoded_elements:
        copy._first_step = None
