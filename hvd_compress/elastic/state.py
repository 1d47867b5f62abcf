"""What elastic Horovod's states of all frameworks do with what ranks have not sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod.common.elastic import State
from horovod.common.exceptions import HostsUpdatedInterrupt

from hvd_compress.elastic.commits import Commits
from hvd_compress.ranks import names


class ResidualState(State):
    """Before one of Horovod's states among the bases of a class: commits hold what is unsent as well."""

    _commits: Sequence[Commits]  # Of a framework's class.
    _share_residuals: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._made, self._synchronized = names.made(), False
        super().__init__(*args, **kwargs)

    def save(self) -> None:
        """Keeps the state in memory, on this rank alone: :meth:`commit` is what ranks do together."""
        for commits in self._commits:
            commits.keep(commits.take())
        super().save()

    def commit(self) -> None:
        """Keeps the state in memory, and looks whether hosts have come or gone; on all ranks together.

        Raises:
            HostsUpdatedInterrupt: they have; for ``hvd.elastic.run``.
            ExchangeError: gradients are on their way: call it after the step.
        """
        taken = [commits.take_together(self._share_residuals) for commits in self._commits]
        super().save()
        for commits, commit in zip(self._commits, taken, strict=True):
            commits.keep(commit)
        self.check_host_updates()

    def sync(self) -> None:
        """As of ``hvd.elastic.State``."""
        # The first time, before the function that may make compressors.
        if not self._synchronized:
            self._made, self._synchronized = names.made(), True
        super().sync()

    def reset(self) -> None:
        """Called by ``hvd.elastic.run`` when Horovod has been initialized again.

        The function that it runs then makes its compressors again, under the names that they have in a new
        process.
        """
        super().reset()
        names.count_from(self._made)

    def check_host_updates(self) -> None:
        """As of ``hvd.elastic.State``; ranks that leave hand over what they have not sent."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            # All ranks come here, those that leave as well.
            for commits in self._commits:
                commits.hand_over()
            raise HostsUpdatedInterrupt(skip_sync=False) from None
