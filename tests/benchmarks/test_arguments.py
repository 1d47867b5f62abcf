"""Wrong arguments are answered in one line that says what to write."""

from __future__ import annotations

import pytest

from benchmarks import arguments, codec


def _line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_a_compression_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments.parse(["--model", "lenet", "--json", "x", "--compression", "onbit:group=64"])
    assert (
        "expected one of onebit, int8, ternary, ecq, qsgd, topk, fp16, bf16, none, powersgd, auto, local, "
        "stock, got 'onbit:group=64' (onebit?)"
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
            "expected one of sgd, adamw, muon with --framework ddp",
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


def test_a_number_that_makes_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        codec.main(["--json", "x", "--elements", "-5"])
    assert "argument --elements: expected a positive integer, got '-5'" in _line(capsys)
