"""Parts of a model that are exchanged in different steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hvd_compress.diloco.common import CommonParameters
from hvd_compress.distributed.compressor import Compressor, Work
from hvd_compress.engine.parameters import local, parameters
from hvd_compress.exchanges.routing import matching

if TYPE_CHECKING:
    from hvd_compress.diloco.shards import Shards


State = tuple[int, list[torch.Tensor], bool, list[bool]]
"""An average that is due: the arguments of :meth:`Fragment.load`."""


class Fragment:
    """Parameters that are exchanged together, and their exchange.

    Args:
        number: the number of the fragment.
        names: the names of the parameters, which are their keys in the compressor.
        common: the common parameters of the model.
        compressor: the compressor, which has the residuals.
        shards: the ranks that share out the parameters of this worker, if they are sharded.

    Attributes:
        due: the step in which the average of the exchange in progress is used; None without an exchange.
        averages: the averages of an exchange that has ended, until they are used; before its end, this
            rank's differences. Zeros for parameters that are not sent.
        to_send: the names of the parameters that are sent in the next exchange, the same on every rank:
            those that were trained since they were last taken. True for those that somebody set while they
            were frozen, which are sent until nothing of them is left.
    """

    def __init__(
        self,
        number: int,
        names: Sequence[str],
        common: CommonParameters,
        compressor: Compressor,
        shards: Shards | None = None,
    ) -> None:
        self.number = number
        self.names = list(names)
        self.due: int | None = None
        self.averages: list[torch.Tensor] = []
        self.to_send = dict.fromkeys(self.names, False)  # In the first exchange, all of them.
        # Frozen ones that got other values, as the exchange in progress began.
        self._set: list[str] = []
        self._common = common
        self._compressor = compressor
        self._shards = shards
        self._finite, self._changed = True, [False]  # Findings on averages, on all shards.
        self._begun: Work | Future[Work] | None = None
        self._failed: Work | Future[Work] | None = None

    @property
    def exchanged(self) -> bool:
        """Whether the averages come from an exchange of this object, and not from a state."""
        return self._begun is not None

    def note_trained(self) -> None:
        """Notes the parameters that are not frozen now; called in every step."""
        for name in self.names:
            if self._common.own[name].requires_grad:
                self.to_send[name] = False

    def begin(
        self,
        due: int,
        commit: Callable[[], None] | None = None,
        thread: Executor | None = None,
    ) -> None:
        """Begins to exchange the differences of the common parameters and this rank's own.

        Nothing is sent of a parameter that has been frozen since it was last taken, as its residual would
        move it. All ranks have to freeze the same ones.

        Args:
            due: the step in which the average is used.
            commit: a function that is called when the average has arrived, and raises an error if it must
                not be used.
            thread: the thread that makes the exchange; None is this one.
        """
        same = self._frozen_and_same()
        found = [name for name, alike in same.items() if not alike and name not in self.to_send]
        either = {*self.to_send, *found}
        sent = [name for name in self.names if name in either]
        # One with fewer bits than its copy has not learnt what rounding made of it.
        differences = {
            name: _difference(copy, local(self._common.own[name].detach()))
            if name in either and not same.get(name)
            else torch.zeros_like(copy)
            for name, copy in self._copies()
        }
        self.settle_failed(used=False)

        def accept() -> bool:
            if commit is not None:
                commit()
            self._judge(sent)
            return self._finite

        reduce = functools.partial(
            self._compressor.reduce,
            [differences[name] for name in sent],
            sent,
            dist.ReduceOp.AVG,
            accept=accept,
            device=differences[self.names[0]].device,
        )
        self.averages = [*differences.values()]
        self._begun = reduce() if thread is None else thread.submit(reduce)
        self.due = due
        self._set = found
        self.to_send.update(dict.fromkeys(found, True))

    def wait(self) -> None:
        """Waits for the exchange; if this raises an error, the exchange is no longer in progress."""
        try:
            if self._begun is not None:
                _work(self._begun).wait()
        except Exception:
            self.due, self._failed, self._begun = None, self._begun, None
            for name in self._set:  # They may be set back.
                self.to_send.pop(name, None)
            self._set = []
            raise

    def use(self, mixing: float) -> bool:
        """Makes a step of the outer optimizer with the averages; then takes the common parameters.

        A parameter that was not sent, or that no rank has changed, gets no gradient: momentum must not move
        frozen parameters.

        Args:
            mixing: the weight of this rank's own parameters in the result.

        Returns:
            Whether there was a step: not if an average holds an Inf or a NaN.
        """
        averages, self.averages, self.due, self._begun = self.averages, [], None, None
        self._set = []
        finite = self._finite
        if finite:
            for name, average, changed in zip(self.names, averages, self._changed, strict=True):
                self._common.copies[name].grad = average if changed else None
                if not changed and self.to_send.get(name):
                    del self.to_send[name]
            self._common.step()
            for name in self.names:
                self._common.copies[name].grad = None
        self.take(mixing if finite else 0.0)
        return finite

    def take(self, mixing: float = 0.0) -> None:
        """Sets this rank's parameters to the common ones; ``mixing`` is the weight of its own."""
        for name, copy in self._copies():
            parameter = self._common.own[name]
            own = local(parameter.data)
            if mixing and parameter.requires_grad:
                copy = torch.lerp(copy, own.to(copy.dtype), mixing)
                self.to_send[name] = False
            elif self.to_send.get(name) is False:
                del self.to_send[name]
            own.copy_(copy)

    def settle_failed(self, *, used: bool) -> None:
        """Settles residuals after an exchange that has failed on this rank, and perhaps not on others.

        Args:
            used: whether another rank has used its average.
        """
        failed, self._failed = self._failed, None
        if isinstance(failed, Future) and failed.exception() is not None:
            return  # Nothing was sent.
        if failed is not None:
            _work(failed).settle(dropped=not used)

    def forget_failed(self) -> None:
        """Leaves the residuals of a failed exchange alone, after others were loaded in their place."""
        self._failed = None

    def state(self) -> State:
        """The arguments of :meth:`load`, after :meth:`wait`."""
        assert self.due is not None
        return self.due, self.averages, self._finite, self._changed

    def load(
        self,
        due: int,
        averages: Sequence[torch.Tensor],
        finite: bool,
        changed: Sequence[bool],
    ) -> None:
        """Sets the averages of an exchange that has ended, from a state on any device.

        Args:
            due: the step in which the averages are used.
            averages: the averages, one for each parameter.
            finite: whether the averages are finite, on all shards.
            changed: for each parameter, whether its average is not zero everywhere, on all shards.
        """
        self.due = due
        self._finite, self._changed = finite, list(changed)
        self.averages = [
            average.to(copy.device, copy=True)
            for (_, copy), average in zip(self._copies(), averages, strict=True)
        ]
        self._begun = None
        self._set = []

    def _judge(self, sent: Sequence[str]) -> None:
        """Notes whether averages are finite, and which ones are not zero; alike on all ranks."""
        averages = dict(zip(self.names, self.averages, strict=True))
        pairs = [torch.stack((averages[n].isfinite().all(), averages[n].any())) for n in sent]
        rows = dict(zip(sent, _read(pairs), strict=True))
        self._finite = all(finite for finite, _ in rows.values())
        self._changed = [name in rows and rows[name][1] for name in self.names]
        if self._shards is not None:
            self._finite, self._changed = self._shards.verdicts.judge(
                self._finite, self._changed, self.number
            )

    def _frozen_and_same(self) -> dict[str, bool]:
        """For each frozen parameter, whether this rank's values are the common ones."""
        pairs = {
            name: (local(self._common.own[name].detach()), copy)
            for name, copy in self._copies()
            if not self._common.own[name].requires_grad
        }
        flags = _read([(own == copy.to(own.dtype)).all() for own, copy in pairs.values()])
        return dict(zip(pairs, flags, strict=True))

    def _copies(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, self._common.copies[name].detach()) for name in self.names]


class Fragments(tuple[Fragment, ...]):
    """All fragments of a model."""

    def in_progress(self) -> list[Fragment]:
        """The fragments whose averages are due in a later step, in the order of these steps."""
        due = [fragment for fragment in self if fragment.due is not None]
        return sorted(due, key=lambda fragment: fragment.due or 0)

    def note_trained(self) -> None:
        """Notes the parameters that are not frozen now."""
        for fragment in self:
            fragment.note_trained()

    def to_send(self) -> dict[str, bool]:
        """The parameters that are sent in the fragments' next exchanges: :attr:`Fragment.to_send`."""
        return {name: loaded for one in self for name, loaded in one.to_send.items()}

    def load_to_send(self, names: Mapping[str, bool]) -> None:
        """Sets the parameters that are sent, from :meth:`to_send`."""
        for fragment in self:
            fragment.to_send = {n: loaded for n, loaded in names.items() if n in fragment.names}

    def take(self) -> None:
        """Sets all parameters of this rank to the common ones."""
        for fragment in self:
            fragment.take()

    def state_dict(self) -> dict[str, Any]:
        """The fragments' part of a state, after their exchanges."""
        due = {one.number: one.state() for one in self if one.due is not None}
        return {"due": due, "to_send": self.to_send()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continues from :meth:`state_dict`."""
        self.load_to_send(state["to_send"])
        for fragment in self:
            fragment.forget_failed()
        for number, due in state["due"].items():
            self[number].load(*due)


def _read(flags: Sequence[torch.Tensor]) -> list[Any]:
    """The values of small tensors of one shape; the host waits for a device once."""
    if not flags:
        return []
    values: list[Any] = torch.stack([one.to(flags[0].device) for one in flags]).tolist()
    return values


def _difference(copy: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The copy, as a parameter would hold it, less this rank's parameter; in the copy's dtype."""
    return copy.to(own.dtype).to(copy.dtype) - own.to(copy.dtype)


def _work(begun: Work | Future[Work]) -> Work:
    return begun.result() if isinstance(begun, Future) else begun


def check_model(model: nn.Module, own: Mapping[str, torch.Tensor]) -> None:
    """Raises ``ValueError`` unless a model's trainable parameters are ``own``, those of its fragments."""
    now = parameters(model, "DiLoCo.model")
    new = [n for n, p in now.items() if p.requires_grad and own.get(n) is not p]
    gone = [n for n, p in own.items() if now.get(n) is not p and n not in new]
    if new or gone:
        raise ValueError(
            f"DiLoCo.model: expected the parameters that required gradients when DiLoCo was made, got "
            f"new, replaced or unfrozen ones {new[:5]}, and without {gone[:5]}: make DiLoCo while "
            f"everything that is to be trained requires gradients, and freeze it afterwards; or "
            f"synchronize(), change the model, and make a new DiLoCo with a new compressor"
        )


def split(
    own: Mapping[str, torch.Tensor], fragments: int | Sequence[Sequence[str]]
) -> list[list[str]]:
    """The names of each fragment's parameters.

    Args:
        own: the trainable parameters by name, in the model's order.
        fragments: the number of fragments, which then have nearly equal numbers of elements and are in the
            model's order; or, for each fragment, patterns (``fnmatch``) of names.

    Raises:
        ValueError: there are more fragments than parameters; a parameter belongs to no fragment or to
            several; or a pattern matches nothing.
    """
    if isinstance(fragments, int):
        return _equal(own, fragments)
    names = list(own)
    chosen = [
        {name for pattern in patterns for name in matching(pattern, names, "DiLoCo.fragments")}
        for patterns in fragments
    ]
    for name in names:
        count = sum(name in some for some in chosen)
        if count != 1:
            raise ValueError(
                f"DiLoCo.fragments: expected each parameter in one fragment, got {name!r} in {count}"
            )
    return [[name for name in names if name in some] for some in chosen]


def _equal(own: Mapping[str, torch.Tensor], count: int) -> list[list[str]]:
    if not 1 <= count <= len(own):
        raise ValueError(
            f"DiLoCo.fragments: expected 1 to {len(own)}, the number of trainable parameters, got "
            f"{count}"
        )
    found: list[list[str]] = [[] for _ in range(count)]
    total = sum(parameter.numel() for parameter in own.values())
    before, left = 0, len(own)
    index = 0
    for name, parameter in own.items():
        # The next fragment begins where its share does, or where each of the rest needs a parameter.
        middle = before + parameter.numel() / 2
        while (
            index + 1 < count
            and found[index]
            and (middle >= (index + 1) * total / count or left <= count - 1 - index)
        ):
            index += 1
        found[index].append(name)
        before += parameter.numel()
        left -= 1
    return found
