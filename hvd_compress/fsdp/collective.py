"""The common part of the classes that replace a collective of FSDP2 in a shard group by an encoded one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from hvd_compress.codecs import Codec, NoiseKey
from hvd_compress.codecs.checks import check_threads
from hvd_compress.codecs.registry import codec_of
from hvd_compress.exchanges.routing import ENCODABLE
from hvd_compress.fsdp.sharding import Shared, shared
from hvd_compress.process_group.transport import ProcessGroupTransport

Run = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup, Any], None]
"""A function that gets a collective's output, input, process group and operation."""


class CompressedCollective:
    """The base of a class that replaces a collective of all modules.

    Args:
        model, codec, seed, threads: see the subclasses.
        collectives: a subclass of ``EncodedCollectives``, which sends the payloads.

    Attributes:
        _replaced: the name of the collective in FSDP2.
        _tensors: a word for its tensors, and the setting of ``MixedPrecisionPolicy`` with their dtype.
    """

    _replaced: ClassVar[str]
    _tensors: ClassVar[tuple[str, str]]

    def __init__(
        self,
        model: torch.nn.Module,
        codec: Codec | str,
        seed: int,
        threads: int | None,
        collectives: Callable[..., Any],
    ) -> None:
        owner = type(self).__name__
        self._modules = shared(model, owner, self._replaced)
        self._device = self._modules[0].device
        problem = None
        try:
            codec = codec_of(owner, "codec", codec)
            NoiseKey(seed)
            if threads is not None:
                check_threads(owner, threads)
            self._check(codec)
        except (TypeError, ValueError) as error:
            problem, threads = error, None
        transport = ProcessGroupTransport(self._modules[0].process_group)
        self._collectives = collectives(transport, exact_own=False, seed=seed, threads=threads)
        self._collectives.raise_everywhere(f"arguments of {owner}", problem, self._device)
        assert isinstance(codec, Codec)
        self._codec = codec
        modules = [[one.name, str(one.dtype), one.elements] for one in self._modules]
        settings = {"codec": codec.to_config(), "seed": seed, "modules": modules}
        self._collectives.agree(settings, self._device)

    def _check(self, codec: Codec) -> None:
        """Raises if the codec is not for this collective, or the modules' tensors cannot be encoded."""
        if codec.varies:
            raise ValueError(
                f"{type(self).__name__}.codec: expected payloads of a fixed length, got {codec}: write "
                f"coding='plain'"
            )
        content, setting = self._tensors
        for one in self._modules:
            dtype = str(one.dtype).removeprefix("torch.")
            if dtype not in ENCODABLE:
                raise TypeError(
                    f"{one.name}: expected {content} of {', '.join(ENCODABLE)}, got {dtype}: "
                    f"set {setting} in MixedPrecisionPolicy, or pass parts of the model without this module"
                )

    def _replace(self, module: Shared, run: Run) -> None:
        getattr(module.module, f"set_custom_{self._replaced}")(_Custom(run))


class _Custom:
    """The object that FSDP2 calls for a module, an implementation of its non-public ``Comm``."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocates memory for a message or a result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any = None,
        async_op: bool = False,
    ) -> None:
        """Returns when the collective is over, on a device in the current stream: there is no ``Work``."""
        self._run(output_tensor, input_tensor, group, op)
