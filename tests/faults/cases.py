"""What happens to a rank, and what is promised then."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.contract.cases import ROWS

STOCK = "stock"
"""In the place of an exchange: the framework's own, without this package."""

EXCHANGES = {"fsdp": [name for name in ROWS if name != "hierarchical"]}
"""Those of frontends that do not have all of them."""

STEPS = 40
"""Of a job that goes on."""

BEGIN = 10
"""The step at which something happens to a rank."""

PAUSE = 3.0
"""Seconds for which a rank is stopped."""

TIMEOUT = 10
"""Seconds after which ranks give up one that does not answer, where they are told to."""

IMPATIENT = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "2",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(TIMEOUT),
    "HOROVOD_GLOO_TIMEOUT_SECONDS": str(TIMEOUT),
}
"""What tells Horovod's ranks to."""


@dataclass(frozen=True)
class Fault:
    """What happens to one rank.

    Attributes:
        does: for the table: what happens.
        seconds: within which all other ranks end with an error; None where training goes on on all ranks.
        signal: whether the rank gets a signal, and does nothing by itself.
        environment: variables of all ranks.
        timeout: of a process group, in seconds; None is the stock one.
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
    # Ranks may be making a process group, where Gloo waits for the killed one for up to five timeouts.
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
    """A fault of a rank of a job.

    Attributes:
        frontend: see :data:`tests.faults.frontends.FRONTENDS`.
        exchange: or :data:`STOCK`.
        fault: see :data:`FAULTS`.
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
        """How many."""
        return 4 if self.hosts or self.frontend == "fsdp" else 3

    def __str__(self) -> str:
        return f"{self.frontend}, {self.exchange}: {self.fault}"


def exchanges_of(frontend: str) -> list[str]:
    """Those that a frontend has."""
    return EXCHANGES.get(frontend, list(ROWS))
