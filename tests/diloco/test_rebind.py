"""Ranks that leave and join between exchanges: processes that are killed, and new ones."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from hvd_compress import OneBit
from hvd_compress.diloco.members import Progress, all_to_send, behind, merged, sources
from tests import jobs
from tests.ddp.test_states_that_do_not_fit import _alike
from tests.diloco import member
from tests.diloco.nesterov import DiLoCo
from tests.ranks import on_ranks
from tests.torch_models import Probe, assert_same_bits, targets


class Members:
    """Processes of a module such as :mod:`tests.diloco.member`, and the store by which they meet."""

    def __init__(self, folder: Path, module: str = "tests.diloco.member") -> None:
        self._folder, self._module = folder, module
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=90)
        )
        self._server = jobs.fork_server(("torch.distributed.run",), ())
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str) -> None:
        command = self._server.command(
            self._module, str(self.store.port), str(self._folder), name, *arguments
        )
        with Path(self._folder, f"{name}.printed").open("wb") as printed:
            self._processes[name] = subprocess.Popen(
                command,
                cwd=jobs.ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
            )

    def kill(self, name: str) -> float:
        """Kills a member when it can be, and says when."""
        try:
            self.store.get(f"{name} can be killed")
        except dist.DistStoreError:
            for key in (f"process of {one}" for one in self._processes):
                if self.store.check([key]):
                    os.kill(int(self.store.get(key)), signal.SIGUSR1)  # It prints where it waits.
            time.sleep(1)
            printed = sorted(self._folder.glob("*.printed"))
            told = "\n".join(f"{path.stem}:\n{path.read_text()}" for path in printed)
            pytest.fail(f"{name} has not come to where it is killed; printed by\n{told}")
        os.kill(int(self.store.get(f"process of {name}")), signal.SIGKILL)
        return time.time()

    def end(self, name: str) -> None:
        """Waits for a member's end."""
        printed = Path(self._folder, f"{name}.printed")
        try:
            status = self._processes[name].wait(90)
        except subprocess.TimeoutExpired:
            status = -1
        assert status == 0, printed.read_text()

    def stop(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def held(self, name: str, turn: int, when: str) -> dict[str, Any]:
        """Returns a member's state at the end of a turn, or before and after it took its place for one."""
        found: dict[str, Any] = torch.load(Path(self._folder, f"{name}.{turn}.{when}"))
        return found


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    made = Members(tmp_path)
    yield made
    made.stop()


@pytest.mark.parametrize("share", ["share", "alone"])
def test_one_of_three_is_killed_and_another_one_joins(
    members: Members, tmp_path: Path, share: str
) -> None:
    members.start("A", share, "0:ABC:", "1:AB:10", "2:DAB:15")
    members.start("B", share, "0:ABC:", "1:AB:10", "2:DAB:15")
    members.start("C", share, f"0:ABC:{member.DIES}")
    killed = members.kill("C")
    members.start("D", share, "2:DAB:15")
    for name in "ABD":
        members.end(name)

    # The others learn of it at once, and not by their timeout.
    errors = [Path(tmp_path, f"{name}.0.error").read_text() for name in "AB"]
    assert all(float(text.split()[0]) - killed < 45 for text in errors), errors
    lost = members.held("C", 0, "end")
    assert lost["rounds"] == 2 and lost["exchanges"] == {"two_shot"}
    log = Path(tmp_path, "A.log").read_text()
    assert Path(tmp_path, "B.log").read_text() == "", "the first rank says it for all"
    found = re.search(
        r"ranks \[2\] of 3 are gone; what ranks \[2\].* of norm ([\d.]+), is missing", log
    )
    if share == "share":
        assert found is None
    else:
        assert found and float(found[1]) == pytest.approx(lost["norm"], rel=1e-5)
    for name in member.SHAPES:
        before = [members.held(one, 1, "before")["unsent"][name] for one in "AB"]
        assert all(bool(one.any()) for one in before)
        if share == "share":
            before.append(lost["unsent"][name])
        after = [members.held(one, 1, "begin")["unsent"][name] for one in "AB"]
        torch.testing.assert_close(sum(after) / 2, sum(before) / 3)
        before = [members.held(one, 2, "before")["unsent"][name] for one in "AB"]
        after = [members.held(one, 2, "begin")["unsent"][name] for one in "DAB"]
        assert not after[0].any()
        torch.testing.assert_close(sum(after) / 3, sum(before) / 2)
    for turn, names, rounds in ((1, "AB", 4), (2, "DAB", 6)):
        begin = [members.held(one, turn, "begin") for one in names]
        end = [members.held(one, turn, "end") for one in names]
        for ranks in (begin, end):
            assert len({(one["steps"], one["rounds"]) for one in ranks}) == 1
            for one in ranks:
                assert_same_bits(one["common"], ranks[0]["common"])
        assert end[0]["rounds"] == rounds
        for one in (begin[-1], *end):
            assert one["exchanges"] == {"allgather" if len(names) == 2 else "two_shot"}
        assert not torch.equal(begin[0]["common"]["first"], end[0]["common"]["first"])


@on_ranks(3, launcher="torchrun")
def test_a_rank_leaves_with_nothing_lost_whatever_the_exchange() -> None:
    """It hands its state over. What ranks owe as owners of parts goes along."""
    pair = dist.new_group([0, 1])
    for exchange, fragments in (("allgather", 1), ("two_shot", 3)):
        model = Probe(member.SHAPES)
        compressor = hvdc.Compressor(OneBit(), exchange=exchange, threshold=0)
        diloco = DiLoCo(model, compressor, sync_every=3, fragments=fragments)
        _train(diloco, model, range(7))
        with pytest.raises(hvdc.ExchangeError, match="got that of rank 2 of the new group"):
            diloco.rebind(lost=_states(diloco)[2:])
        states = _states(diloco)
        unsent = [member.unsent_of(state["compressor"]) for state in states]
        if dist.get_rank() == 2:
            continue
        again = hvdc.Compressor(OneBit(), exchange=exchange, threshold=0)
        again.members.load(states[dist.get_rank()]["compressor"])
        again.rebind(pair)
        for name, after in member.unsent_of(again.state_dict()).items():
            dist.all_reduce(after, group=pair)
            torch.testing.assert_close(after / 2, (unsent[0][name] + unsent[1][name]) / 3)
        own = {name: one.detach().clone() for name, one in model.named_parameters()}
        diloco.rebind(pair, lost=states[2:])
        assert_same_bits({n: p.detach() for n, p in model.named_parameters()}, own)
        for name, after in member.unsent_of(compressor.state_dict()).items():
            dist.all_reduce(after, group=pair)
            assert after.any()
            torch.testing.assert_close(after / 2, sum(one[name] for one in unsent) / 3)
        with pytest.raises(ValueError, match=r"another rank \(2 of 3\), perhaps"):
            diloco.rebind(pair, lost=states[2:])
        _train(diloco, model, range(7, 13))
        assert diloco.rounds == {1: 4, 3: 10 + 3}[fragments]


@on_ranks(2, launcher="torchrun")
def test_an_exchange_that_ended_well_on_one_rank_alone_counts_on_all() -> None:
    for failing, exchange in ((0, "allgather"), (1, "two_shot"), (2, "allgather")):
        model, undisturbed = Probe(member.SHAPES), Probe(member.SHAPES)
        sides = [
            (
                DiLoCo(
                    one, hvdc.Compressor(OneBit(), threshold=0, exchange=exchange), sync_every=2
                ),
                one,
            )
            for one in (model, undisturbed)
        ]
        for diloco, one in sides:
            _train(diloco, one, range(3))
        diloco, beside = sides[0][0], sides[1][0]
        compressor = diloco._compressor
        here = dist.get_rank() == failing or failing == 2  # 2: on both.
        if here:
            compressor.reduce = _interrupted(compressor.reduce)  # type: ignore[method-assign]
        _learn(model, dist.get_rank(), 3)
        if here:
            with pytest.raises(hvdc.ExchangeError, match="interrupted"):
                diloco.step()
            del compressor.reduce
        else:
            diloco.step()
        before = compressor.state_dict()["tensors"]["first"]["residual"].cpu().clone()
        diloco.rebind()
        after = compressor.state_dict()["tensors"]["first"]["residual"].cpu()
        if failing == 2:  # As if it had not begun.
            assert torch.equal(before, after) and diloco.rounds == 1
            # What was not sent then is part of the next difference.
            _train(diloco, model, range(4, 6))
            assert diloco.rounds == 2
            continue
        _train(beside, undisturbed, range(3, 4))
        beside.rebind()  # What a rank owes as the owner of parts becomes its residual.
        for diloco, one in sides:
            _train(diloco, one, range(4, 6))
        assert diloco.rounds == beside.rounds == 3
        assert_same_bits(sides[0][0].common_parameters, beside.common_parameters)
        assert_same_bits(
            member.unsent_of(compressor.state_dict()),
            member.unsent_of(beside._compressor.state_dict()),
        )


@on_ranks(2, launcher="torchrun")
def test_the_same_ranks_go_on_in_their_group_after_one_was_too_late() -> None:
    """The connections of the exchanges are closed then, and those of the group itself are not."""
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    model = Probe(member.SHAPES)
    compressor = hvdc.Compressor(OneBit(), threshold=0, process_group=pair)
    diloco = DiLoCo(model, compressor, sync_every=2)
    _train(diloco, model, range(3))
    dist.barrier()
    if dist.get_rank():
        time.sleep(4)
    with pytest.raises(RuntimeError, match=r"Timed out|closed"):
        _train(diloco, model, range(3, 4))
    dist.barrier()
    diloco.rebind(pair)
    _train(diloco, model, range(4, 8))
    assert diloco.rounds == 3
    alike = [torch.empty_like(one) for one in (diloco.common_parameters["first"],) * 2]
    dist.all_gather(alike, diloco.common_parameters["first"])
    assert_same_bits({"": alike[0]}, {"": alike[1]})


@on_ranks(2, launcher="torchrun")
def test_a_state_loaded_after_a_failed_exchange_is_what_it_was() -> None:
    for exchange in ("allgather", "two_shot"):
        model = Probe(member.SHAPES)
        compressor = hvdc.Compressor(OneBit(), threshold=0, exchange=exchange)
        diloco = DiLoCo(model, compressor, sync_every=2)
        _train(diloco, model, range(2))
        saved = copy.deepcopy([model.state_dict(), diloco.state_dict()])
        ends = []
        for fails in (False, True):
            if fails:
                compressor.reduce = _interrupted(compressor.reduce)  # type: ignore[method-assign]
                with pytest.raises(hvdc.ExchangeError, match="interrupted"):
                    _train(diloco, model, range(2, 4))
                del compressor.reduce
                model.load_state_dict(saved[0])
                diloco.load_state_dict(saved[1])
            _train(diloco, model, range(2, 6))
            ends.append(copy.deepcopy(diloco.state_dict()))
        assert _alike(*ends)


def _exchanged() -> tuple[Probe, DiLoCo, hvdc.Compressor]:
    """A model after one exchange of two steps, whose norms have arrived."""
    model = Probe(member.SHAPES)
    compressor = hvdc.Compressor(OneBit(), threshold=0)
    diloco = DiLoCo(model, compressor, sync_every=2)
    _train(diloco, model, range(2))
    member.wait_for_norms(compressor)
    return model, diloco, compressor


@on_ranks(2, launcher="torchrun")
def test_a_norm_is_of_the_last_exchange_or_said_to_be_older() -> None:
    held = _exchanged()  # A DiLoCo that is dropped frees its process groups.
    compressor = held[2]
    norm = torch.tensor([compressor.residual_norm()], dtype=torch.float64)
    norms = [torch.empty_like(norm) for _ in range(2)]
    dist.all_gather(norms, norm)
    known = compressor._ranks.norms
    assert known is not None and known.of([1]) == f"{norms[1].item():.6g}"
    assert float(known.of([0, 1])) == pytest.approx(torch.cat(norms).norm().item(), rel=1e-5)
    if dist.get_rank() == 0:
        compressor.share_norms()  # The other rank is lost, and shares none.
        assert known.of([1]) == f"{norms[1].item():.6g} before the last exchange"


@on_ranks(2, launcher="torchrun")
def test_norms_that_arrive_in_another_order() -> None:
    """Threads of a group may finish the gathering of a later exchange first."""
    model, diloco, compressor = _exchanged()
    known, calls = compressor._ranks.norms, []
    assert known is not None
    with mock.patch.object(known.ranks, "when_over", lambda work, over: calls.append((work, over))):
        _train(diloco, model, range(2, 6))
    assert len(calls) == 2
    for work, over in reversed(calls):
        work.wait()
        over(None)
    assert known.complete
    assert known.values[dist.get_rank()] == pytest.approx(compressor.residual_norm(), rel=1e-6)


@on_ranks(2, launcher="torchrun")
def test_ranks_that_cannot_go_on() -> None:
    model = Probe(member.SHAPES)
    diloco = DiLoCo(model, hvdc.Compressor(OneBit(), threshold=0), sync_every=4, delay=2)
    _train(diloco, model, range(4))
    match = "expected no exchange under way; call synchronize"
    with pytest.raises(hvdc.ExchangeError, match=match):
        diloco.rebind()
    _train(diloco, model, range(4, 6))
    before = {name: one.clone() for name, one in diloco.common_parameters.items()}
    match = (
        "expected what state_dict.. returned" if dist.get_rank() else "rank 1: TypeError: .*lost"
    )
    with pytest.raises((TypeError, hvdc.ExchangeError), match=match):
        diloco.rebind(lost=[3] if dist.get_rank() else [])  # type: ignore[list-item]
    match = (
        "expected states of compressors" if dist.get_rank() else "rank 1: ValueError: rebind.lost"
    )
    with pytest.raises((ValueError, hvdc.ExchangeError), match=match):
        diloco.rebind(lost=[{"compressor": {}}] if dist.get_rank() else [])
    if dist.get_rank():
        other = DiLoCo.__new__(DiLoCo)
        with pytest.raises(hvdc.ExchangeError, match="sync_every: 4 on rank 0, 5 on rank 1"):
            other.__init__(
                Probe(member.SHAPES), hvdc.Compressor(OneBit(), threshold=0), sync_every=5, delay=2
            )  # type: ignore[misc]
    else:
        with pytest.raises(hvdc.ExchangeError, match="sync_every: 4 on rank 0, 5 on rank 1"):
            diloco.rebind()
    assert_same_bits(diloco.common_parameters, before)
    _train(diloco, model, range(6, 10))
    assert diloco.rounds == 2


def test_who_has_come_furthest() -> None:
    def told(group: str | None, **history: list[tuple[int, int]]) -> Progress:
        return Progress(b"", group, "", 0, history)

    new, first = told(None), told("a", a=[(2, 1), (2, 0)])
    second, third = told("a", a=[(2, 2), (2, 0)]), told("b", a=[(2, 1), (1, 0)], b=[(1, 0), (0, 0)])
    ranks = [new, first, second, third]
    assert sources(ranks, 2) == [2, 1]
    assert [behind(ranks, [2, 1], rank) for rank in range(4)] == [[0, 1], [0], [], [1]]
    assert first.ended(second, 0) == (0, 1) and first.ended(second, 1) == (0, 0)
    assert second.ended(third, 0) == (0, -1), "an exchange in another group is another one"
    assert merged(ranks, [2, 1]) == {"a": [(2, 2), (2, 0)]}
    assert merged(ranks, [3, 1]) == {"a": [(2, 1), (2, 0)], "b": [(1, 0), (0, 0)]}
    assert sources([new, told("a", a=[(0, 0)])], 1) == [1], (
        "a new rank has nothing that others lack"
    )
    assert sources([new, new], 1) == [0]
    begun = [Progress(b"", None, "", 0, begins=digest) for digest in (b"1", b"1", b"2")]
    assert [behind(begun, [0], rank) for rank in range(3)] == [[], [], [0]]
    sending = [
        replace(told(group, **history), to_send=names)
        for group, history, names in (
            (None, {}, {"p": False, "q": False}),
            ("a", {"a": [(1, 0)]}, {"p": False}),
            ("a", {"a": [(1, 0)]}, {"p": True, "r": False}),
            ("a", {"a": [(0, 0)]}, {"p": False, "s": True}),
        )
    ]
    names = [["p", "q", "r", "s"]]
    assert all_to_send(sending, [1], names) == {"p": True, "r": False}, (
        "a rank that is new or behind sends what others do"
    )
    assert all_to_send(sending[:1], [0], names) == sending[0].to_send
    fresh = told("a", a=[(0, 0)])
    assert behind([fresh, begun[0]], [0], 1) == [0], "its parameters may be others"


def _interrupted(reduce: Callable[..., hvdc.Work]) -> Callable[..., hvdc.Work]:
    """Fails when everything has come, before it counts."""

    def interrupt() -> None:
        raise hvdc.ExchangeError("interrupted")

    return lambda *given, accept, device: reduce(*given, accept=interrupt, device=device)


def _learn(model: Probe, rank: int, step: int) -> None:
    change = targets(member.SHAPES, rank, step, 0.1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(change[name])


def _train(diloco: DiLoCo, model: Probe, steps: range) -> None:
    for step in steps:
        _learn(model, dist.get_rank(), step)
        diloco.step()


def _states(diloco: DiLoCo) -> list[Any]:
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, copy.deepcopy(diloco.state_dict()))
    return states
