"""The faults of a rank, and the promises for the other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.contract.cases import ROWS

STOCK = "stock"
"""Stands for the framework's own exchange, without this package."""

_OF_TENSORFLOW = [name for name in ROWS if name in ("allgather", "two_shot")]
EXCHANGES = {
    "fsdp": [name for name in ROWS if name != "hierarchical"],
    "tensorflow": _OF_TENSORFLOW,
    "keras": _OF_TENSORFLOW,
}
"""The exchanges of frontends that do not have all of them."""

STEPS = 40
"""The number of steps of a job that survives its fault."""

BEGIN = 10
"""The step of the fault."""

PAUSE = 3.0
"""The time for which a rank is stopped, in seconds."""

TIMEOUT = 10
"""The seconds after which ranks give up on one that does not answer, in cases with a timeout."""

IMPATIENT = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "2",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(TIMEOUT),
    "HOROVOD_GLOO_TIMEOUT_SECONDS": str(TIMEOUT),
}
"""The variables that set this timeout for Horovod's ranks."""


@dataclass(frozen=True)
class Fault:
    """A fault of one rank.

    Attributes:
        does: the description of the fault in the table.
        seconds: the time within which all other ranks end with an error; None if training continues.
        signal: whether the rank gets a signal, instead of causing the fault itself.
        environment: environment variables of all ranks.
        timeout: the timeout of a process group in seconds; None: PyTorch's default.
    """

    does: str
    seconds: float | None = None
    signal: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    timeout: int | None = None

    @property
    def ends(self) -> bool:
        """Whether the job ends."""
        return self.seconds is not None


FAULTS = {
    # If ranks are making a process group, Gloo waits for the killed one for up to five timeouts.
    "kill in the first step": Fault("SIGKILL in the first step", 120, signal=True, timeout=TIMEOUT),
    "kill": Fault("SIGKILL", 60, signal=True),
    "raise": Fault("an exception of the script", 60),
    "leave": Fault("the script ends", 60),
    "hang": Fault(
        "SIGSTOP for longer than the timeout",
        60,
        signal=True,
        environment=IMPATIENT,
        timeout=TIMEOUT,
    ),
    "stop": Fault(f"SIGSTOP for {PAUSE:g} s", signal=True),
    "slow": Fault("steps that take longer than the others'"),
    "full disk": Fault("a checkpoint that does not fit on the disk"),
    "memory": Fault("no memory left for what is encoded", 60),
    "wait": Fault(
        "the script waits for longer than the timeout", 60, environment=IMPATIENT, timeout=TIMEOUT
    ),
}


@dataclass(frozen=True)
class Case:
    """A fault in a job of a frontend with an exchange.

    Attributes:
        frontend: a key of :data:`tests.faults.frontends.FRONTENDS`.
        exchange: the name of an exchange, or :data:`STOCK`.
        fault: a key of :data:`FAULTS`.
    """

    frontend: str
    exchange: str
    fault: str

    @property
    def hosts(self) -> bool:
        """Whether the ranks are on two hosts."""
        return self.exchange == "hierarchical"

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return 4 if self.hosts or self.frontend == "fsdp" else 3

    def __str__(self) -> str:
        return f"{self.frontend}, {self.exchange}: {self.fault}"


def exchanges_of(frontend: str) -> list[str]:
    """The exchanges of a frontend."""
    return EXCHANGES.get(frontend, list(ROWS))
