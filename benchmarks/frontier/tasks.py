"""The tasks of the frontier: what is trained, with which optimizers and methods, and what is measured."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.papers.training import DATA, NONE

SIGNUM, SIGNUM_32, SGDM = "signum", "signum-32", "ef21-sgdm+"
LOW_RANK = ("powersgd:rank=4", "powersgd:rank=1")
METHODS = (
    NONE,
    "bf16",
    "int8",
    *(
        "ecq:levels=15,bucket=4096,alpha=0.01",
        "ecq:bucket=4096,alpha=0.01",
        "ecq:coding=entropy,bucket=4096,alpha=0.01",
        "ecq:levels=2,coding=entropy,bucket=4096,alpha=0.01",
    ),
    *(
        "ecq:levels=4,norm=l2,coding=entropy,bucket=4096",
        "ecq:levels=1,norm=l2,coding=entropy,bucket=4096",
    ),
    *(
        "qsgd:bucket=4096",
        "qsgd:levels=4,norm=l2,coding=entropy,bucket=4096",
        "qsgd:levels=1,norm=l2,coding=entropy,bucket=4096",
    ),
    *("ternary", "ternary:coding=entropy"),
    *("onebit", "onebit:group=column", "onebit:group=tensor", "onebit:alpha=0"),
    *("topk:keep=512,bits=4", "topk:keep=256", "topk", "topk:keep=16"),
    *(f"{SGDM}onebit", f"{SGDM}topk:keep=256", f"{SGDM}topk"),
    *(SIGNUM, SIGNUM_32),
    *LOW_RANK,
)
"""The methods on images: codecs with settings; after ``ef21-sgdm+``, codecs in EF21 with momentum, which
replaces error feedback; Signum with majority vote; the signs of the workers' average momentum, for which 32
bits are sent."""
_ROTATED = "ecq:rotate=True,bucket=128,alpha=0.01"
EQUAL_BITS = (
    *(NONE, "bf16", "int8", "int8:kind=linear", "int8:kind=e4m3"),
    *("ecq:bucket=4096,alpha=0.01", _ROTATED, "qsgd:bucket=4096", "qsgd:bucket=512"),
    "powersgd:rank=4",
)
"""The methods that every optimizer on text is tried with: 16, 8 and about 4 bits, and PowerSGD."""
TEXT_METHODS = (
    *EQUAL_BITS,
    *(
        "ecq:levels=15,bucket=4096,alpha=0.01",
        "ecq:levels=2,coding=entropy,bucket=4096,alpha=0.01",
        "ecq:levels=4,norm=l2,coding=entropy,bucket=4096",
    ),
    *("ternary", "onebit", "onebit:group=column", "topk:keep=512,bits=4", "topk:keep=256"),
)
"""The methods on text with AdamW."""
RESNET_METHODS = (
    *(
        NONE,
        "bf16",
        "int8",
        "ecq:bucket=4096,alpha=0.01",
        "ecq:levels=2,coding=entropy,bucket=4096,alpha=0.01",
    ),
    *(
        "ecq:levels=4,norm=l2,coding=entropy,bucket=4096",
        "ecq:levels=1,norm=l2,coding=entropy,bucket=4096",
    ),
    *("qsgd:bucket=4096", "qsgd:levels=1,norm=l2,coding=entropy,bucket=4096", "ternary"),
    *("onebit", "onebit:group=column", "topk:keep=256", "topk", SIGNUM, SIGNUM_32),
    *LOW_RANK,
)
"""The methods on ResNet-20."""


@dataclass(frozen=True)
class Measure:
    """The result of a training that is compared.

    Attributes:
        key: the name in a case's result.
        scale: from the result to the unit.
        unit: the name and unit, for tables and axes.
        digits: the number of decimal places in tables.
        sign: 1 if larger is better, -1 if smaller is.
        shown: the range beside the best value that a picture shows, in units; worse methods are named
            at its edge.
    """

    key: str
    scale: float
    unit: str
    digits: int
    sign: int
    shown: float


@dataclass(frozen=True)
class Task:
    """A model, its data, and the optimizers and methods that are compared on it.

    Attributes:
        name: the name on the command line and in records.
        model: the model's name, as for :func:`benchmarks.papers.models.build`.
        data: the default data, as for :class:`benchmarks.papers.training.Recipe`.
        measure: the result that is compared.
        optimizers: the learning rate and the methods of each optimizer.
        workers: the number of workers that share the mini-batch; odd with majority votes, so that votes
            are seldom tied.
        batch: the number of images, or of windows of text, per step, of all workers together.
        steps: the number of steps, and that of long trainings.
        warmup: the steps in which the learning rate rises from zero.
        weight_decay: the optimizer's weight decay, except with momentum.
        threshold: tensors with fewer elements are not compressed.
        seeds: the number of seeds of each method.
    """

    name: str
    model: str
    data: str
    measure: Measure
    optimizers: dict[str, tuple[float, tuple[str, ...]]]
    workers: int = 5
    batch: int = 80
    steps: tuple[int, int] = (200, 15_000)
    warmup: int = 0
    weight_decay: float = 0.0
    threshold: int = 0
    seeds: int = 5


_ACCURACY = Measure("test_accuracy", 100, "test accuracy, %", 2, 1, 18)
MOMENTUM = "momentum"
SIGNUM_RATE = 0.002
"""The learning rate of Signum, whose steps have a fixed length: as good as 0.004 and better than 0.0002,
0.0005 and 0.001, on LeNet, seed 100, in trainings of 400 steps."""

LENET = Task("lenet", "lenet", DATA, _ACCURACY, {MOMENTUM: (0.02, METHODS)})
"""LeNet on MNIST's digits. The learning rate was chosen without compression among 0.01, 0.02, 0.05 and 0.1,
on seed 100 in trainings of 300 steps."""

RESNET = Task(
    "resnet20",
    "resnet20",
    "digits",
    _ACCURACY,
    {MOMENTUM: (0.05, RESNET_METHODS)},
    steps=(100, 1_000),
)
"""ResNet-20 on digits of 16x16 pixels. The learning rate was chosen without compression: on seed 100, 0.02
and 0.05 were equally good in 200 steps."""

TEXT = Task(
    "text",
    "gpt",
    "text",
    Measure("test_bits", 1, "bits a byte of test text", 3, -1, 0.9),
    {
        "adamw": (0.003, TEXT_METHODS),
        MOMENTUM: (0.1, EQUAL_BITS),
        "muon": (0.005, EQUAL_BITS),
    },
    workers=4,
    batch=16,
    steps=(300, 4_000),
    warmup=40,
    weight_decay=0.1,
    threshold=1024,
)
"""A small transformer on the sources of Python's standard library. The learning rates were chosen without
compression on seed 100, in trainings of 400 steps: AdamW's among 0.0015, 0.003 and 0.006, momentum's among
0.02, 0.05, 0.1 and 0.2, Muon's among 0.0025, 0.005, 0.01 and 0.02."""

TASKS = {task.name: task for task in (LENET, RESNET, TEXT)}
