"""A worker of which all ranks are killed, while the others go on with their shards."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.diloco.sharded_member import SHARDS
from tests.diloco.test_rebind import Members
from tests.torch_models import assert_same_bits

RANKS = 3 * SHARDS


def test_two_of_three_workers_go_on(tmp_path: Path) -> None:
    members = Members(tmp_path, "tests.diloco.sharded_member")
    try:
        for rank in range(RANKS):
            members.start(str(rank), str(RANKS))
        killed = [members.kill(str(rank)) for rank in range(RANKS - SHARDS, RANKS)]
        members.store.set("killed", "")
        for rank in range(RANKS - SHARDS):
            members.end(str(rank))
    finally:
        members.stop()
    errors = [Path(tmp_path, f"{rank}.error").read_text() for rank in range(RANKS - SHARDS)]
    # They learn of it at once, and not by their timeout of a minute.
    assert all(float(text.split()[0]) - killed[0] < 45 for text in errors), errors
    ends = [torch.load(Path(tmp_path, f"{rank}.end")) for rank in range(RANKS - SHARDS)]
    for rank, (rounds, shards) in enumerate(ends):
        assert rounds == ends[0][0] > 10
        assert_same_bits(shards, ends[rank % SHARDS][1])
