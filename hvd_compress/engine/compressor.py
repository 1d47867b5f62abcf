"""Gradients to payloads and back, and everything that has to be kept for it from step to step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.codecs.base import check_number, check_threads
from hvd_compress.codecs.payload import FORMAT_VERSION
from hvd_compress.codecs.registry import scheme_of
from hvd_compress.engine import owner_steps
from hvd_compress.engine.batch_cache import BatchCache
from hvd_compress.engine.encode_context import EncodeContext
from hvd_compress.engine.executors import Executors
from hvd_compress.engine.owner_steps import OwnerStep
from hvd_compress.engine.slots import Owned, Slot
from hvd_compress.engine.state import resize, restore, snapshot
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.layout import Member
from hvd_compress.exchanges.packing import packs
from hvd_compress.exchanges.registry import EXCHANGES, Group
from hvd_compress.exchanges.routing import (
    DEFAULT_THRESHOLD,
    EXCHANGE_NAMES,
    Route,
    Router,
    matching,
    warn_of_growth,
    warn_of_places,
)
from hvd_compress.ranks.counters import Counters
from hvd_compress.ranks.errors import ExchangeError


class CompressorBase:
    """One rank's codecs, residuals, noise positions and counters: the base of the frontends' compressors.

    Knows no collective. The arguments are those of the frontends' ``Compressor``, and so are the errors.
    A frontend says by :meth:`_join` which ranks there are, when it is made or before its first use.

    Args:
        slots: the parameters.
        codec: what gradients are encoded with.
        feedback: coefficients of error feedback.
        exchange: how payloads travel.
        owner_step: what owners of parts do with averages, or None.
        chained: as for :class:`hvd_compress.engine.executors.Executors`.
    """

    def __init__(
        self,
        slots: Iterable[Slot],
        codec: Codec,
        feedback: ErrorFeedback,
        *,
        exchange: str = EXCHANGE_NAMES[0],
        owner_step: OwnerStep | None = None,
        threshold: int = DEFAULT_THRESHOLD,
        exclude: Sequence[str] = (),
        layers: Mapping[str, Codec | str | None] | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
        grad_scaler: Any | None = None,
        threads: int | None = None,
        chained: bool = False,
    ) -> None:
        check_number("Compressor", "warmup_steps", warmup_steps, 0, 2**63 - 1, integer=True)
        check_number("Compressor", "seed", seed, 0, 2**32 - 1, integer=True)
        if threads is not None:
            check_threads("Compressor", threads)
        if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
            raise TypeError(
                f"Compressor.grad_scaler: expected a GradScaler, got {type(grad_scaler).__name__}"
            )
        owner_steps.check(owner_step, exchange)
        self._slots = slots
        self._exchange = exchange
        self._owner_step = owner_step
        self._threads = threads or torch.get_num_threads()
        self._kernels = Executors(self._threads, chained=chained)
        self._grad_scaler = grad_scaler
        self._router = Router(Route(codec, feedback, exchange), threshold, exclude, layers)
        names = [slot.name for slot in self._slots]
        if names:  # Tensors may come later, by names that are not known yet.
            self._router.check_patterns(names)
        self._warmup_steps = warmup_steps
        self._seed = seed
        self.counters = Counters()

    def __getstate__(self) -> dict[str, Any]:
        """What pickling and copying keep: settings, parameters, residuals and positions in the noise.

        Raises:
            TypeError: a compressor of this frontend cannot be copied.
            ExchangeError: gradients are on their way.
        """
        raise TypeError(
            f"{type(self).__name__}: expected no pickle or copy of a compressor of "
            f"{type(self).__module__}, got one: keep what state_dict() returns, and make a compressor for "
            f"the other model"
        )

    @property
    def warmup_steps(self) -> int:
        """Steps at the start that go uncompressed."""
        return self._warmup_steps

    def _join(self, group: Group) -> None:
        """Takes a place among ranks; the frontend chooses all routes then."""
        self._group = group
        self._rank, self._size = group.rank, group.size
        self._encoder = EncodeContext(self._kernels, self._seed, group.rank, self._grad_scaler)
        self._batches = BatchCache(self._encoder, group, self._owner_step)

    def _bind(self) -> None:
        """Calls :meth:`_join`, in a frontend that has not done so when it was made."""

    def set_codec(
        self,
        codec: Codec,
        feedback: ErrorFeedback | None = None,
        layers: str = "*",
    ) -> None:
        """Changes the codec between two steps, on every rank alike.

        A residual that the new codec does not carry on is added to the next gradient: nothing is lost.

        Args:
            codec: the new codec.
            feedback: its error feedback; None is that of its paper.
            layers: name pattern of the parameters it is for; thresholds and exclusions stay in force.

        Raises:
            ExchangeError: gradients are still on their way.
        """
        self._bind()
        self._expect_idle("set_codec")
        feedback = scheme_of(codec).feedback if feedback is None else feedback
        route = Route(codec, feedback, self._exchange)
        found = set(matching(layers, [slot.name for slot in self._slots], "set_codec"))
        chosen = [slot for slot in self._slots if slot.name in found]
        self._choose_routes(chosen, self._router.with_route(route))

    def routes(self) -> dict[str, Route]:
        """How each parameter's gradient travels, by name."""
        self._bind()
        return {slot.name: slot.route for slot in self._slots}

    def residual_norm(self) -> float:
        """The l2 norm of all residuals of this rank together, loss scaling taken out."""
        self._kernels.settle()
        kept = [holder for slot in self._slots for holder in (slot, slot.owned) if holder]
        squares = [
            self._kernels.square_sum(holder.residual) / holder.residual_scale**2
            for holder in kept
            if holder.residual is not None
        ]
        self._kernels.check()
        return sum(squares) ** 0.5

    def reset_counters(self) -> None:
        """Sets :attr:`counters` to zero."""
        self.counters = Counters()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, noise positions and owned parts; every rank saves its own.

        Tensors are references, as in ``torch.optim``; ``torch.save`` or a deep copy keeps them.

        Raises:
            ExchangeError: gradients are on their way: call it after ``step()``.
        """
        self._bind()
        self._expect_idle("state_dict")
        self._kernels.settle()
        return snapshot(self._slots, self._rank, self._size, self._seed)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where :meth:`state_dict` of the same rank left off.

        Raises:
            ValueError: another rank, number of ranks, seed or model, or an owner step's state for parts
                that ranks do not own now; nothing is changed then.
            ExchangeError: gradients are on their way; nothing is changed then.
        """
        self._bind()
        self._expect_idle("load_state_dict")
        self._restore(state)

    def load_resized(self, states: Iterable[dict[str, Any]]) -> None:
        """Continues where a job with another number of ranks left off.

        What was not sent keeps its part in the ranks' average, on other ranks
        (:mod:`hvd_compress.ranks.resize`).

        Args:
            states: the :meth:`state_dict` of every rank of that job, in any order.

        Raises:
            ValueError: not one state of each rank, another seed or model; nothing is changed then.
            ExchangeError: gradients are on their way; nothing is changed then.
        """
        self._bind()
        self._expect_idle("load_resized")
        state = resize(self._slots, states, self._rank, self._size, self._owned_by)
        self._restore(state)

    def _restore(self, state: dict[str, Any]) -> None:
        restore(self._slots, state, self._rank, self._size, self._seed, self._owned_by)

    def _owned_by(self, slot: Slot) -> Owned | None:
        """An empty record of what this rank owns of a parameter; None where the exchange has no owners."""
        owners = (
            None if slot.route.uncompressed else EXCHANGES[slot.route.exchange].owners(self._group)
        )
        member = Member(slot.index, slot.shape, slot.route.codec)
        return None if owners is None else Owned(*owners.owned(member))

    def _expect_idle(self, what: str) -> None:
        """Raises ``ExchangeError`` while gradients are on their way."""
        if self._busy():
            raise ExchangeError(
                f"{what}: expected no gradient on its way, got one between backward() and step(): "
                f"residuals and positions belong to a whole step; call it after step()"
            )

    def _begin_encoding(self) -> None:
        """Called before a step's first gradient."""
        self._encoder.begin_step()
        self._batches.begin_step()

    def _busy(self) -> bool:
        """Whether gradients are on their way."""
        raise NotImplementedError

    def _goes_uncompressed(self, slot: Slot) -> bool:
        """Whether the next gradient is added up as it is, without an owner."""
        return slot.route.uncompressed or (self._warming_up(slot) and self._owner_step is None)

    def _warming_up(self, slot: Slot) -> bool:
        """Whether the next gradient is one of the cold start."""
        return slot.exchanges < self._warmup_steps

    def _forget_agreement(self) -> None:
        """Has the ranks compare their configurations again."""
        raise NotImplementedError

    def _check_route(self, slot: Slot, route: Route) -> None:
        """Raises ``ValueError`` where a parameter's gradients cannot take a route."""
        exchange = EXCHANGES[route.exchange]
        device = slot.parameter.device
        if not exchange.on_device and device.type != "cpu":
            raise ValueError(
                f"{slot.name}: expected a parameter in the memory of the CPU for "
                f"exchange={route.exchange!r}, got one on {device}: its kernels are for CPUs; use another "
                f"exchange"
            )
        width = slot.parameter.element_size()
        exchange.check(slot.name, slot.shape, route.codec, width, self._group)
        owned, owners = slot.owned, exchange.owners(self._group)
        if owned is not None and owned.state and owners is not None:
            member = Member(slot.index, slot.shape, route.codec)
            if owners.owned(member) != owned.part:
                raise ValueError(
                    f"{slot.name}: expected a codec under which the ranks own the parts that their "
                    f"owner_step has a state for, got {route.codec}: columns and rows are cut in "
                    f"another way; make a compressor with that codec, and load_resized() the states"
                )

    def _choose_routes(self, slots: list[Slot], router: Router | None = None) -> None:
        """Gives slots their routes."""
        router = router or self._router
        chosen = []
        for slot in slots:
            dtype = str(slot.parameter.dtype).removeprefix("torch.")
            route = router.choose(slot.name, slot.shape, dtype)
            if not route.uncompressed:
                self._check_route(slot, route)
                warn_of_growth(slot.name, slot.shape, route, slot.parameter.element_size())
                warn_of_places(slot.name, route, slot.parameter.device.type)
            chosen.append((slot, route))
        self._set_routes(chosen)

    def _set_routes(self, routes: Iterable[tuple[Slot, Route]]) -> None:
        """Has gradients travel in other ways from now on."""
        for slot, route in routes:
            slot.route = route
        self._batches.forget_plans()
        self._forget_agreement()

    def _take_routes_again(self) -> None:
        """Has gradients travel as before, among other ranks."""
        routes = [(slot, slot.route) for slot in self._slots]
        for slot, route in routes:
            if not route.uncompressed:
                self._check_route(slot, route)
        self._set_routes(routes)

    def _hosts_in_use(self) -> Hosts | None:
        """The hosts, where some gradient travels within and between them."""
        used = {slot.route.exchange for slot in self._slots if not slot.route.uncompressed}
        stages = {scope for exchange in used for scope in EXCHANGES[exchange].stages}
        return self._group.hosts if stages & {"local", "cross"} else None

    def _configuration(self, slots: Iterable[Slot] | None = None) -> dict[str, Any]:
        """What ranks compare: the settings, and what the next payloads of all or some slots depend on."""
        tensors = {}
        for slot in self._slots if slots is None else slots:
            dtype = str(slot.parameter.dtype).removeprefix("torch.")
            packed = packs(slot.route.codec, slot.parameter.device.type)
            tensors[slot.name] = (
                f"{dtype} {list(slot.shape)} by {slot.route}{', packed' * packed}, step {slot.step}"
            )
        return {
            "format version": FORMAT_VERSION,
            "ranks": self._size,
            "seed": self._seed,
            "warmup_steps": self._warmup_steps,
            "owner_step": owner_steps.describe(self._owner_step),
            "gradient of": tensors,
            # Of some slots, others may be on their way, and ranks learn lengths at different times.
            **({} if slots is not None else {"lengths of messages": self._batches.lengths()}),
        }

    @staticmethod
    def _sent_dtype(slot: Slot, gradient: torch.Tensor, warming_up: bool) -> torch.dtype:
        """In what an uncompressed gradient travels."""
        wanted = None if warming_up else slot.route.cast_dtype
        if wanted is not None and gradient.dtype == torch.float32:
            return getattr(torch, wanted)
        return gradient.dtype
