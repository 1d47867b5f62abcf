"""One gradient's way from rank to rank, in NumPy, and beside it the same step of hvd_compress.

1-bit SGD (Seide et al., 2014) in groups of 64 numbers, gathered by all ranks. After every step, averages
and residuals are compared with those of the package, whose kernels compute the same bits.

Start it with: torchrun --standalone --nproc-per-node 2 docs/examples/reference_step.py
"""

import hashlib
import json
import struct

import numpy as np
import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from hvd_compress import OneBit

COUNT, GROUP = 1000, 64
GROUPS = -(-COUNT // GROUP)

# Magic, version, codec, settings, count, flags, step, checksum.
HEADER = struct.Struct("<HBBIQIIQ")
MAGIC, VERSION, ONEBIT, NONFINITE = 0x4348, 1, 1, 1
SETTINGS = json.dumps({"codec": "onebit", "group": GROUP}, sort_keys=True, separators=(",", ":"))
SETTINGS_HASH = int.from_bytes(hashlib.sha256(SETTINGS.encode()).digest()[:4], "little")
CODES = HEADER.size + 8 * GROUPS  # Where the codes begin: two float32 values a group come before.
SIZE = CODES + 8 * GROUPS  # One bit a number: 64 bits a group.
# Both are rounded up to 16 bytes; here there is nothing to do.
assert CODES % 16 == 0 and SIZE % 16 == 0


# 1. Error feedback: what was not sent in earlier steps is added to the gradient.


def compensate(gradient: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """The numbers to encode, shape=(COUNT,), float32."""
    return gradient + residual


# 2. The codec: the mean of each group's negative numbers, the mean of the others, and a bit a number.


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales, shape=(2, GROUPS), float32, and bits, shape=(COUNT,), bool."""
    upper = x >= 0
    means = [mean_by_group(x, side) for side in (~upper, upper)]
    finite = np.isfinite(means).all(axis=0)
    scales = np.where(finite, means, np.float32(np.nan))  # A NaN says that the group is of no use.
    return scales, upper & np.repeat(finite, GROUP)[:COUNT]


def mean_by_group(x: np.ndarray, side: np.ndarray) -> np.ndarray:
    """The mean of each group's numbers on one side of zero, shape=(GROUPS,), float32; 0 without any.

    Floating-point sums depend on their order, so the order is part of the format: sixteen lanes, which are
    then folded in halves.
    """
    lanes = padded(np.where(side, x, np.float32(0))).reshape(GROUPS, GROUP // 16, 16)
    total = lanes[:, 0] + np.float32(0)
    for row in range(1, GROUP // 16):
        total = total + lanes[:, row]
    for half in (8, 4, 2, 1):
        total = total[:, :half] + total[:, half:]
    count = np.maximum(padded(side).reshape(GROUPS, GROUP).sum(axis=1), 1)
    return total[:, 0] / count.astype(np.float32)


def padded(x: np.ndarray) -> np.ndarray:
    """With zeros behind, shape=(GROUPS * GROUP,)."""
    return np.concatenate([x, np.zeros(GROUPS * GROUP - COUNT, x.dtype)])


def dequantize(scales: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """What every receiver decodes, shape=(COUNT,), float32."""
    lower, upper = (np.repeat(half, GROUP)[:COUNT] for half in scales)
    return np.where(bits, upper, lower)


# 3. The payload: a header, the scales, the bits, and a checksum over all of them.


def assemble(scales: np.ndarray, bits: np.ndarray, step: int) -> np.ndarray:
    """The bytes that travel, shape=(SIZE,), uint8."""
    flags = NONFINITE * bool(np.isnan(scales).any())
    payload = np.zeros(SIZE, np.uint8)
    payload[HEADER.size : CODES] = scales.astype("<f4").reshape(-1).view(np.uint8)
    payload[CODES:] = np.packbits(padded(bits), bitorder="little")
    fields = (MAGIC, VERSION, ONEBIT, SETTINGS_HASH, COUNT, flags, step)
    payload[: HEADER.size] = np.frombuffer(HEADER.pack(*fields, 0), np.uint8)
    payload[: HEADER.size] = np.frombuffer(HEADER.pack(*fields, checksum(payload)), np.uint8)
    return payload


def checksum(payload: np.ndarray) -> int:
    """The sum of all 32-bit words, the i-th times 2 i + 1, modulo 2**64; its own place counts as zeros."""
    words = payload.view("<u4").astype(np.uint64)
    words[HEADER.size // 4 - 2 : HEADER.size // 4] = 0
    odd = 2 * np.arange(words.size, dtype=np.uint64) + np.uint64(1)
    return int((words * odd).sum(dtype=np.uint64))


def open_payload(payload: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """Scales, bits, and whether the sender's gradient held an Inf or a NaN."""
    *fields, flags, stamped, total = HEADER.unpack(payload[: HEADER.size].tobytes())
    expected = [MAGIC, VERSION, ONEBIT, SETTINGS_HASH, COUNT, step]
    if [*fields, stamped] != expected:
        raise ValueError(f"expected a header of {expected}, got {[*fields, stamped]}")
    if total != checksum(payload):
        raise ValueError("expected a payload as it was sent, got another checksum")
    scales = payload[HEADER.size : CODES].view("<f4").reshape(2, GROUPS)
    bits = np.unpackbits(payload[CODES:], bitorder="little")[:COUNT].astype(bool)
    return scales, bits, bool(flags & NONFINITE)


# 4. The exchange: every rank gathers every rank's payload.


def all_gather(payload: np.ndarray) -> list[np.ndarray]:
    """The payloads, by rank."""
    rows = [torch.empty(SIZE, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, torch.from_numpy(payload))
    return [row.numpy() for row in rows]


# 5. The average: every rank adds up in the order of ranks, so that all ranks have the same bits.


def average(payloads: list[np.ndarray], step: int) -> tuple[np.ndarray, bool]:
    """The ranks' average, shape=(COUNT,), float32, and whether the step can be used."""
    total, usable = np.zeros(COUNT, np.float32), True
    for payload in payloads:
        scales, bits, nonfinite = open_payload(payload, step)
        total += dequantize(scales, bits)
        usable = usable and not nonfinite
    return total * np.float32(1 / len(payloads)), usable


# 6. One step. The residual moves on if every rank's gradient was finite; else all ranks keep the old one.


def exchange(
    gradient: np.ndarray, residual: np.ndarray, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """The average, and the next residual."""
    x = compensate(gradient, residual)
    scales, bits = quantize(x)
    unsent = x - dequantize(scales, bits)
    result, usable = average(all_gather(assemble(scales, bits, step)), step)
    return result, unsent if usable else residual


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    compressor = hvdc.Compressor(OneBit(group=GROUP), exchange="allgather", threshold=0)
    residual = np.zeros(COUNT, np.float32)
    for step in range(4):
        generator = np.random.default_rng([step, rank])
        gradient = generator.standard_normal(COUNT).astype(np.float32)
        if step == 2 and rank == 1:
            gradient[70] = np.inf
        result, residual = exchange(gradient, residual, step)

        tensor = torch.from_numpy(gradient.copy())
        hvdc.all_reduce(tensor, compressor, key="gradient")
        assert np.array_equal(tensor.numpy(), result, equal_nan=True)
        kept = compressor.state_dict()["tensors"]["gradient"]["residual"]
        assert np.array_equal(kept.numpy(), residual)
        if rank == 0:
            sent, norm = SIZE / gradient.nbytes, np.linalg.norm(residual)
            print(
                f"step {step}: {sent:.1%} of the bytes, norm of what has not been sent {norm:.3f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    np.seterr(invalid="ignore")
    main()
