"""The routes of a compressor's gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch

from hvd_compress.engine import owner_steps
from hvd_compress.engine.batches import Batches
from hvd_compress.engine.owner_steps import OwnerStep
from hvd_compress.engine.parameters import Slot
from hvd_compress.engine.ranks import Ranks
from hvd_compress.engine.residuals import Owned
from hvd_compress.engine.use import TorchUse
from hvd_compress.exchanges.layout import Member
from hvd_compress.exchanges.registry import EXCHANGES
from hvd_compress.exchanges.routing import (
    ENCODABLE,
    UNCOMPRESSED_ROUTE,
    Route,
    Router,
    check_feedback,
    warn_of_dtypes,
    warn_of_growth,
    warn_of_nothing,
)

_ENCODABLE = {getattr(torch, name) for name in ENCODABLE}


class Routes:
    """Chooses, checks and describes the routes of a compressor's gradients.

    Args:
        slots: the parameters, whose :attr:`Slot.route` this class sets.
        router: the rules of the compressor's arguments.
        ranks: the ranks that exchange the gradients.
        use: the compressor's record of its use, which knows the codecs.
        warmup_steps: the number of steps at the start in which gradients are sent uncompressed.
        owner_step: the compressor's argument of that name.

    Attributes:
        router, warmup_steps: the arguments of these names.
        rules: name patterns of later calls of ``set_codec``, and their routers, the latest first.
        batches: the compressor's batches, whose plans depend on routes; set when it joins the ranks.
    """

    batches: Batches

    def __init__(
        self,
        slots: Iterable[Slot],
        router: Router,
        ranks: Ranks,
        use: TorchUse,
        warmup_steps: int,
        owner_step: OwnerStep | None,
    ) -> None:
        self._slots = slots
        self.router = router
        self.rules: list[tuple[str, Router]] = []
        self._ranks = ranks
        self._use = use
        self.warmup_steps = warmup_steps
        self._owner_step = owner_step
        # The slots whose routes are checked when their parameters are trained.
        self._frozen: set[Slot] = set()
        # The dtype, the shape and the route of slots, as text.
        self._formats: dict[Slot, tuple[Route, torch.dtype, str]] = {}
        # Tensors may come later, by names that are not known yet.
        self._open = not list(slots)
        self._asked: Router | None = None
        self._warned_of_nothing = False

    @property
    def exchange(self) -> str:
        """The exchange of codecs that come without one."""
        return self.router.route.exchange

    @property
    def trained(self) -> list[Slot]:
        """The slots of the parameters that are trained now."""
        return [slot for slot in self._slots if not slot.frozen]

    @property
    def hierarchical(self) -> bool:
        """Whether the exchange of some gradient distinguishes hosts."""
        used = {slot.route.exchange for slot in self._slots if not slot.route.uncompressed}
        stages = {scope for exchange in used for scope in EXCHANGES[exchange].stages}
        return bool(stages & {"local", "cross"})

    def router_of(self, name: str) -> Router:
        """The router whose rules hold for a parameter."""
        return next((one for layers, one in self.rules if fnmatchcase(name, layers)), self.router)

    def expected(self, slot: Slot, dtype: str) -> Route:
        """The route that a tensor will get which no call has brought yet."""
        route = self.router_of(slot.name).choose(slot.name, slot.shape, dtype)
        return route.among(self._ranks.group.size) if hasattr(self._ranks, "group") else route

    def change(self, layers: str, slots: Sequence[Slot], route: Route) -> None:
        """Changes the routes of the slots that match a name pattern, and of later ones.

        For errors, see :meth:`check`; nothing is changed then.
        """
        router = self.router.with_route(route)
        self.choose(slots, router)
        self.rules = [(layers, router), *(rule for rule in self.rules if rule[0] != layers)]

    def choose(self, slots: Sequence[Slot], router: Router | None = None) -> None:
        """Sets the routes of slots by a router; by default, by :meth:`router_of` the slots' names.

        The routes of frozen parameters are not checked until the parameters are trained, because their
        gradients are not sent before.
        """
        chosen = []
        too_wide = {}
        for slot in slots:
            asked = router or self.router_of(slot.name)
            route = asked.wanted(slot.name, slot.shape).among(self._ranks.group.size)
            if route.uncompressed and slot.owned is not None and slot.owned.state:
                warnings.warn(
                    f"{slot.name}: owner_step no longer steps it: its gradients go uncompressed",
                    stacklevel=3,
                )
            if not route.uncompressed and slot.dtype not in ENCODABLE:
                if not slot.frozen:
                    too_wide[slot.name] = slot.dtype
                route = UNCOMPRESSED_ROUTE
            self._frozen.discard(slot)
            if slot.frozen:
                self._frozen.add(slot)
            else:
                self._take(slot, route)
            chosen.append((slot, route))
        warn_of_dtypes(too_wide)
        self.set(chosen)
        if slots:
            self.expect_encoding(router or self.router_of(slots[-1].name))

    def set(self, routes: Iterable[tuple[Slot, Route]]) -> None:
        """Changes the routes of the gradients that follow, without a check."""
        for slot, route in routes:
            slot.route = route
        self._use.note_codecs(slot.route.codec.name for slot in self._slots)
        self._formats.clear()
        self.batches.forget_plans()
        self._ranks.forget_agreement()

    def check_again(self) -> None:
        """Checks the present routes among other ranks, and keeps them; ``"auto"`` follows their number."""
        routes = [(slot, slot.route.among(self._ranks.group.size)) for slot in self._slots]
        for slot, route in routes:
            if not route.uncompressed:
                self.check(slot, route)
        self.set(routes)

    def check(self, slot: Slot, route: Route) -> None:
        """Raises ``ValueError`` if a parameter's gradients cannot use a route."""
        self._ranks.check(slot, route)
        check_feedback(slot.name, slot.shape, route)
        owner_steps.check(self._owner_step, route.exchange, slot.name)
        exchange, group = EXCHANGES[route.exchange], self._ranks.group
        device = slot.parameter.device
        if exchange.experimental and device.type != "cpu":
            raise ValueError(
                f"{slot.name}: expected a parameter in the memory of the CPU for "
                f"exchange={route.exchange!r}, got one on {device}: NumPy computes it; use another exchange"
            )
        if route.codec.varies and device.type != "cpu":
            raise ValueError(
                f"{slot.name}: expected a parameter in the memory of the CPU for {route.codec}, got one on "
                f"{device}: only CPUs have kernels for the entropy code; write coding='plain', which gives "
                f"the same numbers"
            )
        route.check(slot.name, slot.shape, slot.parameter.element_size(), group)
        owned, owners = slot.owned, exchange.owners(group)
        if owned is not None and owned.state and owners is not None:
            member = Member(slot.index, slot.shape, route.codec)
            if owners.owned(member) != owned.part:
                raise ValueError(
                    f"{slot.name}: expected a codec under which the ranks own the parts that their "
                    f"owner_step has a state for, got {route.codec}: columns and rows are cut in "
                    f"another way; make a compressor with that codec, and load_resized() the states"
                )

    def take_up(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Checks every gradient for changes since the parameter's route was chosen.

        Raises:
            TypeError, ValueError: the parameter was frozen at that time, and its gradients cannot use the
                route; or the gradient has a dtype or shape that the route was not chosen for.
        """
        if slot in self._frozen:
            self._take(slot, slot.route)
            self._frozen.remove(slot)
        if gradient.shape != slot.shape and slot.parameter.shape != slot.shape:
            got = f"shape {tuple(slot.parameter.shape)}"
        elif not slot.route.uncompressed and gradient.dtype not in _ENCODABLE:
            got = f"dtype {str(gradient.dtype).removeprefix('torch.')}"
        else:
            return
        raise TypeError(
            f"{slot.name}: expected a gradient of dtype {', '.join(ENCODABLE)} and shape {slot.shape}, as "
            f"when the compressor was made, got {got}: make the compressor again after the model's last "
            f"change"
        )

    def without_gradients(self) -> list[Slot]:
        """The slots of parameters that are trained by now, but whose gradients have not come since.

        Each slot is returned once.
        """
        left = [s for s in self._frozen if s.parameter.grad is not None and not s.frozen]
        self._frozen.difference_update(left)
        return left

    def expect_encoding(self, router: Router | None = None) -> None:
        """Warns, once, if a router's routes encode gradients, and no gradient is large enough.

        Args:
            router: the router; None is the latest one for which more tensors might have come, if any.
        """
        if router is not None and self._open:
            self._asked = router
            return
        router, self._asked = router or self._asked, None
        trained = self.trained
        if router is None or self._warned_of_nothing or self._ranks.group.size == 1:
            return
        if all(slot.route.uncompressed for slot in trained):
            shapes = {slot.name: slot.largest for slot in trained if slot.dtype in ENCODABLE}
            self._warned_of_nothing = warn_of_nothing(router, shapes)

    def warming_up(self, slot: Slot) -> bool:
        """Whether the next gradient belongs to the warm-up."""
        return slot.exchanges < self.warmup_steps

    def goes_uncompressed(self, slot: Slot) -> bool:
        """Whether the ranks add the next gradient without encoding it, and without owners."""
        return slot.route.uncompressed or (self.warming_up(slot) and self._owner_step is None)

    def owned_by(self, slot: Slot) -> Owned | None:
        """An empty record of this rank's part of a parameter; None if the exchange has no owners."""
        route, group = slot.route, self._ranks.group
        owners = None if route.uncompressed else EXCHANGES[route.exchange].owners(group)
        member = Member(slot.index, slot.shape, route.codec)
        return None if owners is None else Owned(*owners.owned(member))

    def describe(self, slots: Iterable[Slot]) -> dict[str, str]:
        """The dtype, shape, route and step of slots by name, as texts that ranks compare."""
        found, last = {}, self.warmup_steps
        for slot in slots:
            # Ranks that differ would not end the warm-up together.
            warmup = f", {min(slot.exchanges, last)} of {last} warm-up steps over" if last else ""
            found[slot.name] = f"{self._format(slot)}, step {slot.step}{warmup}"
        return found

    def _format(self, slot: Slot) -> str:
        """The format of a slot's gradients; described again only after a change."""
        route, dtype = slot.route, slot.parameter.dtype
        known = self._formats.get(slot)
        if known is None or known[0] is not route or known[1] != dtype:
            known = route, dtype, f"{slot.dtype} {list(slot.shape)} by {route}"
            self._formats[slot] = known
        return known[2]

    def _take(self, slot: Slot, route: Route) -> None:
        """Checks that a parameter's gradients can use a route, and warns if it has drawbacks for them."""
        if not route.uncompressed:
            self.check(slot, route)
            warn_of_growth(slot.name, slot.shape, route, slot.parameter.element_size())


def sent_dtype(route: Route, gradient: torch.Tensor, *, warming_up: bool) -> torch.dtype:
    """The dtype in which an uncompressed gradient is sent."""
    wanted = None if warming_up else route.cast_dtype
    if wanted is not None and gradient.dtype == torch.float32:
        return getattr(torch, wanted)
    return gradient.dtype
