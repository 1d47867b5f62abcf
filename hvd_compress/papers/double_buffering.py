"""Double buffering: the gradients of one half-batch are exchanged while the next ones are computed."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import hvd_compress.distributed as hvdc
from hvd_compress.codecs import Codec, checks
from hvd_compress.distributed.begin import begin_alike, compressor_of, group_of
from hvd_compress.distributed.compressor import Work
from hvd_compress.engine.parameters import parameters
from hvd_compress.exchanges.routing import Route
from hvd_compress.process_group.device_collectives import collectives_of
from hvd_compress.process_group.values import problem_told, tell

_log = logging.getLogger(__name__)

_MODES = ("whole", "halves")


class DoubleBuffering:
    """Averages gradients by half-batches, one while the next is computed (1-bit SGD, section 2.2).

    Each minibatch is cut in half. While a rank computes the gradients of one half, those of the previous
    half are being exchanged. So each update uses gradients with respect to parameters that are one
    half-batch old (delayed update); updates do not depend on timing. A half-batch's gradient is multiplied
    by its fraction of the minibatch's samples, as in the paper's sums over samples, so that two updates
    together are as long as one for the whole minibatch. However, optimizers that divide gradients by their
    size, such as Adam and AdaGrad, make two whole steps.

    Two updates cost twice as much as one, and half a batch may be computed less efficiently. If the
    exchange takes less time than this adds, double buffering is slower than an exchange of the whole
    minibatch (section 2.3). With ``enabled=None``, both ways are tried for ``trial_steps`` minibatches
    each, and all ranks keep the faster one by the mean of the ranks' median times. :attr:`report` states
    the times.

    Double buffering replaces the averaging of gradients: use it with each rank's own model, not within
    ``DistributedDataParallel``. All ranks begin with the parameters of the group's first rank::

        buffering = DoubleBuffering(model.named_parameters(), optimizer, OneBit())
        for inputs, targets in batches:
            for x, y in buffering.parts(inputs, targets):
                loss(model(x), y).backward()
                buffering.step()
        buffering.flush()

    Args:
        params: ``model.named_parameters()``; some may be frozen, and be trained later.
        optimizer: the optimizer of these parameters. A learning-rate scheduler may change the learning
            rates between minibatches.
        codec: the compression of gradients: a codec such as ``OneBit()``, a :class:`~hvd_compress.Route`,
            or, for other options, a compressor of :mod:`hvd_compress.distributed` that is used for nothing
            else.
        enabled: whether minibatches are cut in half; None measures both ways.
        trial_steps: the number of minibatches that are measured each way, after an unmeasured one.

    Attributes:
        enabled: whether minibatches are cut in half; None during the measurement.
        report: a sentence about the times of minibatches either way; None until a measurement has ended.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
        ExchangeError: ranks differ in arguments or parameters; there is no process group.
    """

    def __init__(
        self,
        params: Any,
        optimizer: torch.optim.Optimizer,
        codec: Codec | Route | str | hvdc.Compressor,
        *,
        enabled: bool | None = None,
        trial_steps: int = 10,
    ) -> None:
        call = "DoubleBuffering(model.named_parameters(), optimizer, {})"
        with problem_told(group_of(codec)):
            compressor = compressor_of(codec, "DoubleBuffering", call)
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(
                    f"DoubleBuffering.optimizer: expected a torch.optim.Optimizer, got "
                    f"{type(optimizer).__name__}"
                )
            if enabled not in (True, False, None):
                raise TypeError(
                    f"DoubleBuffering.enabled: expected True, False or None, got {enabled!r}"
                )
            checks.check_number(
                "DoubleBuffering", "trial_steps", trial_steps, 1, 2**31, integer=True
            )
            self._named = parameters(params, "DoubleBuffering.params")
            compressor.check_patterns(list(self._named))
            self._optimizer, self._compressor = optimizer, compressor
            self._check_parameters()
        self._trial_steps = trial_steps
        self.enabled = enabled
        self.report: str | None = None
        self._seconds: dict[str, list[float]] = {mode: [] for mode in _MODES}
        self._exchange_seconds: list[float] = []
        self._update_seconds: list[float] = []
        self._share = 1.0
        self._work: Work | None = None
        self._delayed: dict[str, torch.Tensor] | None = None
        settings = {"enabled": enabled, "trial_steps": trial_steps}
        begin_alike(compressor, self._named, settings)

    @property
    def compressor(self) -> hvdc.Compressor:
        """The compressor that sends the gradients, with its counters, residuals and routes."""
        return self._compressor

    def parts(self, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Cuts this rank's samples of a minibatch into the parts to compute between calls of :meth:`step`.

        Every rank must call this for every minibatch, and use all parts.

        Args:
            tensors: inputs, targets and so on, all with the samples along the first dimension.

        Raises:
            ValueError: tensors of different lengths, or fewer than two samples.
        """
        lengths = {len(tensor) for tensor in tensors}
        if len(lengths) != 1 or min(lengths) < 2:
            raise ValueError(
                f"DoubleBuffering.parts: expected tensors of one length of at least 2 samples, got "
                f"{sorted(lengths)}"
            )
        count = lengths.pop()
        mode = self._mode()
        cuts = [0, -(-count // 2), count] if mode == "halves" else [0, count]
        started = time.perf_counter()
        for begin, end in pairwise(cuts):
            self._share = (end - begin) / count
            yield tuple(tensor[begin:end] for tensor in tensors)
        self._share = 1.0
        if self.enabled is None:
            self._seconds[mode].append(time.perf_counter() - started)
            if len(self._seconds[_MODES[-1]]) > self._trial_steps:
                self._decide()

    @torch.no_grad()
    def step(self) -> None:
        """Sends the gradients, and updates the parameters with those that were sent before.

        This also clears the gradients, so that there is no need for ``zero_grad()``. The very first call
        makes no update. If minibatches are not cut in half, each call waits for the averages of the
        gradients that it sends, and updates with these.

        Raises:
            ExchangeError: ranks differ, or another rank has failed.
            PayloadError: a payload was altered in transit.
        """
        halves = self._mode() == "halves"
        try:
            self._check_parameters()
        except ValueError as error:
            self._compressor.refuse(error, next(iter(self._named.values())).device)
            raise
        gradients = self._take_gradients()
        before = self._arrived()
        started = time.perf_counter()
        # The compressor encodes here, in the order of the calls, whatever the network does.
        work = hvdc.all_reduce(
            list(gradients.values()), self._compressor, key=list(gradients), async_op=True
        )
        self._work, self._delayed = work, gradients
        if not halves:
            before = self._arrived()
            if self.enabled is None:
                self._exchange_seconds.append(time.perf_counter() - started)
        if before is not None:
            self._update(before)

    @torch.no_grad()
    def flush(self) -> None:
        """Makes the pending update, after the last minibatch or before an evaluation."""
        before = self._arrived()
        if before is not None:
            self._update(before)

    def state_dict(self) -> dict[str, Any]:
        """The state for the next steps, without the model and the optimizer, which are saved separately.

        The state contains the averages that are not applied yet, and the compressor's state; every rank
        saves its own. Call this between minibatches.

        Raises:
            ExchangeError: the current exchange failed.
        """
        self._delayed = delayed = self._arrived()
        return {
            "delayed": delayed,
            "enabled": self.enabled,
            "report": self.report,
            "seconds": {mode: list(times) for mode, times in self._seconds.items()},
            "compressor": self._compressor.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues, bit for bit, from a :meth:`state_dict` of the same rank.

        Raises:
            ValueError: the state belongs to another model, rank or compressor; then nothing is changed.
        """
        delayed = state["delayed"]
        if delayed is not None and not delayed.keys() <= self._named.keys():
            raise ValueError(
                f"DoubleBuffering.load_state_dict: expected averages of {list(self._named)[:5]}, got "
                f"{list(delayed)[:5]}"
            )
        self._delayed = self._arrived()
        self._compressor.load_state_dict(state["compressor"])
        self._delayed = delayed and {
            name: average.to(self._named[name].device, copy=True)
            for name, average in delayed.items()
        }
        self.enabled, self.report = state["enabled"], state["report"]
        self._seconds = {mode: list(times) for mode, times in state["seconds"].items()}

    def _mode(self) -> str:
        if self.enabled is not None:
            return _MODES[self.enabled]
        # One more minibatch than is measured: the first may be slower.
        return _MODES[len(self._seconds["whole"]) > self._trial_steps]

    def _check_parameters(self) -> None:
        """Raises ``ValueError`` for parameters that are shards, none to train, or not the optimizer's."""
        for name, parameter in self._named.items():
            if isinstance(parameter, DTensor):
                raise ValueError(
                    f"DoubleBuffering.params: expected whole parameters, got a shard of {name}: with "
                    f"FSDP2, use hvd_compress.fsdp.Compressor"
                )
        if not any(parameter.requires_grad for parameter in self._named.values()):
            raise ValueError("DoubleBuffering.params: expected parameters to train, got none")
        known = {id(parameter) for parameter in self._named.values()}
        stepped = [one for group in self._optimizer.param_groups for one in group["params"]]
        other = [one for one in stepped if one.requires_grad and id(one) not in known]
        if other:
            raise ValueError(
                f"DoubleBuffering.params: expected all parameters that the optimizer trains, got others "
                f"than {len(other)} of them, such as one of shape {tuple(other[0].shape)}: make a "
                f"DoubleBuffering after the model and the optimizer have been changed"
            )

    def _take_gradients(self) -> dict[str, torch.Tensor]:
        """Takes the gradients from the parameters, multiplied by their fraction of the minibatch."""
        gradients = {}
        for name, parameter in self._named.items():
            gradient, parameter.grad = parameter.grad, None
            if parameter.requires_grad:
                gradients[name] = torch.zeros_like(parameter) if gradient is None else gradient
        if self._share != 1.0:
            torch._foreach_mul_(list(gradients.values()), self._share)
        return gradients

    def _arrived(self) -> dict[str, torch.Tensor] | None:
        """Waits for the pending averages and returns them; None if there are none."""
        work, self._work = self._work, None
        averages, self._delayed = self._delayed, None
        if work is not None:
            work.wait()
        return averages

    def _update(self, averages: Mapping[str, torch.Tensor]) -> None:
        started = time.perf_counter()
        for name, average in averages.items():
            self._named[name].grad = average
        self._optimizer.step()
        for parameter in self._named.values():
            parameter.grad = None
        if self.enabled is None:
            self._update_seconds.append(time.perf_counter() - started)

    def _decide(self) -> None:
        """Chooses the faster way from times that are the same on every rank."""
        own = [
            *(statistics.median(self._seconds[mode][1:]) for mode in _MODES),
            statistics.median(self._exchange_seconds[1:] or self._exchange_seconds),
            statistics.median(self._update_seconds),
        ]
        group = self._compressor.process_group
        told = tell(collectives_of(group), own)
        whole, halves, exchange, update = map(statistics.fmean, zip(*told, strict=True))
        self.enabled = halves < whole
        self.report = (
            f"double buffering {'pays' if self.enabled else 'does not pay'}: {1e3 * halves:.2f} ms a "
            f"minibatch with it, {1e3 * whole:.2f} ms without, of which the exchange takes "
            f"{1e3 * exchange:.2f} ms and the update, which it makes twice, {1e3 * update:.2f} ms"
        )
        if dist.get_rank(group) == 0:
            _log.info("%s", self.report)
        if not self.enabled:
            self.flush()
