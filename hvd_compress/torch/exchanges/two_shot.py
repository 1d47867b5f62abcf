"""The two-shot exchange: parts to their owners, averages from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_compress.exchange import two_shot
from hvd_compress.exchange.routing import Route
from hvd_compress.torch.collectives import Collectives
from hvd_compress.torch.exchanges.base import Exchange, Refused, Relay, Transfer, Uncompressed
from hvd_compress.torch.exchanges.bundles import Bundles
from hvd_compress.torch.owner_steps import OwnerStep
from hvd_compress.torch_common.encoder import Encoder
from hvd_compress.torch_common.shots import Shots, owned_of, shards_of
from hvd_compress.torch_common.slots import Owned, Slot


class TwoShot(Exchange):
    """What a rank sends does not depend on the number of ranks (1-bit SGD, section 3.1).

    Args:
        collectives: the ranks.
        encoder: what this rank encodes with.
        owner_step: what owners do with the averages before they send them, or None.
    """

    def __init__(
        self, collectives: Collectives, encoder: Encoder, owner_step: OwnerStep | None
    ) -> None:
        super().__init__(collectives, encoder)
        self._owner_step = owner_step
        self._bundles = Bundles(collectives)

    def check(self, slot: Slot, route: Route) -> None:
        """See :meth:`Exchange.check`."""
        two_shot.check(slot.name, route.codec, shards_of(slot, self.collectives.size))

    def encode(self, slot: Slot, gradient: torch.Tensor) -> Transfer:
        """See :meth:`Exchange.encode`."""
        self._own(slot, gradient)
        if slot.route.feedback.enabled:
            self.encoder.residual(slot, gradient.device)
        else:
            self.encoder.release_residual(slot, gradient)
        return BundledShots(
            self.collectives, self._bundles, self.encoder, self._owner_step, slot, gradient
        )

    def prepare(self, slots: Sequence[Slot]) -> None:
        """See :meth:`Exchange.prepare`: makes up bundles."""
        self._bundles.plan([(slot.index, slot.count) for slot in slots])

    def flush(self) -> list[Relay]:
        """See :meth:`Exchange.flush`."""
        return self._bundles.flush()

    def owned(self, slot: Slot) -> Owned:
        """See :meth:`Exchange.owned`."""
        return owned_of(slot, self.collectives.rank, self.collectives.size)


class BundledShots(Shots, Transfer):
    """A gradient's shots in this step; a :class:`Bundle` sends them.

    Args:
        collectives: the ranks.
        bundles: with which others it travels.
        encoder: what this rank encodes with.
        owner_step: see :class:`TwoShot`.
        slot: whose gradient; its residuals are in the gradient's units.
        gradient: of the slot's shape.
    """

    def __init__(
        self,
        collectives: Collectives,
        bundles: Bundles,
        encoder: Encoder,
        owner_step: OwnerStep | None,
        slot: Slot,
        gradient: torch.Tensor,
    ) -> None:
        super().__init__(encoder, collectives.size, slot, gradient, owner_step)
        self._collectives = collectives
        self._bundles = bundles

    def start(self) -> Relay | None:
        """See :meth:`Transfer.start`."""
        return self._bundles.add(self)

    def alone(self) -> Transfer:
        """See :meth:`Transfer.alone`; an owner's step cannot be left out."""
        if self._owner_step is None:
            return Uncompressed(self._collectives, self)
        return Refused(
            self._collectives,
            self,
            f"{self.name}: expected all {self._collectives.size} ranks to take part in a step with an "
            f"owner_step, got some that have called hvd.join(); the parts that they own cannot be stepped",
        )
