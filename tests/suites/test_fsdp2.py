"""Scripts with a compressor agree with FSDP2's own hybrid sharding, on PyTorch's models and test case.

Without compression, the shards of gradients and parameters have the same bits, and gradients are None in
the same places; int8's shards are close.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal import common_fsdp
from torch.testing._internal.distributed._tensor import common_dtensor

import hvd_compress.fsdp as hvdc
from hvd_compress import NoCompression
from tests.suites.running import LOSSY, MODES

_FORK_SERVER = multiprocessing.get_context("forkserver")
_FORK_SERVER.set_forkserver_preload([__name__, "torch._dynamo"])

COMPRESSED = {mode: options for mode, options in MODES.items() if options is not None}

Script = Callable[[Any, torch.Generator], Iterator[None]]
"""A function that trains a model, and yields where the shards are compared."""


def _loss(model: Any, generator: torch.Generator) -> torch.Tensor:
    output = model(torch.randn(4, 16, generator=generator))
    return sum(one.square().sum() for one in (output if isinstance(output, tuple) else [output]))


def _stack() -> nn.Module:
    return common_fsdp.MLPStack(16)


def _double() -> nn.Module:
    """Modules of two layers, the second of which is not used except in the last module."""
    layers = [common_fsdp.DoubleLinear(16, use_second_linear=False) for _ in range(3)]
    return nn.Sequential(*layers, common_fsdp.DoubleLinear(16))


def _transformer() -> nn.Module:
    """A transformer with tied weights."""
    return common_dtensor.Transformer(common_dtensor.ModelArgs(dropout_p=0.0))


class TestBesideHybridSharding(common_fsdp.FSDPTest):
    """Comparisons on two replicas of two shards."""

    world_size = 4
    _run = classmethod(common_fsdp.FSDPTestMixin._run.__func__)  # FSDPTest's own asks for GPUs.

    def _spawn_processes(self) -> None:
        """Forks the ranks from a process that has imported everything."""
        self._start_processes(_FORK_SERVER.Process)

    def _compare(self, make: Callable[[], nn.Module], script: Script, **sharding: Any) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        expected = self._shards(make, script, mesh, None, **sharding)
        for mode, options in COMPRESSED.items():
            got = self._shards(make, script, mesh, options, **sharding)
            lossless = isinstance(options["codec"], NoCompression)
            self.assertEqual(len(got), len(expected))
            far = 0.0
            for place, (ours, stock) in enumerate(zip(got, expected, strict=True)):
                for name, one in stock.items():
                    where, other = f"{mode}, {place}, {name}", ours[name]
                    self.assertEqual(other is None, one is None, where)
                    if one is None or other is None or torch.equal(one, other):
                        continue
                    self.assertFalse(lossless, where)
                    distance = float((one - other).norm() / one.norm())
                    self.assertLess(distance, LOSSY, where)
                    far = max(far, distance)
            self.assertEqual(far > 0, not lossless, mode)

    def _shards(
        self,
        make: Callable[[], nn.Module],
        script: Script,
        mesh: Any,
        options: dict[str, Any] | None,
        **sharding: Any,
    ) -> list[dict[str, torch.Tensor | None]]:
        """Runs the script; returns this rank's parameters and gradients at each yield."""
        torch.manual_seed(3)
        model: Any = make()
        own = mesh if options is None else mesh["shard"]
        layers = model.layers if hasattr(model, "layers") else model
        for layer in layers:
            fully_shard(layer, mesh=own, **sharding)
        fully_shard(model, mesh=own, **sharding)
        if options is not None:
            hvdc.Compressor(model, mesh=mesh, threshold=1, **options)
        found = []
        for _ in script(model, torch.Generator().manual_seed(100 + self.rank)):
            model.reshard()  # An evaluation may have left the root unsharded.
            one: dict[str, torch.Tensor | None] = {}
            for name, parameter in model.named_parameters():
                gradient = parameter.grad
                one[name] = parameter.to_local().detach().clone()
                one[f"{name}.grad"] = None if gradient is None else gradient.to_local().clone()
            found.append(one)
        dist.barrier()
        return found

    def test_training(self) -> None:
        def script(model: Any, generator: torch.Generator) -> Iterator[None]:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            for _ in range(4):
                tokens = torch.randint(0, 8, (4, 16), generator=generator)
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                loss.backward()
                yield
                optimizer.step()
                optimizer.zero_grad()

        self._compare(_transformer, script)
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        self._compare(_transformer, script, mp_policy=policy)

    def test_gradient_accumulation(self) -> None:
        """With reductions among shards or none at all, and with or without resharding in between."""

        def script(
            model: Any, generator: torch.Generator, wait: str, reshards: bool
        ) -> Iterator[None]:
            for _ in range(2):
                for last in (False, False, True):
                    getattr(model, wait)(last)
                    model.set_reshard_after_backward(last or reshards)
                    _loss(model, generator).backward()
                yield
                model.zero_grad()

        for wait in ("set_requires_gradient_sync", "set_requires_all_reduce"):
            for reshards in (True, False):
                one = functools.partial(script, wait=wait, reshards=reshards)
                self._compare(_stack, one, reshard_after_forward=reshards)

    def test_unused_parameters(self) -> None:
        """Used by no rank, and by some ranks only, with FSDP2's option to send zeros."""

        def script(model: Any, generator: torch.Generator, differ: bool) -> Iterator[None]:
            model.set_reduce_scatter_unused_params(differ)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
            for step in range(3):
                model[0].use_second_linear = False
                model[-1].use_second_linear = step < 2 and (not differ or self.rank % 3 == 0)
                _loss(model, generator).backward()
                yield
                optimizer.step()
                optimizer.zero_grad()

        for differ in (False, True):
            self._compare(_double, functools.partial(script, differ=differ))

    def test_gradient_divide_factor(self) -> None:
        def script(model: Any, generator: torch.Generator, factor: float) -> Iterator[None]:
            for module in (*model, model):
                module.set_force_sum_reduction_for_comms(True)  # Gloo cannot multiply.
                module.set_gradient_divide_factor(factor)
            for _ in range(2):
                _loss(model, generator).backward()
                yield

        for factor in (1.0, 2.0, 4.0, 16.0):
            self._compare(_stack, functools.partial(script, factor=factor))

    def test_modules_called_twice(self) -> None:
        """Called in one forward pass, and in two before the same backward pass."""

        def script(model: Any, generator: torch.Generator, chained: bool) -> Iterator[None]:
            for _ in range(3):
                first = model(torch.randn(4, 16, generator=generator))
                second = model(first if chained else torch.randn(4, 16, generator=generator))
                (first.square().sum() + second.sum()).backward()
                yield
                model.zero_grad()

        for chained in (True, False):
            self._compare(_stack, functools.partial(script, chained=chained))

    def test_layers_that_are_frozen_and_unfrozen(self) -> None:
        """They agree also after an evaluation, which leaves the root unsharded."""

        def script(model: Any, generator: torch.Generator) -> Iterator[None]:
            for step in range(4):
                for part in (model[1], model[2].in_proj):
                    part.requires_grad_(step % 2 == 1)
                _loss(model, generator).backward()
                yield
                model.zero_grad()
                with torch.no_grad():
                    _loss(model, generator)

        self._compare(_stack, script)
