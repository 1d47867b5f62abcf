"""Packs the tensors of a bucket, and begins their exchanges."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import cached_property

import torch

from hvd_compress.engine.batches import Batches
from hvd_compress.engine.executors import CUDA_KERNELS
from hvd_compress.engine.parameters import Slot
from hvd_compress.engine.residuals import Changes
from hvd_compress.engine.routes import Routes, sent_dtype
from hvd_compress.engine.run import Run
from hvd_compress.engine.uncompressed import Uncompressed
from hvd_compress.process_group.step import Bucket
from hvd_compress.ranks.counters import Counters
from hvd_compress.ranks.errors import ExchangeError

Tensors = Iterable[tuple[Slot, torch.Tensor, torch.Tensor]]
"""For each tensor, its slot, its view in the slot's shape, and a view of the same memory in any shape: the
one that is sent if the tensor is not encoded."""


class Packer:
    """Packs the buckets of a compressor.

    Args:
        batches: encodes the tensors.
        routes: the routes of the tensors.
        device: the device of all tensors.
    """

    def __init__(self, batches: Batches, routes: Routes, device: torch.device) -> None:
        self._batches = batches
        self._routes = routes
        self._device = device

    def pack(
        self,
        bucket: Bucket,
        tensors: Tensors,
        counters: Counters,
        *,
        unused: Container[int] = (),
        buffer: torch.Tensor | None = None,
        beside: Callable[[list[torch.Tensor]], torch.Tensor] | None = None,
    ) -> None:
        """Encodes a bucket's tensors, and adds their exchanges to the bucket.

        Args:
            bucket: a bucket without exchanges.
            tensors: the tensors.
            counters: the counters, to which the encoding is added.
            unused: the indexes of the slots for which this rank has no gradient of its own, and sends zeros
                for the other ranks.
            buffer: the memory that holds exactly these tensors one after another, if there is such memory.
            beside: makes a tensor that is summed together with tensors that are not encoded.
        """
        common = self._batches.common
        bucket.changes = common.last.changes()
        encoded: dict[tuple[str, bool, torch.dtype], list[tuple[Slot, torch.Tensor]]] = {}
        uncompressed: dict[torch.dtype, list[torch.Tensor]] = {}
        for slot, tensor, row in tensors:
            counters.uncompressed_bytes += tensor.numel() * tensor.element_size()
            self._routes.take_up(slot, tensor)
            warming_up, goes = self._routes.warming_up(slot), self._routes.goes_uncompressed(slot)
            slot.exchanges += 1
            if not tensor.numel():
                continue
            if goes:
                # Where no rank uses a parameter, DDP throws the average away, with what would be released.
                if slot.index not in unused:
                    self._release(bucket.changes, slot, tensor)
                dtype = sent_dtype(slot.route, tensor, warming_up=warming_up)
                uncompressed.setdefault(dtype, []).append(row)
            else:
                self._check_device(slot, tensor)
                key = slot.route.kind, warming_up, tensor.dtype
                encoded.setdefault(key, []).append((slot, tensor))
        for (_, warming_up, _), pairs in encoded.items():
            bucket.runs.append(self._encode(pairs, unused, counters, encoded=not warming_up))
        # For an average, each rank adds its share: in half precision, a sum might overflow.
        divisor = 1 if bucket.scale == 1 else common.group.size
        for dtype, rows in uncompressed.items():
            rows = rows if beside is None else [*rows, beside(rows)]
            bucket.runs.append(self.uncompressed(rows, dtype, buffer, divisor))

    def uncompressed(
        self,
        rows: list[torch.Tensor],
        dtype: torch.dtype,
        buffer: torch.Tensor | None,
        divisor: int,
    ) -> Run:
        """Tensors that are sent in a dtype, divided by a number; for ``buffer``, see :meth:`pack`."""
        whole = buffer is not None and sum(row.numel() for row in rows) == buffer.numel()
        content = Uncompressed(
            rows, dtype, buffer=buffer if whole else None, divisor=divisor, deferred=self.deferred
        )
        return Run(content.exchange(self._batches.comm), content)

    @cached_property
    def deferred(self) -> bool:
        """Whether the host must not wait for the gradients' device."""
        # Without the CUDA library, which uncompressed gradients do not need.
        if self._device.type in CUDA_KERNELS:
            return True
        like = torch.empty(0, dtype=torch.float32, device=self._device)
        return self._batches.common.kernels.deferred(like) is not None

    def _release(self, changes: Changes, slot: Slot, tensor: torch.Tensor) -> None:
        scale = self._batches.common.loss_scale
        changes.release(slot, tensor, scale)
        changes.release_owned(slot, tensor, scale)

    def _encode(
        self,
        pairs: Sequence[tuple[Slot, torch.Tensor]],
        unused: Container[int],
        counters: Counters,
        *,
        encoded: bool,
    ) -> Run:
        slots = [slot for slot, _ in pairs]
        used = [slot.index not in unused for slot in slots]
        tensors = [tensor for _, tensor in pairs]
        return self._batches.begin(slots, tensors, used, counters, encoded=encoded)

    def _check_device(self, slot: Slot, tensor: torch.Tensor) -> None:
        if tensor.device != self._device:
            raise ExchangeError(
                f"{slot.name}: expected a gradient on {self._device}, as when the compressor was made, got "
                f"one on {tensor.device}: make the compressor after the model has been moved; "
                f"load_state_dict() takes residuals along"
            )
