"""The interface through which the contract uses a frontend; modules beside this one implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.exchanges.reference import Simulation
from hvd_compress.exchanges.simulation import OwnerStep
from hvd_compress.ranks.counters import Counters
from tests.contract.cases import SHAPES

Arrays = Mapping[str, np.ndarray]
Kept = dict[str, np.ndarray]

OF_HOROVOD = {
    # Otherwise Horovod leaves a single rank alone.
    (1, False): {"HOROVOD_ELASTIC": "1"},
    (3, False): {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"},
    (4, True): {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"},
}
"""The environment of ranks under Horovod, see :attr:`Frontend.environment`."""


@dataclass(frozen=True)
class Form:
    """A way to use a frontend that must not change a bit.

    Attributes:
        options: the options of :meth:`Frontend.make`.
        sums: whether gradients are added up, and not averaged.
        lacks: the exchanges with which it cannot be used.
    """

    options: dict[str, Any] = field(default_factory=dict)
    sums: bool = False
    lacks: tuple[str, ...] = ()


class Job(ABC):
    """A model with a compressor on this rank, whose gradients are known."""

    @abstractmethod
    def step(self, gradients: Arrays, used: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """One step.

        Args:
            gradients: this rank's gradients, float32; they are rounded to the model's dtype.
            used: the parameters that have a gradient, in the order of the forward pass; None is all.

        Returns:
            What the gradients have become, float32, without those of parameters that no rank used.
        """

    @abstractmethod
    def kept(self) -> tuple[Kept, Kept]:
        """Copies of the residuals of this rank: of its gradients, and of what it owns."""

    @property
    @abstractmethod
    def counters(self) -> Counters:
        """The compressor's."""

    @abstractmethod
    def joining(self) -> AbstractContextManager[None]:
        """Ranks may make different numbers of steps within; leaving waits for all."""

    @abstractmethod
    def save(self) -> Any:
        """The compressor's checkpoint on this rank; it can be pickled, and lasts as long as the job."""

    @abstractmethod
    def load(self, saved: Any) -> None:
        """Goes on from a checkpoint of the same exchange."""

    @abstractmethod
    def take_over(self, everybodys: Sequence[Any]) -> None:
        """Goes on from the checkpoints of all ranks with another exchange."""


class Frontend(ABC):
    """A row of the contract.

    Attributes:
        name: the name of its package.
        launcher: the launcher of ranks on one host, see :mod:`tests.jobs`.
        launcher_of_hosts: the launcher of ranks on two hosts, for the hierarchical exchange.
        environment: the ranks' environment, by their number and whether they are on two hosts.
        cannot: the reasons why it lacks properties, by the properties' names.
        lacks: the exchanges that it does not have.
        alone: names of properties after which the ranks are of no more use.
        errors: the errors that every rank raises where the ranks disagree.
        leavers: ranks that join early, one after the other in the same job.
        single: whether a single rank exchanges with itself.
        outsiders: whether ranks make a job that does not take part.
        zeros_after_join: whether it goes on sending zeros.
        with_unused: options of :meth:`make` where some parameters are not used.
        sends_unused: whether a gradient that no rank has is sent as zeros; otherwise its residual stays.
        one_bucket: options of :meth:`make` that have all gradients travel together.
        views: options of :meth:`make` under which gradients lie elsewhere in memory.
        exact: whether residuals are the same bits after a dropped step, and not only the same up to
            rounding.
        flag_bytes: the bytes of a message for each gradient, before it is padded to 16 bytes in all.
        token_bytes: the bytes that Horovod adds up for each encoded gradient.
        alike: whether owners' messages are as long as the longest one.
        varies: whether payloads may be shorter than their places.
        shapes: the shapes of the tensors that faults are tried with.
        defaults: settings of the framework that must not change a bit.
    """

    name: ClassVar[str]
    launcher: ClassVar[str]
    launcher_of_hosts: ClassVar[str]
    environment: ClassVar[Mapping[tuple[int, bool], Mapping[str, str]]] = {}
    cannot: ClassVar[Mapping[str, str]] = {}
    lacks: ClassVar[frozenset[str]] = frozenset()
    alone: ClassVar[frozenset[str]] = frozenset()
    errors: ClassVar[type[Exception]]
    leavers: ClassVar[Sequence[int]] = (1, 0)
    single: ClassVar[bool] = True
    outsiders: ClassVar[bool] = True
    zeros_after_join: ClassVar[bool] = False
    with_unused: ClassVar[Mapping[str, Any]] = {}
    sends_unused: ClassVar[bool] = True
    one_bucket: ClassVar[Mapping[str, Any]] = {}
    views: ClassVar[Sequence[dict[str, Any]]] = ({},)
    exact: ClassVar[bool] = True
    flag_bytes: ClassVar[int] = 1
    token_bytes: ClassVar[int] = 0
    alike: ClassVar[bool] = True
    varies: ClassVar[bool] = True
    shapes: ClassVar[Mapping[str, tuple[int, ...]]] = SHAPES
    defaults: ClassVar[Sequence[Callable[[], AbstractContextManager[None]]]] = ()

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of ranks."""

    @property
    @abstractmethod
    def local(self) -> int:
        """The number of ranks on each host."""

    @property
    @abstractmethod
    def forms(self) -> Sequence[Form]:
        """Ways to use it."""

    @abstractmethod
    def make(
        self,
        exchange: str,
        codec: Codec,
        feedback: ErrorFeedback,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: str = "float32",
        **options: Any,
    ) -> Job:
        """A job whose compressor encodes everything, unless the options say otherwise."""

    @abstractmethod
    def rounded(self, array: np.ndarray, dtype: str) -> np.ndarray:
        """Float32 numbers, rounded to another type and back."""

    @abstractmethod
    def group_of(self, *ranks: int) -> dict[str, Any]:
        """Options of :meth:`make` for some of the ranks; all ranks have to call it."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Every rank's value."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns when all ranks have called it."""

    def adagrad(self) -> tuple[Any, OwnerStep]:
        """AdaGrad as :meth:`make` takes it for ``owner_step``, and as the reference does."""
        raise NotImplementedError

    def called(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
        """Returns the frontend's name for each parameter."""
        return {name: name for name in shapes}

    def simulation(
        self,
        exchange: str,
        codec: Codec,
        feedback: ErrorFeedback,
        shapes: Mapping[str, tuple[int, ...]],
        **options: Any,
    ) -> Simulation:
        """Returns the reference of all ranks, or of those that the options name."""
        options = {"size": self.size, "local": self.local, **options}
        return Simulation(exchange, codec, feedback, shapes, **options)
