"""The command line of ``benchmarks.train``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import codec_file
from benchmarks.command_line import Parser, compression, positive, share
from benchmarks.compressions import option
from benchmarks.models import MODELS, chain_of
from benchmarks.models.chains import NORMS
from benchmarks.paper_recipes import PAPERS
from benchmarks.settings import BORDERS, OPTIMIZERS, SCHEDULES, Settings
from benchmarks.trainers import ABILITIES, FRAMEWORKS
from hvd_compress.codecs import codec_names


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line, or ``arguments`` in its place."""
    parser = Parser(
        prog="python -m benchmarks.train",
        description="Train a model once for each compression and seed, on one process or under "
        "horovodrun, and write what came out as JSON.",
    )
    add = parser.add_argument
    add("--recipe", choices=tuple(PAPERS),
        help="a paper's options (benchmarks/paper_recipes.py); others override them")  # fmt: skip
    add("--framework", choices=FRAMEWORKS, default=FRAMEWORKS[0])
    add("--model", choices=tuple(MODELS), required=True)
    add("--norm", choices=NORMS, help="what normalizes convolutions; default: the model's own")
    add(
        "--dropout",
        type=share,
        help="the share of numbers that are dropped; default: the model's own",
    )
    add("--compression", nargs="+", type=compression, required=True, metavar="NAME[:key=value,...]",
        help="one or several: none fp16 bf16 onebit int8 ternary ecq qsgd topk, powersgd (PyTorch's "
        "frameworks), auto, which chooses by measurement, local, which exchanges nothing, "
        "or stock, what the framework does in every step by itself (ddp, fsdp, diloco, tensorflow); "
        "diloco also takes sync_every, fragments, delay, mixing, "
        "outer_lr and outer_momentum, and fsdp reduce_scatter and all_gather, a codec's name")  # fmt: skip
    add("--json", type=Path, required=True, metavar="OUT")
    add("--codec-file", type=Path, metavar="FILE",
        help="a Python file that defines codecs, for --compression (docs/compare.md)")  # fmt: skip
    add("--option", action="append", default=[], type=option, metavar="key=value",
        help="a setting for every compression, such as threshold=1024")  # fmt: skip
    add("--data", metavar="DATA",
        help="mnist5k, digits, or a folder: MNIST, CIFAR-10, ImageNet, text; default: model's")  # fmt: skip
    add("--epochs", type=positive, default=1)
    add("--steps", type=positive, help="instead of --epochs")
    add("--batch-size", type=positive, default=32, help="samples a rank and step")
    add("--optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0])
    add("--lr", type=float, default=0.01)
    add("--schedule", choices=SCHEDULES, default="cosine")
    add("--power", type=float, default=0.5, help="of the polynomial schedule")
    add("--drops", type=_drops, default=(), metavar="AT,AT,...",
        help="where the staircase falls: steps, or shares of all steps below 1")  # fmt: skip
    add("--drop-factor", type=share, default=0.1, help="what it is multiplied by there")
    add("--lr-warmup", type=int, default=0, help="steps in which the learning rate rises")
    add(
        "--margin",
        type=int,
        default=0,
        help="pixels by which images are larger than what is cut from them",
    )
    add("--shift", type=int, default=0, help="pixels by which training images move at random")
    add("--border", choices=tuple(BORDERS), default="edge", help="what comes in there")
    add("--mirror", type=share, default=0.0, help="the share of training images that are mirrored")
    add("--momentum", type=float, default=0.9, help="of SGD")
    add("--weight-decay", type=float, default=0.0)
    add("--averaging", type=float, default=0.0,
        help="decay of the average of the weights that is tested (PyTorch), such as 0.9999")  # fmt: skip
    add("--threads", type=positive, default=1, help="threads a rank computes with")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="what a rank computes on")
    add("--autocast", choices=("bf16",), help="what PyTorch's forward pass computes in")
    add("--shards", type=positive, default=1,
        help="ranks that share a model's parameters out (fsdp); all ranks: replicas x shards")  # fmt: skip
    add("--curve-points", type=positive, default=50, help="points of the loss curve")
    add("--seed", type=int, default=0, help="the first seed")
    add("--seeds", type=positive, default=1, help="how many seeds")
    add("--test-at-end", action="store_true", help="instead of after every epoch")
    add("--quiet", action="store_true", help="do not print the table")
    add("--explain", action="store_true", help="print why auto chose what it chose")
    add("--resume", action="store_true", help="keep the runs that OUT holds already")
    given = sys.argv[1:] if arguments is None else arguments
    first = _first(given)
    if first.codec_file is not None:
        try:
            codec_file.load(first.codec_file)
        except ValueError as error:
            parser.error(f"argument --codec-file: {error}")
    recipe = [text for option in PAPERS.get(first.recipe, {}).items() for text in option]
    chosen = parser.parse_args([*recipe, *given])
    _check(parser, chosen)
    return chosen


def _first(given: list[str]) -> argparse.Namespace:
    """The arguments that the others depend on: the recipe, and the file of further codecs."""
    finder = Parser(add_help=False)
    finder.add_argument("--recipe")
    finder.add_argument("--codec-file", type=Path)
    return finder.parse_known_args(given)[0]


def _drops(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) <= 0:
        raise argparse.ArgumentTypeError(f"expected positive numbers with commas, got {text!r}")
    return values


def _check(parser: Parser, chosen: argparse.Namespace) -> None:
    """Ends with one line that lists the framework's abilities, unless it has those that are asked for."""
    framework, able = chosen.framework, ABILITIES[chosen.framework]
    allowed: dict[str, tuple[str, ...]] = {
        "compression": (*codec_names(), *able.compressions),
        "optimizer": able.optimizers,
        "device": ("cpu", "cuda") if able.is_torch else ("cpu",),
        "autocast": ("bf16",) if able.is_torch else (),
        "shards": (str(chosen.shards) if framework == "fsdp" else "1",),
    }
    for name, values in allowed.items():
        got = getattr(chosen, name)
        for one in got if isinstance(got, list) else [got]:
            if one is not None and str(one).partition(":")[0] not in values:
                parser.error(
                    f"argument --{name}: expected {_listed(values)} with --framework {framework}, got "
                    f"{str(one)!r}"
                )
    if bool(chosen.drops) != (chosen.schedule == "staircase"):
        parser.error(
            f"argument --drops: expected some with --schedule staircase, and none without, got "
            f"{len(chosen.drops)} with {chosen.schedule}"
        )
    try:
        chain_of(chosen.model, chosen.norm, chosen.dropout)
    except ValueError as error:
        parser.error(f"arguments --norm and --dropout: {error}")
    if chosen.averaging and framework not in ("torch", "ddp"):
        parser.error(
            f"argument --averaging: expected 0 with --framework {framework}, got {chosen.averaging}"
        )


def _listed(values: Sequence[str]) -> str:
    if len(values) > 1:
        return f"one of {', '.join(values)}"
    return values[0] if values else "none"


def settings(arguments: argparse.Namespace) -> Settings:
    """The recipe among the arguments."""
    names = [field.name for field in dataclasses.fields(Settings)]
    return Settings(**{name: getattr(arguments, name) for name in names})
