"""Wrong arguments are answered in one line that says what to write."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import arguments, codec
from benchmarks.paper_recipes import PAPERS


def _line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_a_compression_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments.parse(["--model", "lenet", "--json", "x", "--compression", "onbit:group=64"])
    assert (
        "expected one of onebit, int8, ternary, ecq, qsgd, topk, fp16, bf16, none, powersgd, auto, local, "
        "stock, powersgd-hook, got 'onbit:group=64' (onebit?)"
    ) in _line(capsys)


@pytest.mark.parametrize(
    ("framework", "options", "message"),
    [
        (
            "torch",
            ["--compression", "stock"],
            "expected one of onebit, int8, ternary, ecq, qsgd, topk, fp16, bf16, none, powersgd, auto, "
            "local with --framework torch, got 'stock'",
        ),
        (
            "ddp",
            ["--optimizer", "onebit-adam"],
            "expected one of sgd, adam, adamw, rmsprop, muon with --framework ddp",
        ),
        ("keras", ["--autocast", "bf16"], "expected none with --framework keras, got 'bf16'"),
        ("tensorflow", ["--device", "cuda"], "expected cpu with --framework tensorflow"),
        ("diloco", ["--shards", "2"], "expected 1 with --framework diloco, got '2'"),
    ],
)
def test_what_a_framework_cannot_do(
    capsys: pytest.CaptureFixture[str], framework: str, options: list[str], message: str
) -> None:
    known = ["--model", "lenet", "--json", "x", "--compression", "none", "--framework", framework]
    with pytest.raises(SystemExit):
        arguments.parse([*known, *options])
    assert f"argument {options[0]}: {message}" in _line(capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schedule", "staircase"], "--drops: expected some with --schedule staircase"),
        (
            ["--drops", "0.5"],
            "--drops: expected some with --schedule staircase, and none without, got 1",
        ),
        (["--drops", "0.5,x"], "--drops: expected positive numbers with commas, got '0.5,x'"),
        (["--mirror", "2"], "--mirror: expected a number from 0 to 1, got '2'"),
        (["--norm", "lrn"], "--norm and --dropout: lenet: expected a normalization other than lrn"),
        (["--dropout", "0.5"], "--norm and --dropout: lenet: expected no dropout"),
        (["--recipe", "adam"], "--recipe: invalid choice: 'adam'"),
    ],
)
def test_recipes_that_make_no_sense(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        arguments.parse(["--model", "lenet", "--json", "x", "--compression", "none", *options])
    assert message in _line(capsys)


@pytest.mark.parametrize("name", PAPERS)
def test_recipes_of_papers_are_options_that_others_override(name: str) -> None:
    given = ["--json", "x", "--compression", "none", "--recipe", name]

    recipe = arguments.settings(arguments.parse(given))
    changed = arguments.settings(arguments.parse([*given, "--steps", "3"]))

    assert recipe.model == PAPERS[name]["--model"]
    assert recipe.steps == int(PAPERS[name]["--steps"])
    assert changed == dataclasses.replace(recipe, steps=3)


def test_a_number_that_makes_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        codec.main(["--json", "x", "--elements", "-5"])
    assert "argument --elements: expected a positive integer, got '-5'" in _line(capsys)
