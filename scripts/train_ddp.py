#!/usr/bin/env python3
"""Train with DDP's hook on a device, beside the same gradients on the CPU, and write JSON.

    torchrun --standalone --nproc-per-node 2 scripts/train_ddp.py --device cuda --json OUT

With one rank, CUDA gradients travel by NCCL; with several by gloo, through the memory of the host, since
NCCL refuses two ranks on one GPU. What the ranks get on the device has to be, bit for bit, what they get
on the CPU; losses have to fall, and all ranks have to end with the same parameters. The exit status says
whether it is so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as hvdc
from hvd_compress.engine.comm import Collective

SCHEMA = "hvd_compress/train-ddp/1"
NAMES = ("onebit", "int8", "ternary", "ecq", "bf16", "fp16")
EXCHANGES = ("allgather", "two_shot", "hierarchical")
SHAPES = {"a": (300, 170), "b": (70_000,), "c": (16, 8, 5, 5), "small": (10,)}
FEATURES, CLASSES, BATCH = 64, 10, 32
BUCKET_MB = 0.1
"""Small buckets, so that there are several."""


class Given(nn.Module):
    """Parameters whose gradients are what :meth:`forward` is given, exactly."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = [(getattr(self, name) * one).sum() for name, one in gradients.items()]
        return torch.stack(parts).sum()


def distributed(
    model: nn.Module, name: str, exchange: str
) -> tuple[DistributedDataParallel, hvdc.Compressor]:
    """A model with a compressor by name."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    compressor = hvdc.Compressor(ddp, name, threshold=100, exchange=exchange)
    ddp.register_comm_hook(compressor, hvdc.hook)
    return ddp, compressor


def same_bits(name: str, exchange: str, device: torch.device) -> str | None:
    """What differs between a device and the CPU in four steps, of which one has an Inf; None is nothing."""
    places = (torch.device("cpu"), device)
    made = [distributed(Given().to(place), name, exchange) for place in places]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(4):
        gradients = {n: torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}
        if step == 2 and dist.get_rank() == 0:
            gradients["b"][17] = torch.inf
        for (ddp, _), place in zip(made, places, strict=True):
            ddp.zero_grad()
            ddp({n: one.to(place) for n, one in gradients.items()}).backward()
        on_cpu, there = (dict(ddp.module.named_parameters()) for ddp, _ in made)
        for parameter in SHAPES:
            expected, got = on_cpu[parameter].grad, there[parameter].grad
            assert expected is not None and got is not None
            if not torch.equal(_bits(expected), _bits(got.cpu())):
                return f"step {step}: the gradients of {parameter}"
    kept = [compressor.state_dict()["tensors"] for _, compressor in made]
    for parameter in SHAPES:
        for expected, got in zip(*(_residuals(one[parameter]) for one in kept), strict=True):
            # What is taken back is computed back: close to what it was.
            if not torch.allclose(expected, got.cpu(), rtol=0, atol=1e-5):
                return f"the residuals of {parameter}"
    return None


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    # A NaN is not equal to itself, and its bits are the codec's own affair.
    return numbers.nan_to_num(nan=1e30).contiguous().view(torch.int32)


def _residuals(tensor: dict[str, Any]) -> list[torch.Tensor]:
    owned = tensor["owned"] or {}
    return [one for one in (tensor["residual"], owned.get("residual")) if one is not None]


def train(name: str, exchange: str, device: torch.device, steps: int) -> dict[str, Any]:
    """A small network learns what another one knows."""
    torch.manual_seed(1)
    task = torch.randn(FEATURES, CLASSES)
    network = nn.Sequential(nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, CLASSES))
    ddp, compressor = distributed(network.to(device), name, exchange)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    losses = []
    for _ in range(steps):
        inputs = torch.randn(BATCH, FEATURES, generator=data)
        labels = (inputs @ task).argmax(1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    tenth = max(1, steps // 10)
    counters = compressor.counters
    return {
        "loss_at_first": sum(losses[:tenth]) / tenth,
        "loss_at_last": sum(losses[-tenth:]) / tenth,
        "same_on_all_ranks": _same_on_all_ranks(network),
        "residual_norm": compressor.residual_norm(),
        "message_bytes_a_step": counters.per_step.message_bytes,
        "uncompressed_bytes_a_step": counters.per_step.uncompressed_bytes,
    }


def _same_on_all_ranks(network: nn.Module) -> bool:
    flat = torch.cat([p.detach().reshape(-1) for p in network.parameters()]).cpu()
    everywhere = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, flat)
    return all(torch.equal(flat, other) for other in everywhere)


def waits(exchange: str, device: torch.device) -> str:
    """What makes the host wait for the GPU in a backward pass; only its first one has to."""
    ddp, _ = distributed(Given().to(device), "onebit", exchange)
    gradients = {n: torch.ones(shape, device=device) for n, shape in SHAPES.items()}
    for _ in range(3):
        ddp(gradients).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ddp(gradients).backward()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "nothing"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--compression", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--exchange", nargs="+", choices=EXCHANGES, default=EXCHANGES)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--alone", action="store_true", help="run the collectives of a single rank, not skip them"
    )
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.device == "cuda":
        if not torch.cuda.is_available():
            sys.exit("expected a GPU, got torch.cuda.is_available() == False")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    alone = os.environ["WORLD_SIZE"] == "1"
    Collective.skips_alone = not args.alone
    by_nccl = args.device == "cuda" and alone
    dist.init_process_group("cpu:gloo,cuda:nccl" if by_nccl else "gloo")
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(device) if args.device == "cuda" else None,
        "ranks": dist.get_world_size(),
        "backends": str(dist.get_backend_config()),
        "steps": args.steps,
        "runs": {},
    }
    failures = []
    cases = [(name, exchange) for exchange in args.exchange for name in args.compression]
    for name, exchange in cases:
        differs = same_bits(name, exchange, device)
        run = train(name, exchange, device, args.steps)
        record["runs"][f"{name}, {exchange}"] = {"differs_from_cpu": differs, **run}
        good = run["same_on_all_ranks"] and run["loss_at_last"] < 0.8 * run["loss_at_first"]
        if differs or not good:
            failures.append(f"{name}, {exchange}")
    if by_nccl:
        record["host_waits_for"] = {exchange: waits(exchange, device) for exchange in args.exchange}
    return finish(record, failures, args.json)


def finish(record: dict[str, Any], failures: list[str], path: Path | None) -> int:
    """Writes the record on one rank; the exit status."""
    any_failed = torch.tensor([len(failures)])
    dist.all_reduce(any_failed)
    if dist.get_rank() == 0:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record, indent=1) + "\n")
        where, runs = record["backends"], len(record["runs"])
        came = f"failed: {'; '.join(failures)}" if failures else "all as on the CPU"
        print(f"ranks: {record['ranks']} by {where}; runs: {runs}, {came}")
    dist.destroy_process_group()
    return int(any_failed.item() > 0)


if __name__ == "__main__":
    sys.exit(main())
