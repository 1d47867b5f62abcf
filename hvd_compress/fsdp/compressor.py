"""FSDP2's all-reduce hook over the codecs and the exchanges."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hvd_compress.codecs import Codec
from hvd_compress.codecs.calls import guard
from hvd_compress.codecs.checks import check_choice
from hvd_compress.engine.autograd import has_gradient_hook
from hvd_compress.engine.batch import Batch
from hvd_compress.engine.compressor import CompressorBase
from hvd_compress.engine.executors import keep_from_reuse
from hvd_compress.engine.options import Options
from hvd_compress.engine.parameters import local
from hvd_compress.engine.state_checks import expect_state
from hvd_compress.exchanges.routing import Route
from hvd_compress.fsdp.passes import BackwardPass
from hvd_compress.fsdp.ranks import MeshRanks
from hvd_compress.fsdp.reduce_scatter import REMEDY
from hvd_compress.fsdp.sharding import Unit, sharded
from hvd_compress.process_group.compressor import ProcessGroupCompressor
from hvd_compress.process_group.meshes import FLAT, replicas
from hvd_compress.process_group.step import Bucket
from hvd_compress.ranks.errors import ExchangeError, another_shard_failed

_ONE_EXCHANGE = (
    "run each module once before a backward pass, or call "
    "model.set_reduce_scatter_unused_params(False), so that a backward pass is one exchange"
)

_NO_REPLICAS = (
    ": without replicas, make a CompressedReduceScatter(model, codec), which compresses what the ranks "
    "of a mesh of one dimension send each other"
)


@guard
class Compressor(ProcessGroupCompressor):
    """Averages the shards of an FSDP2 model's gradients over its replicas, in encoded form.

    FSDP2 sums gradients uncompressed among the ranks that share the parameters out, such as those of a
    host. The compressor sets FSDP2's all-reduce hook of every module, and averages each rank's shards with
    the ranks that have the same shards. Residuals are those of the rank's shards alone. All ranks make the
    compressor together: they compare their settings, and the first replica's parameters and buffers are
    broadcast to the others.

    Args:
        model: a model whose modules went through ``fully_shard(module, mesh=mesh["shard"])``.
        codec: the encoding of shards of gradients: a codec, a :class:`~hvd_compress.Route` or a codec's
            name.
        mesh: the ranks, as for FSDP2: replicas along its first dimension, shards along the second one.
        process_group: instead of ``mesh``, the ranks with the same shards as this one.
        options: :class:`~hvd_compress.engine.options.Options`; all exchanges except ``"hierarchical"``.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y"; or the model is not FSDP2's, sums
            gradients over the replicas itself, or has a hook.
        ExchangeError: ranks differ (then raised on every rank); or there is no process group.
        NotImplementedError: the FSDP2 of this version of PyTorch is different.
    """

    _remedy = REMEDY
    _ranks: MeshRanks

    def __init__(
        self,
        model: torch.nn.Module,
        codec: Codec | Route | str,
        *,
        mesh: DeviceMesh | None = None,
        process_group: dist.ProcessGroup | None = None,
        **options: Unpack[Options],
    ) -> None:
        found = sharded(model)
        group = replicas("Compressor", mesh, process_group, found.mesh, _NO_REPLICAS)
        self._numbered = found.shards
        super().__init__(found.shards, codec, MeshRanks(group, found.group), **options)
        self._use.watch_parameters(model.parameters())
        check_choice("Compressor", "exchange", self._routes.exchange, FLAT)
        self._pass = BackwardPass(self._end)
        self._seen: set[int] = set()  # Modules by number, in this step.
        # By exchange of the last backward pass: whether it has left residuals as they were.
        self._dropped: list[bool] = []
        self._warned = False
        self._failure: Exception | None = None
        self._partial: dict[int, torch.Tensor] = {}  # By parameter: not yet exchanged.
        self._waiting: list[torch.Tensor] = []  # Parameters without a gradient until then.
        # By parameter: what is sent where it is not used.
        self._absent: dict[int, torch.Tensor] = {}
        self._marks: list[torch.Tensor] = []
        self._uneven: list[torch.Tensor] = []  # Whether replicas use different parameters.
        problem = None
        try:
            self._bind()
        except (TypeError, ValueError) as error:
            problem = error
        self._agree(problem)
        _broadcast(model, group)
        for number, unit in enumerate(found.units):
            unit.watch(self._discard)
            unit.module.set_all_reduce_hook(functools.partial(self._reduce, number, unit))

    def __getstate__(self) -> dict[str, Any]:
        # FSDP2's modules hold it, and are not copied either.
        return CompressorBase.__getstate__(self)

    def drop_step(self) -> None:
        """Undoes the last backward pass if its averages are not used; every rank has to call this method.

        For the rest, see :meth:`.CompressorBase.drop_step`.

        Raises:
            ExchangeError: the backward pass had several exchanges, and one before the last counts as sent;
                or as in :meth:`.CompressorBase.drop_step`. Nothing has changed then.
        """
        self._ranks.expect_idle("drop_step")
        if not all(self._dropped[:-1]):
            raise ExchangeError(
                f"drop_step: expected a backward pass with one exchange, got one with "
                f"{len(self._dropped)}, of which only the last one can be undone: residuals stay as they "
                f"are; {_ONE_EXCHANGE}"
            )
        super().drop_step()

    def state_dict(self) -> dict[str, Any]:
        """Residuals, noise positions and owned parts of this rank's shards; every rank saves its own.

        Tensors are references, as in ``torch.optim``; ``torch.save`` or a deep copy preserves them.
        """
        return {**super().state_dict(), "shard": self._ranks.shard}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where :meth:`state_dict` of the same rank was called.

        Raises:
            ValueError: the rank, mesh, seed or model differs; nothing has changed then.
        """
        self._ranks.meet("load_state_dict")
        expect_state("load_state_dict", state)
        if state.get("shard") != self._ranks.shard:
            raise ValueError(
                f"load_state_dict: expected the state of a rank with shard {self._ranks.shard[0]} of "
                f"{self._ranks.shard[1]}, got {state.get('shard')}: each rank saves and loads a state of "
                f"its own"
            )
        super().load_state_dict(state)

    def load_resized(self, states: Iterable[dict[str, Any]]) -> None:
        """Continues where a job with another number of replicas stopped.

        Unsent gradients keep their weight in the replicas' average, though on other ranks
        (:mod:`hvd_compress.ranks.resize`).

        Args:
            states: the :meth:`state_dict` of every rank of that job, in any order.

        Raises:
            ValueError: there is not one state of each rank, or the number of shards, seed or model differs;
                nothing has changed then.
        """
        self._ranks.meet("load_resized")
        states = list(states)
        for state in states:
            expect_state("load_resized", state)
        places = [state.get("shard") or [None, None] for state in states]
        sizes = {size for _, size in places}
        if sizes != {self._ranks.shard[1]}:
            raise ValueError(
                f"load_resized: expected states of a job whose replicas had {self._ranks.shard[1]} shards, "
                f"got {sorted(map(str, sizes))}: residuals are those of shards; go on with as many shards "
                f"as then, or without the compressor's state, which loses what was not sent"
            )
        super().load_resized(
            state for state, place in zip(states, places, strict=True) if place == self._ranks.shard
        )

    @torch.no_grad()
    def _reduce(self, number: int, unit: Unit, output: torch.Tensor) -> None:
        """FSDP2's hook: averages the sums of the shards' ranks over the replicas, in place."""
        if not output.is_cpu:  # FSDP2 may let go of it while this stream still works with it.
            keep_from_reuse(output)
        if self._pass.watch():
            self._break_off()
        if unit.elements != output.numel():
            raise ExchangeError(
                f"{unit.name}: expected {unit.elements} elements, as its gradients have, "
                f"got {output.numel()}"
            )
        if unit.accumulates:
            self._accumulate(unit, output)
            return
        again = number in self._seen
        if again:  # FSDP2 reduces what came first, and what came since.
            self._close()
        self._seen.add(number)
        if self._ranks.step is None and self._failure is None:
            self._attempt(functools.partial(self._start, again))
        # Also after a failure, of which other ranks may hear at the end of the backward pass only.
        if self._ranks.step is not None:
            self._attempt(lambda: self._average(unit, output))

    def _accumulate(self, unit: Unit, output: torch.Tensor) -> None:
        """Keeps gradients for a later exchange; FSDP2 receives zeros."""
        for place in unit.places:
            if place.begin is None:
                continue
            if has_gradient_hook(place.parameter):
                raise ExchangeError(
                    f"{self._numbered[place.number].name}: expected a parameter without hooks, in a "
                    f"backward pass with set_requires_all_reduce(False), got one of "
                    f"register_post_accumulate_grad_hook(), which would see zeros"
                )
            shard = output.as_strided(place.shape, place.strides, place.begin)
            if place.number in self._partial:
                self._partial[place.number].add_(shard)
            else:
                self._partial[place.number] = shard.clone()
            if place.parameter.grad is None:
                self._waiting.append(place.parameter)
        output.zero_()

    def _discard(self, unit: Unit) -> None:
        """Drops what :meth:`_accumulate` has kept, of backward passes that have ended as well.

        After a pass that did not end, the script may use the compressor before the next pass.
        """
        if self._pass.broken:
            self._break_off()
        for number in unit.numbers:
            self._partial.pop(number, None)

    def _attempt(self, work: Callable[[], None]) -> None:
        """Calls ``work``; keeps the first error until the step's end."""
        try:
            work()
        except Exception as error:
            self._failure = self._failure or error

    def _break_off(self) -> None:
        """Forgets a backward pass that did not end: residuals return to what they were before it."""
        self._ranks.step = self._failure = None
        self._seen.clear()
        self._partial.clear()
        self._waiting.clear()
        self._uneven.clear()
        self._ranks.forget_agreement()  # Ranks may have come to different places.

    def _start(self, again: bool) -> None:
        self._between_steps()
        self._agree()
        self._ranks.step = self._begin(anywhere=self._anywhere)
        self._dropped = [*(self._dropped if again else ()), True]

    def _average(self, unit: Unit, output: torch.Tensor) -> None:
        ranks = self._ranks
        bucket = Bucket(output, output.device, 1 if unit.adds_up else 1 / ranks.group.size)
        self._absent.clear()
        self._marks.clear()  # Also those of a bucket that failed.
        tensors = []
        for place in unit.places:
            slot, rest = self._numbered[place.number], self._partial.pop(place.number, None)
            if place.begin is None:
                # Sent all the same, as zeros: other replicas expect it, and may have a gradient.
                shard = output.new_zeros(place.shape)
                self._absent[slot.index] = shard
            else:
                shard = output.as_strided(place.shape, place.strides, place.begin)
            if rest is not None:
                if place.begin is None:
                    raise ExchangeError(
                        f"{slot.name}: expected a gradient in the backward pass that exchanges, as in one "
                        f"with set_requires_all_reduce(False) before, got none: call "
                        f"set_reduce_scatter_unused_params(True)"
                    )
                keep_from_reuse(rest)  # Made in the stream of an earlier backward pass.
                shard.add_(rest)
            if shard.dtype != slot.parameter.dtype:
                raise ExchangeError(
                    f"{slot.name}: expected a gradient of {slot.parameter.dtype}, as when the compressor "
                    f"was made, got {shard.dtype}"
                )
            tensors.append((slot, shard, shard))
        self._packer.pack(
            bucket, tensors, self.counters, unused=self._absent, beside=self._mark_absent
        )
        assert ranks.step is not None
        ranks.step.add(bucket)
        ranks.driver.catch_up()
        bucket.future.wait()
        for run in bucket.runs:
            if isinstance(run.content, Batch):
                self._uneven.append(run.content.uneven())
        for marks in self._marks:
            self._uneven.append((marks != 0).all(0).any())

    def _mark_absent(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """The numbers of replicas that do not use each gradient and that do."""
        marks = rows[0].new_zeros(2, len(rows))
        marks[1] = 1
        for position, row in enumerate(rows):
            if any(row is one for one in self._absent.values()):
                # By kernels: the host would have to wait for a copy to a device.
                marks[0, position], marks[1, position] = 1, 0
        self._marks.append(marks)
        return marks

    def _close(self) -> None:
        """Ends a step on every rank: at the end of a pass, or where a module is reduced again in it."""
        step, self._ranks.step = self._ranks.step, None
        self._seen.clear()
        if self._failure is not None:
            self._ranks.outcome(True, True, self._uneven)
            self._uneven.clear()
        elif step is not None:
            self._attempt(step.close)

    def _end(self) -> None:
        """Ends the step and raises what failed in it; every rank calls it at the end of a backward pass."""
        for parameter in self._waiting:
            parameter.grad = None
        self._waiting.clear()
        if self._seen:
            self.counters.steps += 1
            self._close()
            if self._failure is None:
                self._check_whole()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _check_whole(self) -> None:
        """Warns once if an Inf or a NaN has dropped only some exchanges of the backward pass."""
        if self._warned or len(set(self._dropped)) < 2:
            return
        self._warned = True
        warnings.warn(
            f"expected an Inf or a NaN to drop a whole backward pass, got {sum(self._dropped)} dropped of "
            f"its {len(self._dropped)} exchanges: in the others, residuals count gradients as sent, and "
            f"what was sent is lost if the optimizer skips the step; {_ONE_EXCHANGE}",
            UserWarning,
            stacklevel=2,
        )

    def _anywhere(self, dropped: bool | torch.Tensor) -> bool | torch.Tensor:
        """Whether to drop the step on all shards: replicas agree already, but know only their own shard."""
        failure = None
        try:
            if self._packer.deferred:  # The host waits for the device here anyway.
                self._kernels.settle()
        except Exception as error:
            failure = error
        drops, failed, uneven = self._ranks.outcome(dropped, failure is not None, self._uneven)
        self._uneven.clear()
        if failure is not None:
            raise failure
        if failed:
            raise another_shard_failed()
        if uneven:
            raise ExchangeError(
                "expected all replicas to use the same parameters in a backward pass, got others on some: "
                "call set_reduce_scatter_unused_params(True), with which ranks send zeros for a parameter "
                "that they do not use"
            )
        self._dropped[-1] = drops
        return drops

    def _agree(self, problem: Exception | None = None) -> None:
        """Compares settings over the whole mesh; an error on one rank makes all ranks raise."""
        if not self._ranks.agreed:
            configuration = {} if problem else self._configuration()
            self._ranks.agree_on_mesh(configuration, self._settings(), self._numbered, problem)

    def _settings(self) -> dict[str, Any]:
        """The settings that are the same for all shards."""
        return {
            **self._routes.router.settings,
            "warmup_steps": self.warmup_steps,
            "seed": self._state.seed,
            "owner_step": self._owner_step_text,
            "parameters": [slot.name for slot in self._slots],
        }


def _broadcast(model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Gives the model of all replicas the parameters and buffers of the first one."""
    first = dist.get_process_group_ranks(group)[0]
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            own = local(tensor)
            if own.numel():
                dist.broadcast(own, first, group=group)
