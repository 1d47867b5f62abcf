"""Trains with compressed gradients under elastic Horovod until a file is created.

Every few steps, the ranks commit, and each of them writes a report. The state has two sums over all steps:
of the ranks' averaged gradients, and of the applied gradients. Their difference must be the average of what
the ranks have not sent.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

import hvd_compress.torch as hvdc
from benchmarks import compressions
from benchmarks.churn.reports import Report, announce
from hvd_compress.engine.state import unsent
from hvd_compress.torch.elastic import TorchState

BATCH = 32
FEATURES, HIDDEN, CLASSES = 64, 128, 10
LEARNING_RATE = 0.1
PAUSE = 0.002
"""The pause between steps in seconds, so that a machine with few cores has time to start processes."""


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--compression", required=True)
    parser.add_argument("--every", type=int, required=True, help="steps between two commits")
    parser.add_argument("--folder", type=Path, required=True, help="the folder for reports")
    parser.add_argument("--enough", type=Path, required=True, help="the file that ends training")
    args = parser.parse_args()
    announce(args.folder, os.environ["HOROVOD_HOSTNAME"])
    logging.basicConfig(level=logging.INFO)
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    Training(args.compression, args.every, args.folder, args.enough).run()
    hvd.shutdown()


class Training:
    """Trains a small network, which learns along which of ten random directions its input is longest.

    Args:
        compression: the compression, as on the benchmarks' command lines.
        every: the number of steps between commits.
        folder: the folder for reports.
        enough: the path of the file that ends training.
    """

    def __init__(self, compression: str, every: int, folder: Path, enough: Path) -> None:
        self._every, self._folder, self._enough = every, folder, enough
        self._task = torch.randn(FEATURES, CLASSES)
        self._model = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
        )
        chosen = compressions.parse(compression, {}, "2.*")
        self._compressor = compressions.make(hvdc, chosen.name, self._model, **chosen.options)
        feedback = chosen.split()[0].feedback
        self._keeps = feedback.alpha == 1 == feedback.beta
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE),
            named_parameters=self._model.named_parameters(),
            compression=self._compressor,
        )
        self._named = dict(self._model.named_parameters())
        self._own = {name: torch.zeros_like(p) for name, p in self._named.items()}
        for name, parameter in self._named.items():
            parameter.register_hook(self._keeper(name))
        count = sum(p.numel() for p in self._named.values())
        self._state = TorchState(
            self._model,
            self._optimizer,
            share_residuals=True,
            step=0,
            wanted=torch.zeros(count, dtype=torch.float64),
            applied=torch.zeros(count, dtype=torch.float64),
        )

    def run(self) -> None:
        """Trains, through resets, until the file that ends training exists."""
        hvd.elastic.run(self._train)(self._state)

    def _train(self, state: TorchState) -> None:
        run = hvd.broadcast_object(random.SystemRandom().getrandbits(48), 0, name="churn.run")
        data = torch.Generator().manual_seed((run + hvd.rank()) % 2**48)
        enough = False
        while not enough:
            for _ in range(self._every):
                loss = self._step(data)
                state.step += 1
                time.sleep(PAUSE)
            state.commit()
            self._report(run, loss)
            own = torch.tensor([int(self._enough.exists())])
            enough = bool(hvd.allreduce(own, op=hvd.Sum, name="churn.enough"))

    def _keeper(self, name: str) -> Callable[[torch.Tensor], None]:
        """Returns a hook that copies this rank's own gradient of a parameter before the exchange."""

        def keep(gradient: torch.Tensor) -> None:
            self._own[name].copy_(gradient)

        return keep

    def _step(self, data: torch.Generator) -> float:
        inputs = torch.randn(BATCH, FEATURES, generator=data)
        self._optimizer.zero_grad()
        output = self._model(inputs)
        loss = nn.functional.cross_entropy(output, (inputs @ self._task).argmax(1))
        loss.backward()
        self._optimizer.step()
        gradients = [p.grad for p in self._named.values() if p.grad is not None]
        # Never in place, because elastic Horovod keeps references to the tensors that it restores.
        self._state.wanted = self._state.wanted + _average(
            _flat(self._own.values()), "churn.wanted"
        )
        self._state.applied = self._state.applied + _flat(gradients)
        return loss.item()

    def _report(self, run: int, loss: float) -> None:
        kept = self._compressor.state_dict()["tensors"]
        own = (unsent(kept[name], p.shape) for name, p in self._named.items())
        average = _average(_flat(own), "churn.unsent")
        wanted, applied = self._state.wanted, self._state.applied
        missing = torch.linalg.vector_norm(wanted - applied - average).item()
        counters = self._compressor.counters
        weights = torch.cat([p.detach().reshape(-1) for p in self._named.values()])
        Report(
            run=run,
            step=self._state.step,
            rank=hvd.rank(),
            size=hvd.size(),
            host=os.environ["HOROVOD_HOSTNAME"],
            process=os.getpid(),
            seconds=time.time(),
            weights=hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16],
            loss=loss,
            sent=counters.message_bytes / counters.uncompressed_bytes,
            missing=missing if self._keeps else None,
            unsent=torch.linalg.vector_norm(average).item(),
            gradients=torch.linalg.vector_norm(wanted).item(),
            memory=_resident(),
        ).append(self._folder)
        self._compressor.reset_counters()


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])


def _average(own: torch.Tensor, name: str) -> torch.Tensor:
    return hvd.allreduce(own, op=hvd.Average, name=name)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
