"""Finds out which ranks take part in a step, and whether they send the same things."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvd_compress.ranks import token
from hvd_compress.torch.collectives import Handle, HorovodCollectives


class Participation:
    """The participation check of every step, and the comparison of settings in the first one.

    The check also tells whether some rank has still to compare its settings with the others', for example
    because it has replaced another: then all of them compare.

    An all_gather among ranks of which one has joined would crash Horovod, so messages are held back until
    the result of the participation check is there: a sum of a few bytes, started by the step's first
    gradient.

    Args:
        collectives: the collectives among the ranks.
        configuration: returns the settings to compare; called in a step in which ranks compare them.
        prepare: called by every rank once they agree; may wait for the others.

    Attributes:
        agreed: whether this rank knows that the ranks' settings are the same.
        tokens: the sum of the tokens of the ranks that take part; None before it is known.
    """

    def __init__(
        self,
        collectives: HorovodCollectives,
        configuration: Callable[[], dict[str, Any]],
        prepare: Callable[[], None],
    ) -> None:
        self._collectives = collectives
        self._configuration = configuration
        self._prepare = prepare
        self._comparing: Handle | None = None
        self.agreed = False
        self._checking: Handle | None = None
        self._token = token.make(collectives.rank)
        self._of_everybody = token.of_everybody(collectives.size)
        self.tokens: list[float] | None = None

    @property
    def complete(self) -> bool:
        """Whether all ranks take part, as far as this rank knows."""
        if self.tokens is None or self.tokens == self._of_everybody:
            return True
        return token.everybody(self.tokens, self._collectives.size)

    def forget(self) -> None:
        """Makes the ranks compare their settings again in the next step."""
        self.agreed, self._comparing = False, None

    def begin(self) -> None:
        """Starts a step's check, before anything is sent or encoded."""
        self.tokens = None
        values = torch.tensor(
            [*self._token, float(not self.agreed)],
            dtype=torch.float32,
            device="cpu",
        )
        self._checking = self._collectives.all_reduce(values, "participation")

    def known(self, timeout: float) -> bool:
        """Whether it is known which ranks take part, and that they agree.

        Waits up to ``timeout`` seconds for slower ranks.

        Raises:
            ExchangeError: the ranks' settings differ; raised on every rank.
        """
        if not self.checked(timeout):
            return False
        # An all_gather, like those that follow: a rank that has joined could take no part in it.
        return self.agreed or not self.complete or self._agree(timeout)

    def checked(self, timeout: float) -> bool:
        """Whether it is known which ranks take part; asked before any rank sends its settings.

        Waits up to ``timeout`` seconds for slower ranks.
        """
        if self._checking is not None:
            if not self._checking.done(timeout):
                return False
            *self.tokens, to_compare = self._checking.wait().tolist()
            self._checking = None
            if to_compare:
                self.agreed = False
        return True

    def _agree(self, timeout: float) -> bool:
        if self._comparing is None:
            settings = self._configuration()
            self._comparing = self._collectives.send_settings(settings, "configuration")
        if not self._comparing.done(timeout):
            return False
        self._collectives.check_settings(self._comparing)
        self._prepare()
        self.agreed, self._comparing = True, None
        return True
