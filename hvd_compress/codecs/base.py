"""What a codec is: a frozen configuration, a byte layout and the NumPy reference of its mathematics."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, NoReturn, Self

import numpy as np

from hvd_compress.codecs.feedback import OFF, ErrorFeedback
from hvd_compress.codecs.noise import NoiseKey
from hvd_compress.codecs.refusal import refuse

PACK_BLOCK = 2560
"""Elements packed together where the scale belongs to something else than a contiguous group."""

TINY = np.float32(2.0**-120)
"""Groups whose scale is below this are sent as zeros: its reciprocal would not be finite."""

CODINGS = {"plain": 0, "entropy": 1}
"""``hvdc_coding`` by the word for it: whether all codes take the same number of bits."""

Shape = tuple[int, ...]
Group = int | Literal["tensor"]
"""Elements of a contiguous group, or all of them."""


@dataclass(frozen=True)
class PayloadLayout:
    """Where the parts of a payload's body stand.

    Attributes:
        count: elements of the tensor.
        scales: float32 values at the start of the body, padded with zeros to 16 bytes.
        block: elements that are packed together, a multiple of 64.
        block_bytes: bytes of a full block's codes.
        last_bytes: bytes of the last block's codes, which may be short.
    """

    count: int
    scales: int
    block: int
    block_bytes: int
    last_bytes: int

    @property
    def blocks(self) -> int:
        """How many blocks the codes stand in, the last one possibly short."""
        return -(-self.count // self.block)

    @property
    def codes_offset(self) -> int:
        """Bytes from the start of the body to the codes."""
        return round_up(4 * self.scales, 16)

    @property
    def body_bytes(self) -> int:
        """Bytes of the body, padded so that a payload is a multiple of 16 bytes."""
        codes = (self.blocks - 1) * self.block_bytes + self.last_bytes if self.count else 0
        return round_up(self.codes_offset + codes, 16)


@dataclass(frozen=True)
class Codec:
    """A way to turn float32 numbers into few bits, and back.

    Subclasses are frozen dataclasses whose fields are the configuration: values, which frontends take.
    They hold no state: residuals and noise positions belong to the compressor. ``codec_id`` names a frozen
    byte format: a change of the bytes is a new id.
    """

    codec_id: ClassVar[int]
    name: ClassVar[str]
    error: ClassVar[Literal["unbiased", "contractive"]]
    """How the quantization error behaves, which decides what error feedback is stable:
    ``E[Q(x)] = x``, but for what the codec's own clipping cuts off, or ``|x - Q(x)| < |x|`` always."""
    feedback: ClassVar[ErrorFeedback] = OFF
    """The coefficients of error feedback in the codec's paper."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Answers a compressor's arguments with where they belong.

        Raises:
            TypeError: a model, its parameters, or a keyword that the codec does not have.
        """
        models = (
            one for one in args if hasattr(one, "named_parameters") or hasattr(one, "__next__")
        )
        got = next((f"a model ({type(one).__name__})" for one in models), "")
        if options:
            known = inspect.signature(cls.__init__).parameters
            got = got or next(
                (f"the keyword {name!r}" for name in options if name not in known), ""
            )
        if got:
            fields = ", ".join(field.name for field in dataclasses.fields(cls)) or "none"
            name = cls.__name__
            raise TypeError(
                f"{name}: expected settings of the codec ({fields}), got {got}: this is a codec; models "
                f"and options belong to a compressor, as in Compressor(model, {name}(), warmup_steps=10)"
            )
        return super().__new__(cls)

    @property
    def saturates(self) -> bool:
        """Whether numbers beyond a fixed range are cut off: what is cut off can never be sent later."""
        return False

    @property
    def varies(self) -> bool:
        """Whether a payload may be shorter than :meth:`payload_bytes`, which is then its capacity."""
        return False

    @property
    def shaped(self) -> bool:
        """Whether the code depends on the tensor's rows and columns, not only on its elements in a row."""
        return False

    def by_rows(self) -> tuple[Codec, bool]:
        """What encodes whole rows of a matrix that ranks share out, and whether it is transposed first.

        Only where :attr:`shaped`.
        """
        raise NotImplementedError

    def layout(self, shape: Shape) -> PayloadLayout:
        """The byte layout for a tensor of that shape."""
        raise NotImplementedError

    def quantize(
        self, x: np.ndarray, shape: Shape, noise: NoiseKey
    ) -> tuple[np.ndarray, np.ndarray]:
        """The reference of encoding.

        Args:
            x: shape=(n,), dtype float32: the tensor in row-major order, residual added.
            shape: the tensor's shape.
            noise: position in the noise; codecs that round deterministically ignore it.

        Returns:
            The scales, shape=(layout.scales,), dtype float32, NaN for groups that hold a non-finite
            number, and the codes of all blocks, dtype uint8.
        """
        raise NotImplementedError

    def dequantize(self, scales: np.ndarray, codes: np.ndarray, shape: Shape) -> np.ndarray:
        """The reference of decoding: shape=(n,), dtype float32, NaN where a scale is NaN."""
        raise NotImplementedError

    def variance_factor(self, count: int) -> float:
        """The gamma for which ``E|Q(x) - x|^2 <= gamma |x|^2`` with ``count`` elements (unbiased codecs).

        ECQ-SGD, lemma 1.
        """
        raise NotImplementedError

    def native(self) -> dict[str, int | float]:
        """The fields of the C interface's ``hvdc_spec`` that this configuration sets."""
        raise NotImplementedError

    def payload_bytes(self, shape: Shape) -> int:
        """Bytes that a payload for a tensor of that shape takes, header and padding included.

        What it occupies of them is less where the codec :attr:`varies`
        (:func:`hvd_compress.codecs.payload.payload_length`).
        """
        return _payload_bytes(self, shape)

    def bits_per_element(self, shape: Shape) -> float:
        """Bits of :meth:`payload_bytes` per element; infinite for an empty tensor."""
        count = math.prod(shape)
        return 8 * self.payload_bytes(shape) / count if count else math.inf

    @classmethod
    def compress(cls, tensor: Any) -> NoReturn:
        """Raises ``TypeError``: Horovod calls it where a codec was given in place of a compressor."""
        refuse(f"the codec {cls.__name__}", f"{cls.__name__}()")

    def to_config(self) -> dict[str, Any]:
        """The configuration as JSON types, with the codec's name under ``"codec"``."""
        return {"codec": self.name, **dataclasses.asdict(self)}

    def config_hash(self) -> int:
        """The first four bytes of the SHA-256 of the configuration's canonical JSON, little-endian."""
        text = json.dumps(self.to_config(), sort_keys=True, separators=(",", ":"))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


# Every call of a kernel asks, in every step for the same tensors.
@lru_cache(maxsize=4096)
def _payload_bytes(codec: Codec, shape: Shape) -> int:
    from hvd_compress.codecs.payload import HEADER_BYTES

    return HEADER_BYTES + codec.layout(shape).body_bytes


def as_matrix(shape: Shape) -> tuple[int, int]:
    """Rows and columns of ``reshape(shape[0], -1)``; a 0-dimensional tensor is one by one."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def grouped_layout(shape: Shape, group: Group, code_bytes: Callable[[int], int]) -> PayloadLayout:
    """The layout of a codec with one scale a group, whose ``n`` codes take ``code_bytes(n)`` bytes."""
    count = math.prod(shape)
    block = PACK_BLOCK if group == "tensor" else group
    last = count % block or block
    scales = group_count(count, group)
    return PayloadLayout(count, scales, block, code_bytes(block), code_bytes(last))


def native_grouping(group: Group) -> dict[str, int | float]:
    """``grouping`` and ``group`` of the C interface."""
    return {"grouping": 1} if group == "tensor" else {"grouping": 0, "group": group}


def unit_of(full: np.ndarray, top: np.float32) -> np.ndarray:
    """What code 1 decodes to, where code ``top`` has to decode to ``full``; both finite, dtype float32.

    Where rounding makes the quotient so large that code ``top`` would overflow, it is the float below.
    """
    unit = full / top
    with np.errstate(over="ignore"):
        overflows = np.isinf(unit * top)
    return np.where(overflows, np.nextafter(unit, np.float32(0)), unit)


def groups_of(x: np.ndarray, group: Group) -> list[np.ndarray]:
    """Views of a flat tensor's groups, the last one possibly short."""
    size = max(1, x.size) if group == "tensor" else group
    return [x[start : start + size] for start in range(0, x.size, size)]


def by_group(x: np.ndarray, group: Group) -> np.ndarray:
    """A flat tensor as rows of one group each, shape=(groups, size), padded with zeros."""
    size = max(1, x.size) if group == "tensor" else group
    groups = group_count(x.size, group)
    padded = np.zeros(groups * size, x.dtype)
    padded[: x.size] = x
    return padded.reshape(groups, size)


def group_count(count: int, group: Group) -> int:
    """How many groups ``count`` elements have, the last one possibly short."""
    return min(1, count) if group == "tensor" else -(-count // group)


def group_lengths(count: int, group: Group) -> np.ndarray:
    """How many elements each group really has, shape=(groups,), dtype int64."""
    size = max(1, count) if group == "tensor" else group
    starts = np.arange(0, count, size, dtype=np.int64)
    return np.minimum(size, count - starts)


def spread(per_group: np.ndarray, count: int, group: Group) -> np.ndarray:
    """Repeats one value a group over the group's elements, shape=(count,)."""
    return np.repeat(per_group, group_lengths(count, group))
