"""The papers' training recipes, as options of ``benchmarks.train``.

Batch sizes are those of one rank. Comments name the settings that a paper leaves open.
"""

from __future__ import annotations

from collections.abc import Mapping

_RESNET = {
    "--model": "resnet20",
    "--batch-size": "128",
    "--lr": "0.1",
    "--schedule": "staircase",
    "--weight-decay": "0.0001",
    "--shift": "4",
    "--border": "zero",
    "--mirror": "0.5",
}
_IMAGENET = {"--norm": "batch", "--margin": "32", "--mirror": "0.5"}

PAPERS: dict[str, Mapping[str, str]] = {
    # He et al., "Deep residual learning for image recognition", 2016, section 4.2, for each depth.
    "resnet": {**_RESNET, "--steps": "64000", "--drops": "32000,48000"},
    # ECQ-SGD, section 6.2: 128 images a step in all. The paper gives batch and learning rates; the rest is
    # He's.
    "ecq-resnet20": {**_RESNET, "--steps": "78000", "--drops": "40000,60000"},
    # TernGrad, figure 3: 64 images a step of all ranks; with vanilla SGD, a learning rate of 0.1 and no
    # momentum. The power of the decay is that of the published source.
    "terngrad-lenet": {
        "--model": "lenet",
        "--batch-size": "64",
        "--steps": "10000",
        "--lr": "0.01",
        "--schedule": "polynomial",
        "--weight-decay": "0.0005",
    },
    # TernGrad, table 1, two ranks; sixteen make 18,750 steps of 128 images each. No schedule is given.
    # Left out: random brightness and contrast, and the weight decay of the published source, 0.004 of the
    # weights of hidden dense layers alone.
    "terngrad-cifarnet": {
        "--model": "cifarnet",
        "--batch-size": "64",
        "--steps": "300000",
        "--optimizer": "adam",
        "--lr": "0.0002",
        "--schedule": "constant",
        "--mirror": "0.5",
    },
    # TernGrad, table 2, two ranks, without compression; with it, --dropout 0.2. The staircase is that of
    # Caffe, to which the paper refers.
    "terngrad-alexnet": {
        **_IMAGENET,
        "--model": "alexnet",
        "--batch-size": "128",
        "--steps": "370000",
        "--lr": "0.01",
        "--schedule": "staircase",
        "--drops": "100000,200000,300000",
        "--weight-decay": "0.0005",
        "--dropout": "0.5",
    },
    # TernGrad, table 3, two ranks, without compression; with it, --dropout 0.08 --weight-decay 1e-5. All
    # crops are of one scale; the paper refers to crops of many.
    "terngrad-googlenet": {
        **_IMAGENET,
        "--model": "googlenet",
        "--batch-size": "64",
        "--steps": "600000",
        "--lr": "0.04",
        "--schedule": "polynomial",
        "--weight-decay": "0.00004",
        "--dropout": "0.2",
    },
}
"""The options by the names that command lines use."""
