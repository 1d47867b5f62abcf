"""The same payloads as the frontend for DDP sends, byte for byte."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
import torch.distributed as dist

import hvd_compress.torch
from hvd_compress import Route
from hvd_compress.codecs import BF16, ECQ, ErrorFeedback, Int8, OneBit, Ternary
from hvd_compress.engine.compressor import CompressorBase
from hvd_compress.engine.plan import Table
from tests.ddp import probes as ddp_probes
from tests.ranks import on_ranks
from tests.torch import probes as horovod_probes
from tests.torch_models import Probe, targets

SHAPES = {"a": (40, 70), "frozen": (5, 2), "b": (3000,), "c": (8, 3, 5, 5)}
ROWS = [
    (OneBit(), ErrorFeedback()),
    (Int8(), ErrorFeedback(0.5, 1.0)),
    (Ternary(), ErrorFeedback(0.0)),
    (ECQ(), ErrorFeedback(0.01, 1.0)),
    (BF16(), ErrorFeedback(0.0)),
]
Payloads = dict[tuple[int, int], np.ndarray]


def _record(compressor: CompressorBase) -> Payloads:
    """Returns a dictionary that gets each payload that is encoded, by tensor and step in the noise."""
    payloads: Payloads = {}
    make = compressor._batches.make

    def noting(*arguments: Any, **options: Any) -> Any:
        batch, exchanging = make(*arguments, **options)
        encode = batch.encode

        def encode_and_note(table: Table) -> torch.Tensor:
            message = encode(table)
            for piece in table.layout.pieces:
                key = batch.plan.members[piece.member].index, batch.steps[piece.member]
                payload = message[piece.offset : piece.offset + piece.size]
                payloads[key] = payload.numpy().copy()
            return message

        batch.encode = encode_and_note
        return batch, exchanging

    compressor._batches.make = noting  # type: ignore[method-assign]
    return payloads


def _model(dtype: torch.dtype) -> Probe:
    model = Probe(SHAPES, dtype)
    model.frozen.requires_grad_(False)  # Has a number in the noise all the same.
    return model


@on_ranks(2)
def test_payloads_are_those_of_the_frontend_for_ddp() -> None:
    rank = hvd.rank()
    folder = hvd.broadcast_object(tempfile.mkdtemp() if rank == 0 else None, name="folder")
    rendezvous = f"file://{Path(folder) / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for codec, feedback in ROWS:
            model = _model(dtype)
            compressor = hvd_compress.torch.Compressor(
                model, Route(codec, feedback), threshold=100, seed=3
            )
            by_horovod = _record(compressor)
            optimizer = horovod_probes.distributed(model, compressor)
            ddp, other = ddp_probes.distributed(
                _model(dtype), codec, feedback, threshold=100, seed=3
            )
            by_ddp = _record(other)
            for step in range(3):
                gradients = targets(SHAPES, rank, step)
                horovod_probes.exchange(model, optimizer, gradients)
                ddp_probes.exchange(ddp, gradients)
            assert by_horovod.keys() == by_ddp.keys()
            assert by_ddp.keys() == {(i, step) for i in (0, 2, 3) for step in range(3)}
            for key, payload in by_ddp.items():
                assert np.array_equal(payload, by_horovod[key]), (codec, dtype, key)
            states = [c.state_dict()["tensors"] for c in (compressor, other)]
            assert states[0].keys() == states[1].keys()
    dist.destroy_process_group()
