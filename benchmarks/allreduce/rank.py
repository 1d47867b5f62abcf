"""One rank of the benchmark: ``python -m benchmarks.allreduce.rank``, in a lab."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks import turns
from benchmarks.allreduce.others import OTHERS, Make, Method
from benchmarks.lab.network import INTERFACE
from hvd_compress import ECQ, Int8, OneBit, PowerSGD, TopK
from hvd_compress.codecs import Codec
from hvd_compress.distributed import Compressor, all_reduce

OURS: dict[str, tuple[Codec, str]] = {
    "Int8, allgather": (Int8(), "allgather"),
    "Int8, two shots": (Int8(), "two_shot"),
    "ECQ, two shots": (ECQ(), "two_shot"),
    "1-bit, allgather": (OneBit(), "allgather"),
    "1-bit, two shots": (OneBit(), "two_shot"),
    "top-k, two shots": (TopK(), "two_shot"),
    "PowerSGD": (PowerSGD(), "low_rank"),
}


def _ours(codec: Codec, exchange: str) -> Make:
    def prepare(elements: int, group: dist.ProcessGroup) -> Method:
        compressor = Compressor(codec, exchange=exchange, process_group=group)

        def work(tensor: torch.Tensor) -> None:
            all_reduce(tensor, compressor)

        return work

    return prepare


METHODS: dict[str, Make] = {
    **OTHERS,
    **{name: _ours(*one) for name, one in OURS.items()},
}


def gradient(elements: int, rank: int) -> torch.Tensor:
    """Normal numbers, as nearly square as powers of two can be, the same wherever they are asked for."""
    rows = 1 << (int(math.log2(elements)) // 2)
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows, elements // rows, generator=generator)


def measure(names: list[str], elements: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds, processor seconds and bytes of each method's rounds, in turns, and its first error.

    Returns:
        The same on every rank: a row by method. ``rounds`` has for each round the seconds of the slowest
        rank, and the means over the ranks of processor seconds and of bytes sent by the host.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = gradient(elements, rank)
    exact = torch.zeros(mine.shape, dtype=torch.float64)
    for one in range(ranks):
        exact += gradient(elements, one)
    exact /= ranks
    # Each has a group, and so connections, of its own: none finds those of the default group warm.
    methods = {name: METHODS[name](elements, dist.new_group()) for name in names}
    rows: dict[str, dict[str, Any]] = {}
    for name, work in methods.items():
        result = mine.clone()
        work(result)
        rows[name] = {"error": float((result - exact).norm() / exact.norm()), "rounds": []}
    quiet = rank != 0 or not sys.stderr.isatty()
    for number in tqdm(range(rounds), unit="round", leave=False, disable=quiet):
        for name in turns.order(names, number):
            # A call that is not timed: TCP begins slowly again after a pause.
            methods[name](mine.clone())
            tensor = mine.clone()
            dist.barrier()
            sent, processor, clock = _sent(), time.process_time(), time.perf_counter()
            methods[name](tensor)
            own = [time.perf_counter() - clock, time.process_time() - processor]
            dist.barrier()  # All bytes are sent by then.
            everyone: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)] * ranks
            dist.all_gather_object(everyone, (*own, _sent() - sent))
            seconds, processors, bytes_sent = zip(*everyone, strict=True)
            rows[name]["rounds"].append([max(seconds), fmean(processors), fmean(bytes_sent)])
    return rows


def _sent() -> int:
    """The bytes that this host's interface has sent, headers included."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def main() -> None:
    """Measures on all ranks; the first one writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--methods", nargs="+", required=True)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="hivemind")  # It calls what PyTorch has deprecated.
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = measure(args.methods, args.bytes // 4, args.rounds)
    if dist.get_rank() == 0:
        args.json.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
