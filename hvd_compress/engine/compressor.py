"""The base of PyTorch's compressors: settings, routes, and the state that is kept from step to step."""

from __future__ import annotations

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
from hvd_compress.engine.parameters import Slot
from hvd_compress.engine.plan import Common
from hvd_compress.engine.ranks import Ranks
from hvd_compress.engine.routes import Routes
from hvd_compress.engine.state import State
from hvd_compress.engine.use import TorchUse
from hvd_compress.exchanges.routing import (
    DEFAULT_THRESHOLD,
    EXCHANGE_CHOICES,
    CodecLike,
    Route,
    Router,
    matching,
    route_of,
)
from hvd_compress.ranks.counters import Counters
from hvd_compress.ranks.launch import say_alone


class CompressorBase:
    """The base of the frontends' compressors: one rank's codecs, residuals, noise positions and counters.

    This class starts no collectives. A frontend calls :meth:`_join` when the ranks' group is known: when
    the compressor is made, or before the compressor's first use. For the other arguments, see
    :class:`~hvd_compress.engine.options.Options`.

    Args:
        slots: the parameters.
        codec: the codec of the gradients: a codec, a :class:`~hvd_compress.Route` or a codec's name.
        ranks: the ranks among which the gradients are exchanged.
    """

    _chained: ClassVar[bool] = False
    """The argument ``chained`` of :class:`hvd_compress.engine.executors.Executors`."""
    _remedy: ClassVar[str]
    """The advice for a script whose gradients have not been exchanged."""

    def __init__(
        self,
        slots: Iterable[Slot],
        codec: Codec | Route | str,
        ranks: Ranks,
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
        self._ranks = ranks
        self._state = State(slots, seed)
        parameters = [slot.parameter for slot in slots]
        name = f"{type(self).__name__} {route}"
        self._use = TorchUse(name, self._remedy, parameters, ranks.of_job)
        router = Router(route, threshold, exclude, layers)
        self._routes = Routes(slots, router, ranks, self._use, warmup_steps, owner_step)
        if parameters:  # Tensors may come later, by names that are not known yet.
            self.check_patterns([slot.name for slot in slots])
        self._owner_step = owner_step
        self._owner_step_text = owner_steps.describe(owner_step)
        self._threads = threads or torch.get_num_threads()
        self._kernels = Executors(self._threads, chained=self._chained)
        self._grad_scaler = grad_scaler
        self._first_step: FirstStep | None = FirstStep()
        self.counters = Counters()

    def __repr__(self) -> str:
        return self.counters.shown(type(self).__name__, self._routes.router.route)

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
        return self._routes.warmup_steps

    def check_patterns(self, names: Sequence[str]) -> None:
        """Raises ``ValueError`` if a pattern in ``exclude`` or ``layers`` matches no parameter's name."""
        self._routes.router.check_patterns(names)

    def _join(self) -> None:
        """Called when the ranks' group is known or has changed; the frontend then chooses all routes."""
        self._ranks.resets = 0
        if self._ranks.group.size == 1:
            say_alone()
        state = self._state
        state.last.replace()
        self._batches = Batches(
            Common(self._kernels, self._ranks.group, state.seed, self._owner_step, state.last)
        )
        self._routes.batches = self._batches

    def _bind(self) -> None:
        """Calls :meth:`_join`, in a frontend that does not do so when a compressor is made."""

    def set_codec(self, codec: Codec | Route | str | None, layers: str = "*") -> None:
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
        self._ranks.expect_idle("set_codec")
        route = route_of(codec, self._routes.exchange, "set_codec")
        found = set(matching(layers, [slot.name for slot in self._slots], "set_codec"))
        self._ranks.wait("set_codec", codec=str(route), layers=layers)
        self._routes.change(layers, [slot for slot in self._slots if slot.name in found], route)

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
        self._ranks.expect_idle("drop_step")
        self._state.last.take_back()

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
        self._ranks.meet("reset")
        self._state.forget()
        self._ranks.resets += 1
        self._ranks.forget_agreement()

    def routes(self) -> dict[str, Route]:
        """The route of each parameter's gradient, by name; frozen parameters have none.

        Each route has the exchange that is used. With ``exchange="auto"``, its ``reason`` says why.
        """
        self._bind()
        return {slot.name: slot.route for slot in self._routes.trained}

    def residual_norm(self) -> float:
        """The l2 norm of all residuals of this rank together, without loss scaling."""
        self._kernels.settle()
        norm = float(self._state.norm(torch.device("cpu")))
        self._kernels.check()
        return norm

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
        self._ranks.expect_idle("state_dict")
        self._kernels.settle()
        group = self._ranks.group
        return self._state.snapshot(group.rank, group.size)

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
        self._bind()
        self._ranks.meet("load_state_dict")
        group = self._ranks.group
        self._state.restore(state, group.rank, group.size, self._routes.owned_by)

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
        self._bind()
        self._ranks.meet("load_resized")
        group, owned_by = self._ranks.group, self._routes.owned_by
        state = self._state.resized(states, group.rank, group.size, owned_by)
        self._state.restore(state, group.rank, group.size, owned_by)

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
            kept = any(route.feedback.enabled for route in self._routes.router.encoding)
            self._use.begin(scaled=scaler is not None or not kept)
        self._state.last.begin()
        first = self._first_step
        if first is not None and (self._ranks.group.rank or first.log(self._slots, self.counters)):
            self._first_step = None
        # Once: reading the loss scale waits for a GPU.
        self._batches.common.loss_scale = 1.0 if scaler is None else float(scaler.get_scale())
        self._batches.begin_step()

    def _configuration(self, slots: Iterable[Slot] | None = None) -> dict[str, Any]:
        """The configuration that ranks compare: settings, and the dtype, shape, route and step of slots."""
        return {
            "format version": FORMAT_VERSION,
            "ranks": self._ranks.group.size,
            "seed": self._state.seed,
            "warmup_steps": self._routes.warmup_steps,
            "owner_step": self._owner_step_text,
            "calls of reset": self._ranks.resets,
            "gradient of": self._routes.describe(self._slots if slots is None else slots),
            # With some slots only, others may be in exchanges, and ranks learn lengths at different times.
            **({} if slots is not None else {"lengths of messages": self._batches.lengths()}),
            **self._ranks.configuration(hierarchical=self._routes.hierarchical),
        }
