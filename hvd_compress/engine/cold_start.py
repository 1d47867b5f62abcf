"""Two shots without a codec, for the cold start of owner steps."""

from __future__ import annotations

import torch

from hvd_compress.codecs.base import round_up
from hvd_compress.engine.batch import Batch
from hvd_compress.exchanges.comm import Comm, Exchanging
from hvd_compress.exchanges.layout import ALIGNMENT
from hvd_compress.exchanges.steps import FLOAT_BYTES
from hvd_compress.ranks.errors import ExchangeError


def cold_start(batch: Batch, comm: Comm) -> Exchanging:
    """Averages uncompressed gradients on their owners, with the owner step, and gathers float32 results.

    A message from an owner holds the owner's numbers, padded to the length of the longest owner's; a flag
    for each gradient; and a 1, which is missing if the owner has failed.
    """
    plan = batch.plan
    owners, members = plan.owners, plan.members
    assert owners is not None
    ranges = [[owners.part(member, owner) for member in members] for owner in range(owners.size)]
    longest = max(sum(end - begin for begin, end in own) for own in ranges)
    at = round_up(longest * FLOAT_BYTES, ALIGNMENT)
    size = at + round_up(len(members) + 1, ALIGNMENT)

    def work(rows: torch.Tensor) -> torch.Tensor:
        message = torch.zeros(size, dtype=torch.uint8, device=rows.device)
        averages = batch.average_parts(rows)
        batch.step_averages(averages)
        numbers = torch.cat(list(averages)).view(torch.uint8)
        message[: numbers.numel()] = numbers
        batch.write_flags(message[at:])
        message[at + len(members)] = 1
        return message

    received = yield comm.all_to_all(*batch.parts_to_owners())
    rows = yield comm.all_gather(batch.guard(lambda: work(received), size))
    numbers = rows[:, :at].contiguous().view(torch.float32)

    def write(scale: float) -> None:
        failed = (rows[:, at + len(members)] == 0).nonzero().flatten().tolist()
        if failed:
            raise ExchangeError(
                f"{plan.names}: expected averages of every rank, got none from rank {failed[0]}, whose own "
                f"error says why"
            )
        for row, own in zip(numbers, ranges, strict=True):
            taken = 0
            for flat, (begin, end) in zip(batch.flats, own, strict=True):
                part = row[taken : taken + end - begin]
                flat[begin:end] = part * (scale * owners.weight)
                taken += end - begin
        batch.nonfinite |= not bool(numbers.isfinite().all())

    batch.load_by(write, rows[:, at:])
