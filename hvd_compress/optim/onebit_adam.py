"""Adam with a frozen variance and a compressed momentum."""

from __future__ import annotations

import itertools
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import hvd_compress.distributed as hvdc
from hvd_compress.codecs import Codec, checks
from hvd_compress.distributed.begin import begin_alike, compressor_of, group_of
from hvd_compress.engine.parameters import local, parameters
from hvd_compress.engine.sums import ordered_sum
from hvd_compress.exchanges.routing import Route
from hvd_compress.process_group.device_collectives import collectives_of
from hvd_compress.process_group.meshes import Verdicts, one_mesh
from hvd_compress.process_group.values import problem_told

_log = logging.getLogger(__name__)

_OPTIONS = ("lr", "betas", "eps", "weight_decay")

_KEPT = ("_auto", "_compressor", "_names", "_zeros", "skipped_steps")
"""The attributes that a copy has in addition to those of every optimizer."""

_UNKNOWN_ROOT = 1e-3
"""The fraction of a parameter's root mean square below which the root of an element's variance is unknown:
the element has had hardly any gradients."""


_NEVER = 2**62
"""The ``warmup_steps`` of a compressor whose warm-up the optimizer ends."""

_STABLE = 0.96
"""The ratio of two l1 norms of the variance from which on it counts as stable, as in the paper."""


class OneBitAdam(torch.optim.Optimizer):
    """AdamW that averages gradients during a warm-up, and then its encoded momentum.

    This is 1-bit Adam (Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
    Convergence Speed", 2021, algorithm 1), with weight decay as in AdamW, corrections for the means' start
    at zero, and any codec. Adam divides each parameter's step by the root of a mean of squared gradients,
    so a part of a gradient that is sent late through error feedback does not make up for its absence
    before. Here, the divisor is frozen after the compressor's ``warmup_steps``. Each rank then adds its own
    gradient to the common momentum, and the average of the results, encoded with error feedback, is the
    next common momentum: the step is linear in the numbers that are sent.

    This optimizer departs from the paper where a variance does not predict later gradients. A parameter's
    warm-up begins with its first average that is not zero, so that a parameter that is trained later gets a
    whole warm-up. When variances are frozen, an element whose root is below a thousandth of the parameter's
    root mean square, over the elements with gradients, gets that root mean square: unused rows, or the
    key's bias of an attention layer. The paper divides later gradients, and the codec's noise, by ``eps``
    there. Warnings in the log name such parameters.

    This class replaces both the optimizer and the averaging of gradients: use it with each rank's own
    model, not within ``DistributedDataParallel``. All ranks begin with the parameters of the group's first
    rank; buffers, such as running means of batch normalisation, remain each rank's own. A missing gradient
    counts as zeros.

    If a gradient of any rank holds an Inf or a NaN, no rank makes the step, and residuals do not change.

    Args:
        params: ``model.named_parameters()``, or groups of them, with distinct names. Without names, tensors
            are numbered: ``parameter.0`` is the first one. FSDP2 may have sharded them; the
            compressor's ``process_group`` then has the ranks with the same shards.
        codec: the compression of momenta: a codec such as ``OneBit()``, a :class:`~hvd_compress.Route`, or,
            for other options, a compressor of :mod:`hvd_compress.distributed` with its own
            ``warmup_steps``, which is used for nothing else.
        warmup_steps: the number of steps at the start in which gradients are sent uncompressed and the
            variance is learnt; required unless ``codec`` is a compressor with ``warmup_steps``. With
            ``"auto"``, the warm-up ends when the variance has become stable, by the paper's rule: the sum
            of a group's variances, looked at every ``1 / (1 - beta2)`` steps, is within 4% of the one
            before. With gradients of constant size, this takes four times as many steps. A compressor's
            own ``warmup_steps`` are then the most that a warm-up takes.
        lr: the learning rate.
        betas: the fractions of the momentum and the variance that are kept in each step.
        eps: the number that is added to the divisor.
        weight_decay: the fraction of each parameter that is removed in each step, divided by the learning
            rate.

    Attributes:
        skipped_steps: the number of steps that no rank made because of an Inf or a NaN.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
        ExchangeError: ranks differ in arguments or parameters; there is no process group.
    """

    _step_supports_amp_scaling = True  # GradScaler leaves Inf to step(), which refuses it.

    def __init__(
        self,
        params: Any,
        codec: Codec | Route | str | hvdc.Compressor,
        *,
        warmup_steps: int | Literal["auto"] | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        with problem_told(group_of(codec)):
            self._auto = warmup_steps == "auto"
            if isinstance(codec, hvdc.Compressor) and not (self._auto or warmup_steps is None):
                raise ValueError(
                    f"OneBitAdam.warmup_steps: expected those of the compressor, got {warmup_steps}, too"
                )
            call = "OneBitAdam(model.named_parameters(), {}, warmup_steps=1000)"
            most = _NEVER if self._auto else warmup_steps or 0
            compressor = compressor_of(codec, "OneBitAdam", call, warmup_steps=most)
            if compressor.warmup_steps < 1:
                raise ValueError(
                    f"OneBitAdam.warmup_steps: expected uncompressed steps at the start to learn the "
                    f'variance in, such as 1000 or "auto", got {compressor.warmup_steps}'
                )
            for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
                checks.check_number("OneBitAdam", name, value, 0, sys.float_info.max)
            for beta in betas:
                checks.check_number("OneBitAdam", "betas", beta, 0, 1 - sys.float_info.epsilon)
            self._compressor = compressor
            # Of each group's parameters; those of the first groups are taken together.
            self._names: list[list[str]] = []
            self.skipped_steps = 0
            self._zeros: Counter[str] = Counter()  # Steps without a gradient, by parameter.
            super().__init__(
                params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
            )
            self._enter(0)
            compressor.check_patterns(list(self._named()))
        self._begin_alike(0)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: vars(self)[name] for name in _KEPT}
        return {**super().__getstate__(), **own}

    @property
    def compressor(self) -> hvdc.Compressor:
        """The compressor that sends the momenta, with its counters, residuals and routes."""
        return self._compressor

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group on every rank; all ranks get the first rank's parameters.

        Raises:
            ExchangeError: ranks differ in options or parameters.
        """
        if not self._names:
            super().add_param_group(param_group)
            return
        count = len(self.param_groups)
        with problem_told(self._compressor.process_group):
            super().add_param_group(param_group)
            try:
                self._enter(count)
            except Exception:
                self.param_groups.pop()
                raise
        self._begin_alike(count)

    def _enter(self, first: int) -> None:
        """Takes the names of the parameters of the groups from the given one on."""
        groups = self.param_groups[first:]
        named = parameters(groups, "OneBitAdam.params", taken=self._named())
        one_mesh("OneBitAdam.params", {**self._named(), **named})
        for parameter in named.values():
            # Now: torch.distributed.checkpoint makes a step of an optimizer without state.
            if parameter.requires_grad:
                _begin(self.state[parameter], parameter)
        names = iter(named)
        self._names += [[next(names) for _ in group["params"]] for group in groups]

    def _begin_alike(self, first: int) -> None:
        """Gives all ranks the first rank's parameters of the groups from the given one on."""
        settings: dict[str, Any] = {
            f"group {first + number}": {name: group[name] for name in _OPTIONS}
            for number, group in enumerate(self.param_groups[first:])
        }
        settings.update(warmup_steps=self._compressor.warmup_steps, auto=self._auto)
        begin_alike(self._compressor, self._named(first), settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchanges gradients or momenta, and makes a step; every rank must call this.

        Args:
            closure: a function that computes the loss and its gradients.

        Returns:
            The result of the closure, or None.

        Raises:
            TypeError: the caller is a ``GradScaler``.
            ValueError: the states of the optimizer and of its compressor are those of different steps.
            ExchangeError: ranks differ, or another rank has failed.
            PayloadError: a payload was altered in transit.
        """
        if getattr(self, "found_inf", None) is not None:
            raise TypeError(
                "OneBitAdam.step: expected gradients of the loss itself, got a GradScaler's: a scale that "
                "changes does not fit a momentum that stays; use bfloat16, which needs none"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parts = list(self._parts())
        sent = [part.messages() for part in parts]
        names = [name for part in parts for name in part.named]
        averages = [tensor for tensors in sent for tensor in tensors]
        mesh = self._mesh()
        ranks = None if mesh is None else collectives_of(mesh.get_group())
        finite, verdicts = [False], Verdicts(ranks)

        def accept() -> bool:
            # Ranks with the same shard have the same bits, so that all decide alike.
            own = [local(one).isfinite().all() for one in averages]
            finite[0], _ = verdicts.judge(not own or bool(torch.stack(own).all()))
            return finite[0]

        device = self.param_groups[0]["params"][0].device
        with verdicts.failure_told():
            self._check_counts(parts, device)
            try:
                self._compressor.reduce(
                    averages, names, dist.ReduceOp.AVG, accept=accept, device=device
                ).wait()
            finally:
                for part in parts:
                    part.count(self._compressor)
        if finite[0]:
            for part, tensors in zip(parts, sent, strict=True):
                part.update(tensors)
        else:
            self.skipped_steps += 1
            _log.warning("an Inf or a NaN in some rank's gradients; no rank makes this step")
        for part, tensors in zip(parts, sent, strict=True):
            if part.warm:
                if self._auto and finite[0]:
                    self._end_where_stable(part)
                self._end_warm_up(part, tensors)
        return loss

    def _end_where_stable(self, part: _Part) -> None:
        """Ends the warm-up of parameters that began together and whose variances have become stable."""
        every = part.variance_steps
        due: dict[int, list[str]] = {}
        for name, state in zip(part.named, part.states, strict=True):
            if state["variance_step"] % every == 0:
                due.setdefault(state["variance_step"], []).append(name)
        for names in due.values():
            states = [self.state[part.named[name]] for name in names]
            before = sum(state.get("variance_norm", 0.0) for state in states)
            for state in states:
                state["variance_norm"] = float(_sum(state["exp_avg_sq"]))
            now = sum(state["variance_norm"] for state in states)
            if now > 0 and min(now, before) >= _STABLE * max(now, before):
                self._compressor.keys.end_warmup(names, self._compressor.warmup_steps)
                part.count(self._compressor)
                _log.info("the variance of %d parameters is stable; their warm-up ends", len(names))

    def _end_warm_up(self, part: _Part, averages: list[torch.Tensor]) -> None:
        """Freezes variances that are known by now; restarts the warm-up of parameters without gradients."""
        skipped, late, unknown = [], [], []
        for name, state, average in zip(part.named, part.states, averages, strict=True):
            if (
                state["step"] == 0
            ):  # The averages had an Inf or a NaN, so that no step has been made.
                state.update(calls=0)
                skipped.append(name)
            elif state["step"] == 1 and not _some([average != 0, state["exp_avg_sq"] != 0]):
                state.update(calls=0, step=0, variance_step=0)
                late.append(name)
            elif not self._warm(part.named[name]) and _make_known(state["exp_avg_sq"]):
                unknown.append(name)
        self._compressor.keys.restart_warmup(skipped + late)
        self._zeros.update(late)
        warmup = part.variance_steps if self._auto else self._compressor.warmup_steps
        named = part.named
        late = [name for name in late if self._zeros[name] == warmup and named[name].numel()]
        if late:
            _log.warning(
                "no gradients in the first %d steps: %s; their own warm-up begins with the first one, and "
                "zeros are sent uncompressed until then: freeze what is not trained",
                warmup,
                ", ".join(late),
            )
        if unknown:
            _log.warning(
                "no gradients in the warm-up for some elements of %s, or far smaller ones than for others: "
                "their momentum is divided by the others' root mean square from now on",
                ", ".join(unknown),
            )

    def _check_counts(self, parts: Sequence[_Part], device: torch.device) -> None:
        """Raises ``ValueError`` on this rank if the compressor has counted other exchanges, by name.

        The two would end the warm-up in different steps. The other ranks raise an ``ExchangeError``.
        """
        for part in parts:
            for name, state in zip(part.named, part.states, strict=True):
                counted = self._compressor.keys.exchanges(name)
                if counted != state["calls"]:
                    problem = ValueError(
                        f"OneBitAdam.step: {name}: expected states of the optimizer and of its compressor "
                        f"from the same step, got {state['calls']} exchanges in the optimizer's and "
                        f"{counted} in the compressor's: load both states, or none"
                    )
                    self._compressor.refuse(problem, device)
                    raise problem

    def _mesh(self) -> DeviceMesh | None:
        """The mesh that shares out the parameters, if any."""
        return one_mesh("OneBitAdam.params", self._named())

    def _named(self, first: int = 0) -> dict[str, torch.Tensor]:
        """The parameters by name, of the groups from the given one on."""
        groups = list(zip(self._names, self.param_groups, strict=False))
        pairs = (zip(names, group["params"], strict=True) for names, group in groups[first:])
        return dict(itertools.chain.from_iterable(pairs))

    def _parts(self) -> Iterator[_Part]:
        """The parts of the trainable parameters that are treated in the same way."""
        for group, names in zip(self.param_groups, self._names, strict=True):
            every = zip(names, group["params"], strict=True)
            named = {name: parameter for name, parameter in every if parameter.requires_grad}
            for parameter in named.values():
                _begin(self.state[parameter], parameter)
            for warm in (True, False):
                own = {n: p for n, p in named.items() if warm == self._warm(p)}
                if own:
                    yield _Part(group, own, [self.state[p] for p in own.values()], warm)

    def _warm(self, parameter: torch.Tensor) -> bool:
        calls: int = self.state[parameter]["calls"]
        return calls < self._compressor.warmup_steps


@dataclass(frozen=True)
class _Part:
    """Parameters of one group that are either all in the warm-up or all past it.

    Attributes:
        group: the options of the group.
        named: the parameters by name.
        states: the states of the parameters, in the same order.
        warm: whether the parameters are in the warm-up.
    """

    group: dict[str, Any]
    named: dict[str, torch.Tensor]
    states: list[dict[str, Any]]
    warm: bool

    @property
    def variance_steps(self) -> int:
        """The number of steps over which the variance is a mean."""
        return round(1 / (1 - self.group["betas"][1]))

    def messages(self) -> list[torch.Tensor]:
        """The tensors of this rank to average: gradients in the warm-up, then momenta with them added."""
        zeros = torch.zeros_like
        gradients = [zeros(p) if p.grad is None else p.grad for p in self.named.values()]
        if self.warm:
            return [gradient.clone() for gradient in gradients]
        beta, _ = self.group["betas"]
        momenta = torch._foreach_mul(self._all("exp_avg"), beta)
        torch._foreach_add_(momenta, gradients, alpha=1 - beta)
        return list(momenta)

    def count(self, compressor: hvdc.Compressor) -> None:
        """Takes over the compressor's counts of exchanges, whether or not the step is made."""
        for name, state in zip(self.named, self.states, strict=True):
            state["calls"] = compressor.keys.exchanges(name)

    def update(self, averages: list[torch.Tensor]) -> None:
        """Makes the step with the averages of all ranks' :meth:`messages`."""
        lr, (beta1, beta2) = float(self.group["lr"]), self.group["betas"]
        for state, average in zip(self.states, averages, strict=True):
            state["step"] += 1
            state["variance_step"] += self.warm
            if not self.warm:
                state["exp_avg"] = average
        if self.warm:
            torch._foreach_lerp_(self._all("exp_avg"), averages, 1 - beta1)
            variances = self._all("exp_avg_sq")
            torch._foreach_mul_(variances, beta2)
            torch._foreach_addcmul_(variances, averages, averages, 1 - beta2)
        divisors = torch._foreach_div(
            self._all("exp_avg_sq"), [1 - beta2**step for step in self._all("variance_step")]
        )
        torch._foreach_sqrt_(divisors)
        torch._foreach_add_(divisors, self.group["eps"])
        parameters = list(self.named.values())
        torch._foreach_mul_(parameters, 1 - lr * self.group["weight_decay"])
        rates = [-lr / (1 - beta1**step) for step in self._all("step")]
        torch._foreach_addcdiv_(parameters, self._all("exp_avg"), divisors, rates)

    def _all(self, what: str) -> list[Any]:
        return [state[what] for state in self.states]


def _begin(state: dict[str, Any], parameter: torch.Tensor) -> None:
    if not state:
        # Exchanges, as the compressor counts them; steps made; steps that changed the variance.
        state.update(calls=0, step=0, variance_step=0)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)


def _make_known(variance: torch.Tensor) -> bool:
    """Sets unknown variances to the mean of the others; returns whether there are any."""
    own = local(variance)
    values = own.to(torch.promote_types(own.dtype, torch.float32))
    known = _total((values > 0).sum().view(1), variance)
    typical = _sum(variance) / known.clamp(min=1)
    unknown = values < _UNKNOWN_ROOT**2 * typical
    own.copy_(torch.where(unknown, typical, values))
    return bool(_total(unknown.sum().view(1), variance))


def _sum(variance: torch.Tensor) -> torch.Tensor:
    """The sum of a variance over all shards, shape=(1,), at least float32; the same bits on every rank."""
    own = local(variance)
    values = own.to(torch.promote_types(own.dtype, torch.float32))
    return _total(ordered_sum(values.reshape(-1)), variance)


def _total(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The sum of the values of all shards, shape=(1,) each, in the order of the shards."""
    if isinstance(like, DTensor):
        mesh = like.device_mesh
        value = DTensor.from_local(value, mesh, [Shard(0)], run_check=False).full_tensor()
    return ordered_sum(value)


def _some(masks: Iterable[torch.Tensor]) -> bool:
    """Whether some element of the masks is true, on any shard if they are DTensors."""
    count: torch.Tensor = torch.stack([mask.sum() for mask in masks]).sum()
    return bool(count.full_tensor() if hasattr(count, "full_tensor") else count)
