"""PyTorch models with known gradients, and the reference's averages; for every frontend of PyTorch."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hvd_compress.exchanges import reference
from tests import device
from tests.hostdev import hostdev

Shapes = Mapping[str, tuple[int, ...]]

if device.TYPE == hostdev.TYPE:
    hostdev.register()

DEVICE = torch.device(device.TYPE)
"""The device of models and gradients, see :mod:`tests.device`."""


class Probe(torch.nn.Module):
    """A model with the loss sum(p * t) over its parameters p, so that p's gradient is exactly t."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(
                name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=DEVICE))
            )

    def forward(
        self, targets: Mapping[str, torch.Tensor], order: Iterable[str] | None = None
    ) -> torch.Tensor:
        parts = [(getattr(self, name) * targets[name]).sum() for name in order or targets]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total


def elsewhere(shape: tuple[int, ...]) -> torch.nn.Parameter:
    """A parameter on a CUDA device without memory; neither a GPU nor a CUDA build of PyTorch is needed."""
    with FakeTensorMode():
        return torch.nn.Parameter(torch.zeros(shape, device="cuda"))


def targets(shapes: Shapes, rank: int, step: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """A rank's gradients at a step, the same on every rank that computes them."""
    generator = torch.Generator("cpu").manual_seed(1000 * rank + step)
    return {
        name: (scale * torch.randn(s, generator=generator, device="cpu")).to(DEVICE)
        for name, s in shapes.items()
    }


def two_valued(shapes: Shapes, rank: int, step: int) -> dict[str, torch.Tensor]:
    """Gradients that 1-bit codes send without error: f or -2f everywhere; f depends on rank and step."""
    generator = torch.Generator("cpu").manual_seed(1000 * rank + step)
    factor = 2.0 ** (rank + step)
    made = {}
    for name, shape in shapes.items():
        positive = torch.rand(shape, generator=generator, device="cpu") < 0.5
        made[name] = torch.where(positive, factor, -2 * factor).to(DEVICE)
    return made


@contextlib.contextmanager
def unequal_threads(rank: int) -> Iterator[None]:
    """Gives each rank another number of PyTorch's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 + 2 * rank)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def phases_of(step: Callable[[], object]) -> Counter[str]:
    """This package's labels in a trace of a step, on all threads, with their counts."""
    options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=options
    ) as trace:
        step()
    names = [event.name for event in trace.events()]
    return Counter(
        one.removeprefix("hvd_compress::") for one in names if one.startswith("hvd_compress::")
    )


class Simulation(reference.Simulation):
    """The reference exchange, with tensors instead of arrays."""

    def average(  # type: ignore[override]
        self, gradients: Sequence[Mapping[str, torch.Tensor]], scale: float | None = None
    ) -> dict[str, torch.Tensor]:
        arrays = [{name: g.float().cpu().numpy() for name, g in one.items()} for one in gradients]
        return as_tensors(super().average(arrays, scale))


def on_arrays(step: Any) -> reference.OwnerStep:
    """Wraps an owner step on tensors for the reference, which passes arrays; computes on the device."""

    def on_array(average: np.ndarray, state: dict[str, Any]) -> None:
        tensor = torch.from_numpy(average).to(DEVICE)
        step(tensor, state)
        average[...] = tensor.cpu().numpy()

    return on_array


def as_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The arrays as tensors on the device; on the host, they share memory."""
    return {name: torch.from_numpy(array).to(DEVICE) for name, array in arrays.items()}


def assert_same(
    exchange: str, left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]
) -> None:
    """:func:`assert_same_bits`; nearly, for factors, whose products are added up in another order."""
    if exchange != "low_rank":
        assert_same_bits(left, right)
        return
    assert left.keys() == right.keys(), (left.keys(), right.keys())
    for name in left:
        torch.testing.assert_close(left[name].cpu(), right[name].cpu(), rtol=1e-5, atol=1e-4)


def assert_same_bits(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    """Fails unless both hold the same names and bit-identical tensors, on any devices."""
    assert left.keys() == right.keys(), (left.keys(), right.keys())
    for name in left:
        one, other = left[name].cpu(), right[name].cpu()
        assert torch.equal(one, other), (
            f"{name}: {(one != other).sum()} of {one.numel()} differ, "
            f"the first {one.reshape(-1)[:3]} and {other.reshape(-1)[:3]}"
        )
