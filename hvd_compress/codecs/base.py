"""The base class of codecs: a frozen configuration, a byte layout and a NumPy reference."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, NoReturn, Self

import numpy as np

from hvd_compress.codecs import stability
from hvd_compress.codecs.feedback import OFF, ErrorFeedback
from hvd_compress.codecs.noise import NoiseKey
from hvd_compress.codecs.refusal import refuse

HEADER_BYTES = 32
"""The size of a payload's header in bytes."""

PACK_BLOCK = 2560
"""The number of elements packed together where scales do not belong to contiguous groups."""

TINY = np.float32(2.0**-120)
"""The smallest scale that is used: below it, the reciprocal would not be finite, and zeros are sent."""

CODINGS = {"plain": 0, "entropy": 1}
"""The values of ``hvdc_coding`` by name: whether all codes take the same number of bits."""

MEANT = {
    "bits": "Int8() has 8 bits an element, ECQ(levels=7) 4, ECQ(levels=1) 2, Ternary() 1.6, OneBit() 1",
    **dict.fromkeys(
        ("ratio", "density", "sparsity", "k"),
        "TopK(keep=41, chunk=4096) keeps 41 of each 4096 elements, one in a hundred",
    ),
}
"""The settings that are meant, by the keywords that other packages have for them."""

Shape = tuple[int, ...]
Group = int | Literal["tensor"]
"""The number of elements in a contiguous group, or ``"tensor"`` for one group of all elements."""


class PayloadError(ValueError):
    """A payload that no encoder with the given configuration can have written for the given tensor."""


@dataclass(frozen=True)
class PayloadLayout:
    """The positions of the parts of a payload's body.

    Attributes:
        count: the number of elements in the tensor.
        scales: the number of float32 values at the start of the body, padded with zeros to 16 bytes.
        block: the number of elements that are packed together, a multiple of 64.
        block_bytes: the bytes that a full block's codes take.
        last_bytes: the bytes that the codes of the last block, which may be short, take.
    """

    count: int
    scales: int
    block: int
    block_bytes: int
    last_bytes: int

    @property
    def blocks(self) -> int:
        """The number of blocks of codes; the last one may be short."""
        return -(-self.count // self.block)

    @property
    def codes_offset(self) -> int:
        """The offset of the codes from the start of the body, in bytes."""
        return round_up(4 * self.scales, 16)

    @property
    def body_bytes(self) -> int:
        """The size of the body in bytes, padded so that a payload is a multiple of 16 bytes."""
        codes = (self.blocks - 1) * self.block_bytes + self.last_bytes if self.count else 0
        return round_up(self.codes_offset + codes, 16)


@dataclass(frozen=True)
class Codec:
    """A way to turn float32 numbers into few bits, and back.

    Subclasses are frozen dataclasses whose fields are the configuration. They hold no state: residuals
    and noise positions belong to the compressor. ``codec_id`` names a frozen byte format: if the bytes
    change, the id must change.
    """

    codec_id: ClassVar[int]
    name: ClassVar[str]
    error: ClassVar[Literal["unbiased", "contractive"]]
    """The kind of quantization error, which decides the error feedback that is stable: unbiased is
    ``E[Q(x)] = x``, apart from the codec's own clipping; contractive is ``|x - Q(x)| < |x|``, always."""
    feedback: ClassVar[ErrorFeedback] = OFF
    """The error feedback coefficients of the codec's paper."""
    added: ClassVar[tuple[str, ...]] = ()
    """The fields that were added to a frozen format. At their default they are left out of
    :meth:`to_config`, so that the bytes with the default settings stay the same."""
    exchange: ClassVar[str | None] = None
    """The only exchange for the codec; None means all that send payloads."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Rejects arguments that belong to a compressor, with an error that says so.

        Raises:
            TypeError: a model, its parameters, or a keyword that the codec does not have.
        """
        models = (
            one for one in args if hasattr(one, "named_parameters") or hasattr(one, "__next__")
        )
        got, instead = next((f"a model ({type(one).__name__})" for one in models), ""), ""
        if options:
            known = inspect.signature(cls.__init__).parameters
            unknown = next((name for name in options if name not in known), "")
            if unknown and not got:
                got = f"the keyword {unknown!r}"
                near = difflib.get_close_matches(unknown, known, n=1)
                instead = MEANT.get(unknown, f"did you mean {near[0]!r}?" if near else "")
        if got:
            fields = ", ".join(field.name for field in dataclasses.fields(cls)) or "none"
            name = cls.__name__
            instead = instead or (
                f"this is a codec; models and options belong to a compressor, as in "
                f"Compressor(model, {name}(), warmup_steps=10)"
            )
            raise TypeError(
                f"{name}: expected settings of the codec ({fields}), got {got}: {instead}"
            )
        return super().__new__(cls)

    @property
    def saturates(self) -> bool:
        """Whether numbers are clipped to a fixed range: the clipped part can never be sent later."""
        return False

    @property
    def varies(self) -> bool:
        """Whether a payload may be shorter than :meth:`payload_bytes`, its capacity."""
        return False

    @property
    def on_device(self) -> bool:
        """Whether CUDA kernels exist for the codec, where :meth:`native` is defined. If not, copies in host
        memory are encoded and decoded."""
        return True

    def encodes(self, shape: Shape) -> bool:
        """Whether the codec encodes tensors of the given shape; others travel uncompressed."""
        return True

    @property
    def shaped(self) -> bool:
        """Whether codes depend on the tensor's rows and columns, not only on the order of its elements."""
        return False

    def by_rows(self) -> tuple[Codec, bool]:
        """The codec for the rows of a matrix divided among ranks, and whether to transpose it first.

        Only :attr:`shaped` codecs define this.
        """
        raise NotImplementedError

    def layout(self, shape: Shape) -> PayloadLayout:
        """The byte layout for a tensor of the given shape."""
        raise NotImplementedError

    def quantize(
        self, x: np.ndarray, shape: Shape, noise: NoiseKey
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encodes a tensor; the reference for the kernels.

        Args:
            x: the tensor in row-major order, residual added; shape=(n,), dtype float32.
            shape: the tensor's shape.
            noise: the position in the noise; codecs that round deterministically ignore it.

        Returns:
            The scales, shape=(layout.scales,), dtype float32, NaN for groups that hold a non-finite
            number, and the codes of all blocks, dtype uint8.
        """
        raise NotImplementedError

    def dequantize(self, scales: np.ndarray, codes: np.ndarray, shape: Shape) -> np.ndarray:
        """Decodes a tensor; the reference for the kernels.

        Returns:
            The elements, shape=(n,), dtype float32; NaN where a scale is NaN.
        """
        raise NotImplementedError

    def check_codes(self, codes: np.ndarray, shape: Shape) -> None:
        """Raises ``PayloadError`` for codes that do not decode; most codecs decode all.

        Args:
            codes: the codes of all blocks, dtype uint8.
            shape: the tensor's shape.
        """
        return

    def variance_factor(self, count: int) -> float:
        """The gamma for which ``E|Q(x) - x|^2 <= gamma |x|^2`` with ``count`` elements (ECQ-SGD, lemma 1).

        Only unbiased codecs define this.
        """
        raise NotImplementedError

    def native(self) -> dict[str, int | float]:
        """The fields that this configuration sets in the C interface's ``hvdc_spec``."""
        raise NotImplementedError

    def payload_bytes(self, shape: Shape) -> int:
        """The capacity of a payload for a tensor of the given shape in bytes, with header and padding.

        Where the codec :attr:`varies`, a payload may occupy fewer bytes
        (:func:`hvd_compress.codecs.payload.payload_length`).
        """
        return _payload_bytes(self, shape)

    def bits_per_element(self, shape: Shape) -> float:
        """The bits per element that :meth:`payload_bytes` comes to; infinite for an empty tensor."""
        count = math.prod(shape)
        return 8 * self.payload_bytes(shape) / count if count else math.inf

    @classmethod
    def compress(cls, tensor: Any) -> NoReturn:
        """Raises ``TypeError``: Horovod calls it where a codec was given in place of a compressor."""
        refuse(f"the codec {cls.__name__}", f"{cls.__name__}()")

    def to_config(self) -> dict[str, Any]:
        """The configuration as JSON types, with the codec's name under ``"codec"``."""
        config = {"codec": self.name, **dataclasses.asdict(self)}
        for field in dataclasses.fields(self):
            if field.name in self.added and config[field.name] == field.default:
                del config[field.name]
        return config

    def check_feedback(self, feedback: ErrorFeedback, shape: Shape | None = None) -> None:
        """Raises ``ValueError`` if a residual could grow without bound, or cannot have the dtype.

        An unbiased codec with variance factor gamma needs
        ``alpha^2 gamma + (beta - alpha)^2 < 1`` (ECQ-SGD, lemma 2; for beta = 1 this is
        alpha < 2 / (gamma + 1)). A contractive codec needs ``alpha <= beta``. A codec with a fixed range
        needs alpha = 0: the parts that it clips would accumulate with any other alpha. A codec that writes
        no payloads needs residuals in float32.

        Args:
            feedback: the error feedback.
            shape: the tensor's shape; None checks what does not depend on the tensor.
        """
        if not feedback.enabled:
            return
        if self.exchange is not None and feedback.residual_dtype != "float32":
            raise ValueError(
                f"ErrorFeedback: expected residual_dtype='float32' for {self!r}, got "
                f"{feedback.residual_dtype!r}: only codecs that write payloads round residuals"
            )
        if self.saturates:
            raise ValueError(
                f"ErrorFeedback: expected alpha = 0 for {self!r}, whose range is fixed, got alpha = "
                f"{feedback.alpha}: the residual could grow without bound; normalised codecs take feedback"
            )
        if self.error == "contractive":
            if feedback.alpha > feedback.beta:
                raise ValueError(
                    f"ErrorFeedback: expected alpha <= beta = {feedback.beta} for {self.name}, "
                    f"got alpha = {feedback.alpha}: the residual could grow without bound"
                )
            return
        if shape is None:
            return
        gamma = self.variance_factor(max(1, math.prod(shape)))
        if stability.growth(feedback.alpha, feedback.beta, gamma) >= 1:
            bound = stability.largest_alpha(gamma, feedback.beta)
            raise ValueError(
                f"ErrorFeedback: expected alpha < {bound:.4g} for {self!r} with beta = {feedback.beta} "
                f"(ECQ-SGD, lemma 2: variance factor {gamma:.4g}), got alpha = {feedback.alpha}; "
                f"more levels or smaller buckets raise the bound"
            )

    def config_hash(self) -> int:
        """The first four bytes of the SHA-256 of the configuration's canonical JSON, little-endian."""
        text = json.dumps(self.to_config(), sort_keys=True, separators=(",", ":"))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


# Every call of a kernel asks for this, at every step for the same tensors.
@lru_cache(maxsize=4096)
def _payload_bytes(codec: Codec, shape: Shape) -> int:
    return HEADER_BYTES + codec.layout(shape).body_bytes


def as_matrix(shape: Shape) -> tuple[int, int]:
    """The rows and columns of ``reshape(shape[0], -1)``; a 0-dimensional tensor is one by one."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def grouped_layout(shape: Shape, group: Group, code_bytes: Callable[[int], int]) -> PayloadLayout:
    """The layout of a codec with one scale per group, where ``n`` codes take ``code_bytes(n)`` bytes."""
    count = math.prod(shape)
    block = PACK_BLOCK if group == "tensor" else group
    last = count % block or block
    scales = group_count(count, group)
    return PayloadLayout(count, scales, block, code_bytes(block), code_bytes(last))


def native_grouping(group: Group) -> dict[str, int | float]:
    """The C interface's ``grouping`` and ``group``."""
    return {"grouping": 1} if group == "tensor" else {"grouping": 0, "group": group}


def unit_of(full: np.ndarray, top: np.float32) -> np.ndarray:
    """The value of code 1 if code ``top`` has the value ``full``; both are finite, dtype float32.

    Where the quotient is rounded up so far that code ``top`` would overflow, the value is the next
    smaller float.
    """
    unit = full / top
    with np.errstate(over="ignore"):
        overflows = np.isinf(unit * top)
    return np.where(overflows, np.nextafter(unit, np.float32(0)), unit)


def groups_of(x: np.ndarray, group: Group) -> list[np.ndarray]:
    """Views of a flat tensor's groups; the last one may be short."""
    size = max(1, x.size) if group == "tensor" else group
    return [x[start : start + size] for start in range(0, x.size, size)]


def by_group(x: np.ndarray, group: Group) -> np.ndarray:
    """A flat tensor with one group per row, shape=(groups, size), padded with zeros."""
    size = max(1, x.size) if group == "tensor" else group
    groups = group_count(x.size, group)
    padded = np.zeros(groups * size, x.dtype)
    padded[: x.size] = x
    return padded.reshape(groups, size)


def group_count(count: int, group: Group) -> int:
    """The number of groups that ``count`` elements form; the last one may be short."""
    return min(1, count) if group == "tensor" else -(-count // group)


def group_lengths(count: int, group: Group) -> np.ndarray:
    """The number of elements in each group without padding, shape=(groups,), dtype int64."""
    size = max(1, count) if group == "tensor" else group
    starts = np.arange(0, count, size, dtype=np.int64)
    return np.minimum(size, count - starts)


def spread(per_group: np.ndarray, count: int, group: Group) -> np.ndarray:
    """Repeats each group's value for each of the group's elements, shape=(count,)."""
    return np.repeat(per_group, group_lengths(count, group))
