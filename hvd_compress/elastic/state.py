"""The handling of unsent gradients that elastic Horovod's states have in common in all frameworks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod.common.elastic import State
from horovod.common.exceptions import HostsUpdatedInterrupt

from hvd_compress.elastic.commits import Commits
from hvd_compress.ranks import names


class ResidualState(State):
    """Precedes one of Horovod's states among the bases of a class: commits also hold unsent gradients."""

    _commits: Sequence[Commits]  # Set by a framework's class.
    _share_residuals: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._made, self._synchronized = names.made(), False
        super().__init__(*args, **kwargs)

    def save(self) -> None:
        """Keeps the state in memory, on this rank alone; :meth:`commit` is a call of all ranks together."""
        for commits in self._commits:
            commits.keep(commits.take())
        super().save()

    def commit(self) -> None:
        """Keeps the state in memory, and checks whether hosts were added or removed; a call of all ranks.

        Raises:
            HostsUpdatedInterrupt: hosts were added or removed; ``hvd.elastic.run`` handles it.
            ExchangeError: gradients are being sent: call it after the step.
        """
        taken = [commits.take_together(self._share_residuals) for commits in self._commits]
        super().save()
        for commits, commit in zip(self._commits, taken, strict=True):
            commits.keep(commit)
        self.check_host_updates()

    def restore(self) -> None:
        """Goes back to the last commit, or to the beginning."""
        for commits in self._commits:
            commits.restore()
        super().restore()

    def sync(self) -> None:
        """See ``hvd.elastic.State``."""
        # The first time, before the function that may make compressors.
        if not self._synchronized:
            self._made, self._synchronized = names.made(), True
        super().sync()

    def reset(self) -> None:
        """Called by ``hvd.elastic.run`` when Horovod has been initialized again.

        The function that it runs then makes its compressors again, with the names that they have in a new
        process.
        """
        super().reset()
        names.count_from(self._made)

    def check_host_updates(self) -> None:
        """See ``hvd.elastic.State``; ranks that leave hand over their unsent gradients."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            # All ranks come here, those that leave as well.
            for commits in self._commits:
                commits.hand_over()
            raise HostsUpdatedInterrupt(skip_sync=False) from None
