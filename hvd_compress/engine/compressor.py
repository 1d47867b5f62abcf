"""The base of PyTorch's compressors: settings, routes, and the state that is kept from step to step."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.codecs.checks import check_choice, check_number, check_threads
from hvd_compress.codecs.payload import FORMAT_VERSION
from hvd_compress.engine import owner_steps
from hvd_compress.engine.batches import Batches
from hvd_compress.engine.executors import Executors
from hvd_compress.engine.first_step import FirstStep
from hvd_compress.engine.owner_steps import OwnerStep
from hvd_compress.engine.plan import Common
from hvd_compress.engine.residuals import LastExchange, Owned
from hvd_compress.engine.slots import Slot
from hvd_compress.engine.state import begin_with, resize, restore, snapshot
from hvd_compress.engine.use import TorchUse
from hvd_compress.exchanges.comm import Group
from hvd_compress.exchanges.hosts import Hosts
from hvd_compress.exchanges.layout import Member
from hvd_compress.exchanges.registry import EXCHANGES
from hvd_compress.exchanges.routing import (
    DEFAULT_THRESHOLD,
    ENCODABLE,
    EXCHANGE_CHOICES,
    UNCOMPRESSED_ROUTE,
    CodecLike,
    Route,
    Router,
    check_feedback,
    matching,
    route_of,
    warn_of_dtypes,
    warn_of_growth,
    warn_of_nothing,
)
from hvd_compress.ranks.counters import Counters
from hvd_compress.ranks.errors import ExchangeError
from hvd_compress.ranks.launch import say_alone

_ENCODABLE = {getattr(torch, name) for name in ENCODABLE}
_NORM_PART = 1 << 22


class CompressorBase:
    """The base of the frontends' compressors: one rank's codecs, residuals, noise positions and counters.

    This class starts no collectives. A frontend calls :meth:`_join` with its ranks when the compressor is
    made, or before the compressor's first use. For the other arguments, see
    :class:`~hvd_compress.engine.options.Options`.

    Args:
        slots: the parameters.
        codec: the codec of the gradients: a codec, a :class:`~hvd_compress.Route` or a codec's name.
    """

    _chained: ClassVar[bool] = False
    """The argument ``chained`` of :class:`hvd_compress.engine.executors.Executors`."""
    _idle_after: ClassVar[str] = "a backward pass that has come to its end"
    _remedy: ClassVar[str]
    """The advice for a script whose gradients have not been exchanged."""

    def __init__(
        self,
        slots: Iterable[Slot],
        codec: Codec | Route | str,
        *,
        feedback: ErrorFeedback | None = None,
        exchange: str = EXCHANGE_CHOICES[0],
        owner_step: OwnerStep | None = None,
        threshold: int = DEFAULT_THRESHOLD,
        exclude: Sequence[str] = (),
        layers: Mapping[str, CodecLike] | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
        grad_scaler: Any | None = None,
        threads: int | None = None,
    ) -> None:
        check_number("Compressor", "warmup_steps", warmup_steps, 0, 2**63 - 1, integer=True)
        check_number("Compressor", "seed", seed, 0, 2**32 - 1, integer=True)
        if threads is not None:
            check_threads("Compressor", threads)
        if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
            raise TypeError(
                f"Compressor.grad_scaler: expected a GradScaler, got {type(grad_scaler).__name__}"
            )
        check_choice("Compressor", "exchange", exchange, EXCHANGE_CHOICES)
        route = route_of(codec, exchange, "Compressor.codec")
        if feedback is not None:
            route = replace(route, feedback=feedback)
        owner_steps.check(owner_step, route.exchange, "Compressor")
        self._slots = slots
        self._exchange = route.exchange
        # The slots whose routes are checked when their parameters are trained.
        self._frozen: set[Slot] = set()
        # The dtype, the shape and the route of slots, as text: see _format_of().
        self._formats: dict[Slot, tuple[Route, torch.dtype, str]] = {}
        self._owner_step = owner_step
        self._owner_step_text = owner_steps.describe(owner_step)
        self._threads = threads or torch.get_num_threads()
        self._kernels = Executors(self._threads, chained=self._chained)
        self._grad_scaler = grad_scaler
        self._last = LastExchange()
        self._first_step: FirstStep | None = FirstStep()
        self._router = Router(route, threshold, exclude, layers)
        names = [slot.name for slot in self._slots]
        if names:  # Tensors may come later, by names that are not known yet.
            self.check_patterns(names)
        self._warmup_steps = warmup_steps
        self._seed = seed
        # Since the ranks have compared their configurations last.
        self._resets = 0
        self._warned_of_nothing = False
        self.counters = Counters()
        parameters = [slot.parameter for slot in self._slots]
        name = f"{type(self).__name__} {route}"
        self._use = TorchUse(name, self._remedy, parameters, self._ranks_of_job)

    def __repr__(self) -> str:
        return self.counters.shown(type(self).__name__, self._router.route)

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickling and copying: settings, parameters, residuals and positions in the noise.

        Raises:
            TypeError: a compressor of this frontend cannot be copied.
            ExchangeError: gradients are being exchanged.
        """
        package = ".".join(type(self).__module__.split(".")[:2])
        raise TypeError(
            f"{type(self).__name__}: expected no pickle or copy of a compressor of {package}, got one: "
            f"keep what state_dict() returns, and make a compressor for the other model"
        )

    @property
    def warmup_steps(self) -> int:
        """The number of steps at the start in which gradients are sent uncompressed."""
        return self._warmup_steps

    def check_patterns(self, names: Sequence[str]) -> None:
        """Raises ``ValueError`` if a pattern in ``exclude`` or ``layers`` matches no parameter's name."""
        self._router.check_patterns(names)

    def _join(self, group: Group) -> None:
        """Sets the ranks, and this rank's place among them; the frontend then chooses all routes."""
        self._group = group
        self._rank, self._size = group.rank, group.size
        self._resets = 0
        if self._size == 1:
            say_alone()
        self._last.replace()
        self._batches = Batches(
            Common(self._kernels, group, self._seed, self._owner_step, self._last)
        )

    @staticmethod
    @abstractmethod
    def _ranks_of_job() -> int:
        """The number of ranks that train, as far as this process knows; 1 after the job's end."""

    def _bind(self) -> None:
        """Calls :meth:`_join`, in a frontend that does not do so when a compressor is made."""

    def set_codec(
        self,
        codec: Codec | Route | str | None,
        layers: str = "*",
    ) -> None:
        """Changes the codec between two steps; every rank must make the same call.

        Under DDP and FSDP2, ranks wait for each other in this call, at most for the process group's
        timeout, and none of them changes anything if some do not come. Before the first step, they do not
        wait.

        If the new codec does not use a residual, this residual is added to the next gradient, so that
        nothing is lost.

        Args:
            codec: the new codec, a :class:`~hvd_compress.Route`, a codec's name, or None for uncompressed.
            layers: the name pattern of the parameters that get the codec; thresholds and exclusions still
                apply.

        Raises:
            ExchangeError: gradients are still being exchanged; or, under DDP and FSDP2, some ranks have not
                come or have made another call.
        """
        self._bind()
        self._expect_idle("set_codec")
        route = route_of(codec, self._exchange, "set_codec")
        found = set(matching(layers, [slot.name for slot in self._slots], "set_codec"))
        chosen = [slot for slot in self._slots if slot.name in found]
        self._wait_for_ranks("set_codec", codec=str(route), layers=layers)
        self._choose_routes(chosen, self._router.with_route(route))

    def drop_step(self) -> None:
        """Undoes the last exchange if its results are not used; every rank has to call this method.

        The residuals of this rank's gradients, of the parts that this rank owns and of an earlier codec get
        their values from before that exchange, bit for bit; so does the state of an owner step. Without
        this call, error feedback would add the discarded gradients to later steps. Positions in the noise
        are not reset, and a step of the warm-up still counts.

        Nothing changes if there was no exchange yet, or if the last one was already dropped: by an earlier
        call, or on all ranks because of an Inf or a NaN.

        Raises:
            ExchangeError: gradients are being exchanged; or residuals were loaded, rebound or reset since
                the last exchange.
        """
        self._expect_idle("drop_step")
        self._last.take_back()

    def reset(self) -> None:
        """Discards what was not sent, for a model that returns to an earlier state; every rank calls it.

        Residuals of this rank's gradients, of an earlier codec and of the parts that this rank owns are
        discarded, with the right factors of low-rank approximations and the state of an owner step.
        Otherwise, the next steps would add gradients of the steps that the model has forgotten. Positions
        in the noise, the warm-up, routes and :attr:`counters` go on.

        Under DDP and FSDP2, ranks wait for each other as in :meth:`set_codec`. Otherwise, the next step
        raises an error on all ranks if only some of them have called this method.

        Raises:
            ExchangeError: gradients are being exchanged; or ranks are missing, as in :meth:`set_codec`.
        """
        self._expect_idle("reset")
        self._wait_for_ranks("reset")
        for slot in self._slots:
            begin_with(slot, None)
            slot.factor = None
        self._last.replace()
        self._resets += 1
        self._forget_agreement()

    def routes(self) -> dict[str, Route]:
        """The route of each parameter's gradient, by name; frozen parameters have none.

        Each route has the exchange that is used. With ``exchange="auto"``, its ``reason`` says why.
        """
        self._bind()
        return {slot.name: slot.route for slot in self._trained()}

    def _trained(self) -> list[Slot]:
        return [slot for slot in self._slots if not slot.frozen]

    def residual_norm(self) -> float:
        """The l2 norm of all residuals of this rank together, without loss scaling."""
        self._kernels.settle()
        norm = float(self._norm_on(torch.device("cpu")))
        self._kernels.check()
        return norm

    def _norm_on(self, device: torch.device) -> torch.Tensor:
        """The norm of :meth:`residual_norm`, shape=(), float64, on a device, for which it does not wait."""
        norms = [torch.zeros((), dtype=torch.float64, device=device)]
        for slot in self._slots:
            for holder in (slot, slot.owned):
                if holder is None or holder.residual is None:
                    continue
                # In parts: PyTorch copies them to float64.
                for part in holder.residual.reshape(-1).split(_NORM_PART):
                    norm = torch.linalg.vector_norm(part, dtype=torch.float64)
                    norms.append((norm / holder.residual_scale).to(device))
        return torch.linalg.vector_norm(torch.stack(norms))

    def metrics(self) -> dict[str, float]:
        """This rank's numbers for TensorBoard or Weights & Biases, by name.

        ``compression/bytes_per_step`` is the mean of ``counters.wire_bytes``, ``compression/ratio`` is
        ``counters.ratio``, and ``compression/residual_norm`` is :meth:`residual_norm`, which reads all
        residuals: call this where the script logs its loss, and not in every step.
        """
        return self.counters.metrics(self.residual_norm())

    def reset_counters(self) -> None:
        """Sets :attr:`counters` to zero."""
        self.counters = Counters()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, noise positions and owned parts; every rank saves its own state.

        Tensors are references, as in ``torch.optim``; ``torch.save`` or a deep copy preserves their values.

        Raises:
            ExchangeError: gradients are being exchanged.
        """
        self._bind()
        self._expect_idle("state_dict")
        self._kernels.settle()
        return snapshot(self._slots, self._rank, self._size, self._seed)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that :meth:`state_dict` returned on the same rank; every rank has to load.

        Residuals are in the units of gradients, and belong to no codec or exchange: another one than before
        sends them as well. If ranks own other parts now, the residual of the part in the state is added to
        the next gradient. Under DDP and FSDP2, ranks wait for each other as in :meth:`set_codec`.

        Raises:
            ValueError: the state is that of another rank, number of ranks, seed or model, or has an owner
                step's state for parts that the ranks do not own now; nothing is changed then.
            ExchangeError: gradients are being exchanged, or ranks are missing, as in :meth:`set_codec`;
                nothing is changed then.
        """
        self._begin_loading("load_state_dict")
        self._restore(state)

    def load_resized(self, states: Iterable[dict[str, Any]]) -> None:
        """Restores this rank's state from the states of a job with another number of ranks.

        Values that were not sent keep their weight in the ranks' average, on other ranks
        (:mod:`hvd_compress.ranks.resize`). Under DDP and FSDP2, ranks wait for each other as in
        :meth:`set_codec`.

        Args:
            states: the :meth:`state_dict` of every rank of that job, in any order.

        Raises:
            ValueError: there is not one state of each rank, or the states are those of another seed or
                model; nothing is changed then.
            ExchangeError: gradients are being exchanged, or ranks are missing, as in :meth:`set_codec`;
                nothing is changed then.
        """
        self._begin_loading("load_resized")
        state = resize(self._slots, states, self._rank, self._size, self._owned_by)
        self._restore(state)

    def _begin_loading(self, call: str) -> None:
        """Called by every rank before it looks at a state that it loads."""
        self._bind()
        self._expect_idle(call)
        self._wait_for_ranks(call)

    def _wait_for_ranks(self, call: str, **arguments: str) -> None:
        """Called before a call that every rank has to make changes anything; may wait for the other ranks.

        Raises:
            ExchangeError: not all ranks make the same call; nothing is changed then.
        """

    def _restore(self, state: dict[str, Any]) -> None:
        restore(self._slots, state, self._rank, self._size, self._seed, self._owned_by)
        self._last.replace()

    def _owned_by(self, slot: Slot) -> Owned | None:
        """An empty record of this rank's part of a parameter; None if the exchange has no owners."""
        owners = (
            None if slot.route.uncompressed else EXCHANGES[slot.route.exchange].owners(self._group)
        )
        member = Member(slot.index, slot.shape, slot.route.codec)
        return None if owners is None else Owned(*owners.owned(member))

    def _expect_idle(self, what: str) -> None:
        """Raises ``ExchangeError`` if gradients are being exchanged."""
        if self._busy():
            raise ExchangeError(
                f"{what}: expected no exchange in progress, got one: residuals and positions belong to a "
                f"whole exchange; call it after {self._idle_after}"
            )

    def _begin_encoding(self) -> None:
        """Begins a step; called before its first gradient.

        Raises:
            PayloadError: a device has found an altered payload in an earlier step.
            ExchangeError: a CUDA graph is being captured.
        """
        kernels = self._kernels
        if kernels.cuda is not None or kernels.later or torch.cuda.is_initialized():
            kernels.begin_step()
        scaler = self._grad_scaler
        if not self._use.exchanged:
            kept = any(route.feedback.enabled for route in self._router.encoding)
            self._use.begin(scaled=scaler is not None or not kept)
        self._last.begin()
        first = self._first_step
        if first is not None and (self._group.rank or first.log(self._slots, self.counters)):
            self._first_step = None
        # Once: reading the loss scale waits for a GPU.
        self._batches.common.loss_scale = 1.0 if scaler is None else float(scaler.get_scale())
        self._batches.begin_step()

    def _busy(self) -> bool:
        """Whether gradients are being exchanged."""
        raise NotImplementedError

    def _goes_uncompressed(self, slot: Slot) -> bool:
        """Whether the ranks add the next gradient without encoding it, and without owners."""
        return slot.route.uncompressed or (self._warming_up(slot) and self._owner_step is None)

    def _warming_up(self, slot: Slot) -> bool:
        """Whether the next gradient belongs to the warm-up."""
        return slot.exchanges < self._warmup_steps

    def _forget_agreement(self) -> None:
        """Makes the ranks compare their configurations again."""
        raise NotImplementedError

    def _check_route(self, slot: Slot, route: Route) -> None:
        """Raises ``ValueError`` if a parameter's gradients cannot use a route."""
        check_feedback(slot.name, slot.shape, route)
        owner_steps.check(self._owner_step, route.exchange, slot.name)
        exchange = EXCHANGES[route.exchange]
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
        width = slot.parameter.element_size()
        route.check(slot.name, slot.shape, width, self._group)
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
        """Sets the routes of slots.

        The routes of frozen parameters are not checked until the parameters are trained, because their
        gradients are not sent before.
        """
        router = router or self._router
        chosen = []
        too_wide = {}
        for slot in slots:
            route = router.wanted(slot.name, slot.shape).among(self._size)
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
                self._take_route(slot, route)
            chosen.append((slot, route))
        warn_of_dtypes(too_wide)
        self._set_routes(chosen)
        self._expect_encoding(router)

    def _expect_encoding(self, router: Router) -> None:
        """Warns, once, if gradients are to be encoded by a router's routes, and none is large enough."""
        trained = self._trained()
        if self._size > 1 and all(slot.route.uncompressed for slot in trained):
            shapes = {s.name: s.largest for s in trained if s.dtype in ENCODABLE}
            if not self._warned_of_nothing and warn_of_nothing(router, shapes):
                self._warned_of_nothing = True

    def _take_route(self, slot: Slot, route: Route) -> None:
        """Checks that a parameter's gradients can use a route, and warns if it has drawbacks for them."""
        if not route.uncompressed:
            self._check_route(slot, route)
            warn_of_growth(slot.name, slot.shape, route, slot.parameter.element_size())

    def _take_up(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Checks every gradient for changes since the parameter's route was chosen.

        Raises:
            TypeError, ValueError: the parameter was frozen at that time, and its gradients cannot use the
                route; or the gradient has a dtype or shape that the route was not chosen for.
        """
        if slot in self._frozen:
            self._take_route(slot, slot.route)
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

    def _set_routes(self, routes: Iterable[tuple[Slot, Route]]) -> None:
        """Changes the routes of the gradients that follow."""
        for slot, route in routes:
            slot.route = route
        self._use.note_codecs(slot.route.codec.name for slot in self._slots)
        self._formats.clear()
        self._batches.forget_plans()
        self._forget_agreement()

    def _take_routes_again(self) -> None:
        """Checks the present routes among other ranks, and keeps them; ``"auto"`` follows their number."""
        routes = [(slot, slot.route.among(self._size)) for slot in self._slots]
        for slot, route in routes:
            if not route.uncompressed:
                self._check_route(slot, route)
        self._set_routes(routes)

    def _hosts_in_use(self) -> Hosts | None:
        """The hosts, if the exchange of some gradient distinguishes them; otherwise None."""
        used = {slot.route.exchange for slot in self._slots if not slot.route.uncompressed}
        stages = {scope for exchange in used for scope in EXCHANGES[exchange].stages}
        return self._group.hosts if stages & {"local", "cross"} else None

    def _configuration(self, slots: Iterable[Slot] | None = None) -> dict[str, Any]:
        """The configuration that ranks compare: settings, and the dtype, shape, route and step of slots."""
        tensors = {
            slot.name: f"{self._format_of(slot)}, step {slot.step}{self._warmup_of(slot)}"
            for slot in (self._slots if slots is None else slots)
        }
        return {
            "format version": FORMAT_VERSION,
            "ranks": self._size,
            "seed": self._seed,
            "warmup_steps": self._warmup_steps,
            "owner_step": self._owner_step_text,
            "calls of reset": self._resets,
            "gradient of": tensors,
            # With some slots only, others may be in exchanges, and ranks learn lengths at different times.
            **({} if slots is not None else {"lengths of messages": self._batches.lengths()}),
        }

    def _warmup_of(self, slot: Slot) -> str:
        """The warm-up steps that are over, as text; ranks that differ would not end it together."""
        over = min(slot.exchanges, self._warmup_steps)
        return f", {over} of {self._warmup_steps} warm-up steps over" if self._warmup_steps else ""

    def _format_of(self, slot: Slot) -> str:
        """The format of a slot's gradients; described again only after a change."""
        route, dtype = slot.route, slot.parameter.dtype
        known = self._formats.get(slot)
        if known is None or known[0] is not route or known[1] != dtype:
            known = route, dtype, f"{slot.dtype} {list(slot.shape)} by {route}"
            self._formats[slot] = known
        return known[2]

    @staticmethod
    def _sent_dtype(route: Route, gradient: torch.Tensor, warming_up: bool) -> torch.dtype:
        """The dtype in which an uncompressed gradient is sent."""
        wanted = None if warming_up else route.cast_dtype
        if wanted is not None and gradient.dtype == torch.float32:
            return getattr(torch, wanted)
        return gradient.dtype
