"""The text model that is trained with each codec: its ranks, its tables of n-grams, and one command."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hvd_compress.distributed as hvdc
from benchmarks import compressions
from benchmarks.models.torch.transformer import Transformer
from benchmarks.papers.native import Native
from benchmarks.tables import Table
from benchmarks.trained import __main__, ngrams, record, runs
from benchmarks.trained.ranks import LocalRanks
from benchmarks.trained.training import Case, Recipe, Training
from hvd_compress.exchanges.reference import Simulation
from tests.ranks import on_ranks

RANKS = 4
METHODS = ("int8", "qsgd", "onebit", "ecq:levels=4,norm=l2,bucket=256", "powersgd:rank=2")
TINY = Recipe(
    steps=6, warmup=2, batch=8, context=8, width=8, layers=1, heads=2, history=2, points=3, scored=64
)  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A tiny model, on a text that is read in no time."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"the cat sat on the mat; the dog sat on the log. " * 400)
    return dataclasses.replace(TINY, data=str(path))


def net() -> Transformer:
    torch.manual_seed(0)
    return Transformer(64, 8, width=16, layers=1, heads=2, tied=False, history=2)


@on_ranks(RANKS, launcher="torchrun")
def test_ranks_in_memory_have_the_bits_of_real_ones() -> None:
    for method in METHODS:
        model = net()
        route, _ = compressions.parse(method, {}, last_layer="").split()
        ranks = LocalRanks(model, route, RANKS, threshold=64, seed=7)
        real = hvdc.Compressor(route, threshold=64, seed=7)
        names = [name for name, _ in model.named_parameters()]
        random = torch.Generator().manual_seed(1)
        for step in range(3):
            everybodys = [
                [torch.randn(p.shape, generator=random) for p in model.parameters()]
                for _ in range(RANKS)
            ]
            mine = [one.clone() for one in everybodys[dist.get_rank()]]
            hvdc.all_reduce(mine, real, key=names)
            for name, own, average in zip(names, mine, ranks.average(everybodys), strict=True):
                sent = real.routes()[name]
                if sent.uncompressed or sent.exchange == "low_rank":
                    # Gloo adds floats in an order of its own.
                    torch.testing.assert_close(own, average)
                else:
                    assert torch.equal(own, average), (method, step, name)
        assert real.counters.message_bytes == ranks.counters.message_bytes


@pytest.mark.parametrize("method", METHODS[:-1])
def test_ranks_in_memory_send_what_the_references_say(method: str) -> None:
    model = net()
    route, _ = compressions.parse(method, {}, last_layer="").split()
    ranks = LocalRanks(model, route, RANKS, threshold=1, seed=7)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    simulated = Simulation(
        "two_shot", route.codec, route.feedback, shapes, RANKS, seed=7, arithmetic=Native()
    )
    random = torch.Generator().manual_seed(1)
    for _ in range(3):
        own = [[torch.randn(s, generator=random) for s in shapes.values()] for _ in range(RANKS)]
        arrays = [dict(zip(shapes, (g.numpy().copy() for g in one), strict=True)) for one in own]
        expected = simulated.average(arrays)
        averages = ranks.average(own)
        for name, average in zip(shapes, averages, strict=True):
            np.testing.assert_array_equal(average.numpy(), expected[name], name)
        for other in own[1:]:
            assert all(map(torch.equal, other, averages))
    assert ranks.counters.steps == 3 and ranks.counters.message_bytes > 0


def test_uncompressed_ranks_average() -> None:
    model = net()
    route, _ = compressions.parse("none", {}, last_layer="").split()
    own = [[torch.full_like(p, rank) for p in model.parameters()] for rank in range(RANKS)]
    for average in LocalRanks(model, route, RANKS).average(own):
        assert (average == 1.5).all()


def test_earlier_tokens_reach_a_place_by_their_distance() -> None:
    model = net()
    for block in model.blocks:
        torch.nn.init.zeros_(block.out.weight)
        torch.nn.init.zeros_(block.out.bias)
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 2] = 50
    differs = (model(tokens) != model(changed)).any(-1)[0].tolist()
    assert differs == [False, False, True, True, True, False, False, False]


@pytest.mark.parametrize("order", range(ngrams.MOST + 1))
def test_tables_of_n_grams_have_the_probabilities_of_witten_and_bell(order: int) -> None:
    random = np.random.default_rng(order)
    train, test = (random.integers(97, 100, (20, 9)).astype(np.uint8) for _ in range(2))
    test[0, 4] = 200  # A byte that the training text lacks.
    counts: dict[bytes, Counter[int]] = {}
    for piece in train:
        for place in range(1, 9):
            for length in range(min(order, place) + 1):
                context = piece[place - length : place].tobytes()
                counts.setdefault(context, Counter())[int(piece[place])] += 1

    def probability(context: bytes, byte: int) -> float:
        lower = probability(context[1:], byte) if context else 1 / 256
        if context not in counts:
            return lower
        own = counts[context]
        return (own[byte] + len(own) * lower) / (own.total() + len(own))

    bits = [
        -math.log2(probability(piece[max(0, place - order) : place].tobytes(), int(piece[place])))
        for piece in test
        for place in range(1, 9)
    ]
    found = ngrams.bits(train, test, order)
    assert len(found) == order + 1 and found[order] == pytest.approx(np.mean(bits))


def test_an_order_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="expected an order from 0 to 6, got 7"):
        ngrams.bits(np.zeros((1, 9), np.uint8), np.zeros((1, 9), np.uint8), 7)


@pytest.mark.parametrize("method", ["none", "qsgd:bucket=64", "onebit", "powersgd:rank=1"])
def test_a_stopped_training_ends_as_if_it_had_not_been_stopped(
    method: str, recipe: Recipe, tmp_path: Path
) -> None:
    case = Case(method, 3)
    whole, first, second = (Training(case, recipe) for _ in range(3))
    while not whole.over:
        whole.advance()
    for _ in range(3):
        first.advance()
    first.save(tmp_path / "one.pt")
    second.load(tmp_path / "one.pt")
    while not second.over:
        second.advance()
    assert all(map(torch.equal, whole.model.parameters(), second.model.parameters()))
    expected, found = whole.result(), second.result()
    for one in (expected, found):
        del one["processor_seconds"]
    assert found == expected and len(found["curve"]) == recipe.points


def test_a_checkpoint_of_another_recipe(recipe: Recipe, tmp_path: Path) -> None:
    Training(Case("none", 3), recipe).save(tmp_path / "one.pt")
    with pytest.raises(ValueError, match="expected a checkpoint of recipe"):
        Training(Case("none", 3), dataclasses.replace(recipe, lr=1.0)).load(tmp_path / "one.pt")


def test_one_command_trains_resumes_and_draws(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    monkeypatch.setattr(runs, "_SAVED_EVERY", 2)
    out = tmp_path / "out"
    command = ["--out", str(out), "--compression", "int8", "onebit"]
    assert __main__.main([*command, "--seeds", "1"], recipe) == 0
    assert "onebit, seed 100: step 6" in capsys.readouterr().out
    made = {path: path.stat().st_mtime_ns for path in out.glob("*-100.json")}
    assert len(made) == 3 and not list(out.glob("*.pt"))

    assert __main__.main([*command, "--seeds", "2"], recipe) == 0
    assert {path: path.stat().st_mtime_ns for path in made} == made, "a training was repeated"
    trained = record.read(out / "trained.json")
    assert [(run["method"], run["seed"]) for run in trained["runs"]] == [
        *(("none", 100), ("int8", 100), ("none", 101), ("int8", 101)),
        *(("onebit", 100), ("onebit", 101)),
    ]
    assert trained["machine"]["commits"] and trained["recipe"] == dataclasses.asdict(recipe)
    assert "int8" in (out / "trained.svg").read_text()
    shown = record.table(trained)
    assert isinstance(shown, Table) and shown.rows[0][0] == "none"
    assert "table of order 3" in shown.text() and "gzip -9" in shown.text()

    other = dataclasses.replace(recipe, steps=7)
    assert __main__.main([*command, "--seeds", "2"], other) == 1
    assert "expected a training of recipe" in capsys.readouterr().err


def test_two_processes_share_the_work(recipe: Recipe, tmp_path: Path) -> None:
    """A process leaves out what another one is making."""
    case = Case("none", 100)
    with runs._alone(tmp_path / "none-100.lock") as alone:
        assert alone
        runs.make(tmp_path, recipe, [case])
        assert not runs.finished(tmp_path, recipe, [case])
    runs.make(tmp_path, recipe, [case])
    assert len(runs.finished(tmp_path, recipe, [case])) == 1


def made(method: str, *bits: float) -> list[dict[str, object]]:
    about = {"machine": {"commit": "0" * 12}, "versions": {}}
    results = [{"test_bits": one, "message_bytes_per_step": 1.0} for one in bits]
    return [
        {"method": method, "seed": seed, "result": result, **about}
        for seed, result in enumerate(results)
    ]


def test_what_the_table_says_of_a_margin() -> None:
    lines = {"tables": [{"bytes": 1, "bits": {"3": 2.1}}], "programs": {}}
    rows = [
        *made("none", 2.0, 2.1, 2.2),
        *made("int8", 2.001, 2.102, 2.2),
        *made("onebit", 2.3, 2.2),
        *made("qsgd", 2.1),
    ]
    cells = record.table(record.collect(TINY, rows, lines, "command")).rows
    assert [row[-1] for row in cells] == ["", "the same", "cannot tell", "", ""]
    assert cells[1][4] == "+0.001" and cells[2][2] == "2" and cells[3][4:] == ["+0.100", "", ""]
