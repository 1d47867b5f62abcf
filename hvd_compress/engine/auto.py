"""The common base of the frontends' ``Auto``, which time steps and follow a planner's decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from hvd_compress.engine.compressor import CompressorBase
from hvd_compress.engine.parameters import Slot
from hvd_compress.engine.planned import PlannedRoutes, position_of, state_of
from hvd_compress.engine.state_checks import expect_state
from hvd_compress.exchanges.routing import CodecLike, Route
from hvd_compress.planner import explain
from hvd_compress.planner.planner import check_state


class Planning(CompressorBase):
    """The base of a frontend's ``Auto``, listed before the frontend's ``Compressor``.

    In the first steps, a few short messages and encodings are timed, the cost of every plan is predicted,
    and the best plans are tried for a few steps each, no compression always among them
    (:mod:`hvd_compress.planner`). The fastest plan stays, until the network changes. All ranks decide the
    same. A change of plan loses nothing: what an earlier codec has not sent is added to the next gradient.

    The frontend calls :meth:`_plan` when it has joined the ranks and knows its tensors, and
    :meth:`.PlannedRoutes.end_step` at a place that all ranks reach while no gradient is being exchanged.

    Args:
        codecs: the encodings to choose from, besides none: codecs, :class:`~hvd_compress.Route` objects or
            names of codecs.
        exchanges: the exchanges to choose from; those that cannot be used here are left out.
        options: those of the frontend's ``Compressor``, except for ``chosen``. Nothing is measured in the
            ``warmup_steps``, in which gradients travel uncompressed.

    Attributes:
        _choices: the routes that the user allows; the frontend sets them before it makes the compressor.
        chosen: the arguments of the compressor that the planner chooses, and that ``Auto`` does not take.
    """

    chosen: ClassVar[tuple[str, ...]] = ("feedback", "exchange", "layers", "owner_step")

    _choices: Sequence[Route]
    _planned: PlannedRoutes | None = None
    """None until the frontend knows its tensors."""
    _saved_plan: dict[str, Any] | None = None
    """The state of an earlier planner, from which the next one goes on."""

    @property
    def settled(self) -> bool:
        """Whether the plan has been chosen, or there is nothing to choose; the same on every rank."""
        self._bind()
        return self._planned is not None and self._planned.planner.settled

    def explain(self) -> str:
        """Explains the choice of the gradients' routes.

        The text lists the measurements, the predicted and the measured cost of every plan, and the route of
        each tensor. It is the same on every rank, and is not meant to be parsed.
        """
        self._bind()
        if self._planned is None:
            return "nothing is planned yet: the tensors are not known before the first exchange"
        return explain.explain(self._planned.planner)

    def set_codec(self, codec: CodecLike, layers: str = "*") -> None:
        """Raises ``ValueError``, because the planner chooses codecs."""
        raise ValueError(
            "set_codec: expected a compressor with a codec of its own, got Auto, which chooses among "
            "codecs=(...)"
        )

    def state_dict(self) -> dict[str, Any]:
        """The same as :meth:`Compressor.state_dict`, with the state of the planner."""
        return {**super().state_dict(), "planner": state_of(self._planned, self._saved_plan)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The same as :meth:`Compressor.load_state_dict`; a plan that was already chosen stays in use.

        The state may be that of a compressor without a planner; then everything is measured again.
        """
        self._bind()
        self._ranks.meet("load_state_dict")
        expect_state("load_state_dict", state)
        planner = state.get("planner")
        if planner is not None:
            check_state("load_state_dict", planner)
        super().load_state_dict(state)
        self._saved_plan = planner
        self._plan()

    def load_resized(self, states: Any) -> None:
        """The same as :meth:`Compressor.load_resized`; then plans anew for the new number of ranks."""
        super().load_resized(states)
        self._saved_plan = None
        self._plan()

    def _configuration(self, slots: Iterable[Slot] | None = None) -> dict[str, Any]:
        return {**super()._configuration(slots), **position_of(self._planned)}

    def _plan(self) -> None:
        """Begins to plan for the present tensors, or goes on with the plan of a saved state."""
        parts = self._slots, self._ranks, self._routes, self._kernels
        self._planned = PlannedRoutes(*parts, self._choices, lambda: self.counters)
        if self._saved_plan is not None:
            self._planned.planner.restore(self._saved_plan)
            self._saved_plan = None
        self._planned.begin()
