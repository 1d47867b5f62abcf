"""States of DiLoCo that were altered are refused with nothing changed."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from hvd_compress import OneBit
from tests.ddp.test_states_that_do_not_fit import _alike, _altered
from tests.diloco.nesterov import DiLoCo
from tests.ranks import on_ranks


@on_ranks(2, launcher="torchrun")
def test_every_field_of_a_state() -> None:
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(40, 30)
    diloco = DiLoCo(model, hvdc.Compressor(OneBit(), threshold=0), sync_every=2)
    for _ in range(2):
        with torch.no_grad():
            model.weight.add_(torch.randn(30, 40))
        diloco.step()
    before, refused = copy.deepcopy(diloco.state_dict()), 0
    for path, other, changed in _altered(before):
        if path[0] == "outer_optimizer" and len(path) > 2:
            continue  # What an optimizer keeps is its own.
        try:
            diloco.load_state_dict(changed)
        except (TypeError, ValueError):
            refused += 1
            assert _alike(diloco.state_dict(), before), (path, other)
        else:
            diloco.load_state_dict(before)
    assert refused > 150
