"""One rank of a job whose ranks come and go: ``python -m tests.diloco.member PORT FOLDER NAME TURN ...``.

A turn is a group's number, its members, and the step at which it ends: ``1:AB:8``. The member trains
through its turns, and writes what it holds at the beginning and the end of each. It says in the job's store
when it has come to the end of a turn, and is killed there if it has to be.
"""

from __future__ import annotations

import datetime
import faulthandler
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from hvd_compress import OneBit
from hvd_compress.engine.state import unsent
from tests.diloco.nesterov import DiLoCo
from tests.torch_models import Probe, targets

SHAPES = {"first": (70, 40), "second": (3000,), "third": (1500,)}
EVERY = 2
DIES = "dies"


def unsent_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns copies of a compressor's unsent parts of the sum of all ranks' tensors, by key."""
    return {name: unsent(one, SHAPES[name]) for name, one in state["tensors"].items()}


def held(diloco: DiLoCo, compressor: hvdc.Compressor) -> dict[str, Any]:
    """Returns copies of a member's state."""
    return {
        "common": {name: one.clone() for name, one in diloco.common_parameters.items()},
        "unsent": unsent_of(compressor.state_dict()),
        "steps": diloco.steps,
        "rounds": diloco.rounds,
        "norm": compressor.residual_norm(),
        "exchanges": {route.exchange for route in compressor.routes().values()},
    }


def wait_for_norms(compressor: hvdc.Compressor) -> None:
    """Waits until the norms of the last exchange have come."""
    assert compressor._ranks.norms is not None
    end = time.monotonic() + 60
    while not compressor._ranks.norms.complete:
        if time.monotonic() > end:
            raise TimeoutError("expected the norms of all ranks within a minute")
        time.sleep(0.01)


def main(port: str, folder: str, name: str, share: str, *turns: str) -> None:
    """Trains through the turns."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    logging.basicConfig(filename=Path(folder, f"{name}.log"))
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    store.set(f"process of {name}", str(os.getpid()))
    model = Probe(SHAPES)
    compressor = hvdc.Compressor(OneBit(), threshold=0)
    diloco: DiLoCo | None = None
    for turn in turns:
        number, members, last = turn.split(":")
        inside = dist.PrefixStore(f"turn {number}", store)
        dist.init_process_group(
            "gloo",
            store=inside,
            rank=members.index(name),
            world_size=len(members),
            timeout=datetime.timedelta(seconds=60),
        )
        if diloco is None:
            diloco = DiLoCo(model, compressor, sync_every=EVERY)
        else:
            torch.save(held(diloco, compressor), Path(folder, f"{name}.{number}.before"))
            lost = sorted(Path(folder).glob("*.lost")) if share == "share" and number == "1" else []
            diloco.rebind(lost=[torch.load(path) for path in lost])
        torch.save(held(diloco, compressor), Path(folder, f"{name}.{number}.begin"))
        ends = int(last) if last.isdecimal() else None
        while diloco.steps != ends:
            change = targets(SHAPES, ord(name), diloco.steps, 0.1)
            with torch.no_grad():
                for one, parameter in model.named_parameters():
                    parameter.add_(change[one])
            if last == DIES and diloco.steps == 5:
                torch.save(diloco.state_dict(), Path(folder, f"{name}.lost"))
                torch.save(held(diloco, compressor), Path(folder, f"{name}.{number}.end"))
                # The norm of what it has not sent has come to the others.
                for other in members.replace(name, ""):
                    store.get(f"{other} has the norms of turn {number}")
                store.set(f"{name} can be killed", "now")
                time.sleep(600)
            if last == "" and diloco.steps == 5:
                wait_for_norms(compressor)
                store.set(f"{name} has the norms of turn {number}", "")
            try:
                diloco.step()
            except RuntimeError as error:
                Path(folder, f"{name}.{number}.error").write_text(f"{time.time()} {error}")
                break
        torch.save(held(diloco, compressor), Path(folder, f"{name}.{number}.end"))
        store.set(f"{name} has ended turn {number}", "")
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
