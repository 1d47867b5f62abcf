"""FSDP2's all-reduce hook over the codecs and the exchanges."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hvd_compress.codecs import Codec, ErrorFeedback
from hvd_compress.codecs.base import check_choice
from hvd_compress.engine import owner_steps
from hvd_compress.engine.compressor import CompressorBase
from hvd_compress.engine.owner_steps import OwnerStep
from hvd_compress.engine.slots import slots_of
from hvd_compress.engine.state_checks import expect_state
from hvd_compress.exchanges.registry import EXCHANGES
from hvd_compress.exchanges.routing import DEFAULT_THRESHOLD, EXCHANGE_NAMES
from hvd_compress.fsdp.groups import replicas
from hvd_compress.fsdp.sharding import Unit, sharded
from hvd_compress.process_group.agreement import Agreement
from hvd_compress.process_group.bucket import Bucket
from hvd_compress.process_group.compressor import ProcessGroupCompressor, device_of
from hvd_compress.process_group.device_collectives import collectives_of
from hvd_compress.ranks import agreement
from hvd_compress.ranks.errors import ExchangeError

_FLAT = tuple(name for name, one in EXCHANGES.items() if set(one.stages) == {"all"})
"""Exchanges that do not ask for hosts: here, the ranks of a host hold different shards."""


class Compressor(ProcessGroupCompressor):
    """Averages the shards of an FSDP2 model's gradients over its replicas, encoded.

    FSDP2 adds gradients up uncompressed among the ranks that share the parameters out, as those of a host.
    The compressor sets FSDP2's all-reduce hook of every module, and averages each rank's shards with the
    ranks that have the same ones. Residuals are those of the rank's shards alone.
    Making it takes all ranks: they compare their settings, and the first replica's parameters and buffers
    are broadcast to the others. Subclasses choose the codec; these arguments are common to all of them.

    Args:
        model: whose modules went through ``fully_shard(module, mesh=mesh["shard"])``.
        codec: what shards of gradients are encoded with.
        feedback: coefficients of error feedback.
        mesh: the ranks, as for FSDP2: replicas along its first dimension, shards along the second one.
        process_group: in place of ``mesh``, the ranks with the same shards as this one.
        exchange: how payloads get from replica to replica: ``"allgather"``, ``"two_shot"`` or
            ``"integer_sum"``.
        owner_step: what the owner of a part does with the ranks' average before it sends it to all, an
            :class:`OwnerStep`; with ``exchange="two_shot"`` only.
        threshold: shards with fewer elements are averaged as they are, one allreduce a module.
        exclude: name patterns (``fnmatch``, such as ``"norm.*"``) of parameters to send as they are.
        layers: other codecs by name pattern: a codec, a scheme's name or None for uncompressed.
        warmup_steps: steps at the start that go uncompressed (1-bit SGD's cold start, section 5.2).
        seed: of the stochastic codecs' noise, the same on every rank.
        grad_scaler: the ``torch.amp.GradScaler`` whose scaled losses make the gradients, so that residuals
            follow when it changes the scale.
        threads: kernel threads; None is ``torch.get_num_threads()``.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y", or the model is not FSDP2's, adds
            gradients up over the replicas itself, or has a hook.
        ExchangeError: ranks differ, on every rank; or there is no process group.
        NotImplementedError: this version of PyTorch has another FSDP2.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        codec: Codec,
        feedback: ErrorFeedback,
        *,
        mesh: DeviceMesh | None = None,
        process_group: dist.ProcessGroup | None = None,
        exchange: str = EXCHANGE_NAMES[0],
        owner_step: OwnerStep | None = None,
        threshold: int = DEFAULT_THRESHOLD,
        exclude: Sequence[str] = (),
        layers: Mapping[str, Codec | str | None] | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
        grad_scaler: Any | None = None,
        threads: int | None = None,
    ) -> None:
        check_choice("Compressor", "exchange", exchange, _FLAT)
        found = sharded(model)
        group = replicas(mesh, process_group, found.mesh)
        self._numbered = slots_of(
            [(name, _like(shard, dtype)) for name, shard, dtype in found.parameters]
        )
        super().__init__(
            self._numbered,
            codec,
            feedback,
            exchange=exchange,
            owner_step=owner_step,
            threshold=threshold,
            exclude=exclude,
            layers=layers,
            warmup_steps=warmup_steps,
            seed=seed,
            grad_scaler=grad_scaler,
            threads=threads,
            process_group=group,
        )
        self._shards = found.group
        # This rank's number among the ranks that share the parameters out, and how many these are.
        self._shard = [dist.get_rank(found.group), dist.get_world_size(found.group)]
        self._task: int | None = None  # Autograd's number of the backward pass under way.
        self._seen: set[int] = set()
        self._failure: Exception | None = None
        self._partial: dict[int, torch.Tensor] = {}
        problem = None
        try:
            self._bind()
        except (TypeError, ValueError) as error:
            problem = error
        settings = {
            "codec": f"{codec}, {feedback}, {exchange}",
            "threshold": threshold,
            "exclude": list(exclude),
            "layers": str(layers),
            "warmup_steps": warmup_steps,
            "seed": seed,
            "owner_step": owner_steps.describe(owner_step),
            "parameters": [slot.name for slot in self._slots],
        }
        self._agree_at_first(problem, settings)
        self._broadcast(model)
        for number, unit in enumerate(found.units):
            unit.module.set_reduce_scatter_unused_params(True, recurse=False)
            unit.module.set_all_reduce_hook(functools.partial(self._reduce, number, unit))

    def __getstate__(self) -> dict[str, Any]:
        return CompressorBase.__getstate__(
            self
        )  # FSDP2's modules hold it, and are not copied either.

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, noise positions and owned parts, of its shards; every rank saves its own.

        Tensors are references, as in ``torch.optim``; ``torch.save`` or a deep copy keeps them.
        """
        return {**super().state_dict(), "shard": self._shard}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where :meth:`state_dict` of the same rank left off.

        Raises:
            ValueError: another rank, mesh, seed or model; nothing is changed then.
        """
        expect_state("load_state_dict", state)
        if state.get("shard") != self._shard:
            raise ValueError(
                f"load_state_dict: expected the state of a rank with shard {self._shard[0]} of "
                f"{self._shard[1]}, got {state.get('shard')}: each rank saves and loads a state of its own"
            )
        super().load_state_dict(state)
        self._forget_agreement()

    def load_resized(self, states: Iterable[dict[str, Any]]) -> None:
        """Continues where a job with another number of replicas left off.

        What was not sent keeps its part in the replicas' average, on other ranks
        (:mod:`hvd_compress.ranks.resize`).

        Args:
            states: the :meth:`state_dict` of every rank of that job, in any order.

        Raises:
            ValueError: not one state of each rank, another number of shards, seed or model; nothing is
                changed then.
        """
        states = list(states)
        for state in states:
            expect_state("load_resized", state)
        places = [state.get("shard") or [None, None] for state in states]
        sizes = {size for _, size in places}
        if sizes != {self._shard[1]}:
            raise ValueError(
                f"load_resized: expected states of a job whose replicas had {self._shard[1]} shards, got "
                f"{sorted(map(str, sizes))}: residuals are those of shards; go on with as many shards as "
                f"then, or without the compressor's state, which loses what was not sent"
            )
        super().load_resized(
            state for state, place in zip(states, places, strict=True) if place == self._shard
        )
        self._forget_agreement()

    @torch.no_grad()
    def _reduce(self, number: int, unit: Unit, output: torch.Tensor) -> None:
        """FSDP2's hook: averages over the replicas what the shards' ranks have added up, in place."""
        if unit.accumulates:
            before = self._partial.get(number)
            self._partial[number] = output.clone() if before is None else before.add_(output)
            output.zero_()
            return
        rest = self._partial.pop(number, None)
        if rest is not None:
            output.add_(rest)
        task = torch._C._current_graph_task_id()
        if self._task not in (None, task):
            self._break_off()  # The last backward pass has not come to its end.
        if number in self._seen:
            self._break_off()
            raise ExchangeError(
                f"{unit.name or 'the model'}: expected its gradients once in a backward pass, got them "
                f"again: a module that FSDP2 shards has to run once in a forward pass"
            )
        self._seen.add(number)
        if self._task is None:
            # Behind FSDP2's own callback, in which the hooks of the first layers may be called.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
            self._task = task
            self._attempt(self._start)
        self._attempt(lambda: self._average(unit, output))

    def _attempt(self, work: Callable[[], None]) -> None:
        """Works, unless something went wrong: the other ranks wait for this one until the step's end."""
        if self._failure is None:
            try:
                work()
            except Exception as error:
                self._failure = error

    def _break_off(self) -> None:
        """Forgets a backward pass without an end: residuals are what they were before."""
        self._task = None
        self._step = self._failure = None
        self._seen.clear()
        self._partial.clear()
        self._forget_agreement()  # Ranks may have come to different places.

    def _start(self) -> None:
        if not self._agreed and self._former is None:
            self._ask().settle()
            self._prepare()
            self._note_agreement()
        self._step = self._begin()

    def _average(self, unit: Unit, output: torch.Tensor) -> None:
        places, count = unit.places()
        if count != output.numel():
            raise ExchangeError(
                f"{unit.name or 'the model'}: expected {count} elements, as its parameters have, got "
                f"{output.numel()}"
            )
        bucket = Bucket(output, output.device, 1 / self._size)
        tensors = []
        for index, shape, strides, begin in places:
            slot, shard = self._numbered[index], output.as_strided(shape, strides, begin)
            if shard.dtype != slot.parameter.dtype:
                raise ExchangeError(
                    f"{slot.name}: expected a gradient of {slot.parameter.dtype}, as when the compressor "
                    f"was made, got {shard.dtype}"
                )
            tensors.append((slot, shard, shard))
        self._pack(bucket, tensors)
        assert self._step is not None
        self._confirm(bucket)
        self._step.add(bucket)
        bucket.future.wait()

    def _end(self) -> None:
        """Called at the end of a backward pass, by every rank: whether the step counts."""
        step, self._step = self._step, None
        failure, self._failure = self._failure, None
        self._task = None
        self._seen.clear()
        self.counters.steps += 1
        if failure is not None:
            self._among_shards(dropped=True, failed=True)
            raise failure
        assert step is not None
        step.close()

    def _anywhere(self, dropped: bool | torch.Tensor) -> bool | torch.Tensor:
        """Replicas agree already, but know nothing of the other shards."""
        dropped, failed = self._among_shards(dropped=bool(dropped), failed=False)
        if failed:
            raise ExchangeError(
                "expected averages of all shards, but the exchange of another one failed; the own error of "
                "its ranks says why"
            )
        return dropped

    def _among_shards(self, *, dropped: bool, failed: bool) -> tuple[bool, bool]:
        """Whether either is so on some rank that shares the parameters out with this one."""
        words = torch.tensor([dropped, failed], dtype=torch.int32, device=self._device)
        dist.all_reduce(words, dist.ReduceOp.MAX, group=self._shards)
        return bool(words[0]), bool(words[1])

    def _agree_at_first(self, problem: Exception | None, settings: dict[str, Any]) -> None:
        """Compares settings over the whole mesh; an error of one rank is one of all.

        Args:
            problem: what is wrong on this rank.
            settings: that must be the same for all shards; shapes may not be.
        """
        device = device_of(self._slots)
        own = None if problem is None else f"{type(problem).__name__}: {problem}"
        line = {"error": own} if own else {**self._configuration(), "shard": self._shard}
        errors = [problem, _difference(self._process_group, device, line)]
        line = {"error": str(errors[1] or own), **settings}
        errors.append(_difference(self._shards, device, line))
        for error in errors:
            if error is not None:
                raise error
        self._prepare()
        self._note_agreement()

    def _broadcast(self, model: torch.nn.Module) -> None:
        assert self._process_group is not None
        first = dist.get_process_group_ranks(self._process_group)[0]
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if local.numel():
                    dist.broadcast(local, first, group=self._process_group)


def _like(shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a slot knows of a shard: dtype, shape and device, with memory for one element."""
    return shard.detach().new_empty((), dtype=dtype).expand(shard.shape)


def _difference(
    group: dist.ProcessGroup | None, device: torch.device, line: dict[str, Any]
) -> Exception | None:
    """What ranks differ in."""
    try:
        Agreement(collectives_of(group, device), agreement.serialize(line)).settle()
    except ExchangeError as error:
        return error
    return None
