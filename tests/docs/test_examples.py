"""The examples run as they stand on the pages, and the table of codecs tells the truth."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_compress.codecs import CODECS
from tests import jobs

ROOT = Path(__file__).parent.parent.parent
STOCK = ("horovod.runner.launch", "--gloo", "-np", "2")
"""The page's launcher. It imports TensorFlow, which takes longer than the ranks: the others do without."""

STARTS = {
    "DDP": ("torchrun", "docs/examples/ddp_quickstart.py"),
    "Horovod": ("stock", "docs/examples/torch_quickstart.py"),
    "Lightning": ("torchrun", "docs/examples/lightning_quickstart.py"),
    "Keras": ("tensorflow", "docs/examples/keras_quickstart.py"),
}
"""The tabs of the first page: a launcher of :mod:`tests.jobs` or the stock one, and the script."""

SCRIPTS = {
    "docs/examples/keras_model_quickstart.py": ("tensorflow", 2, 8),
    "docs/examples/tensorflow_quickstart.py": ("tensorflow", 2, 8),
    "docs/examples/distributed_quickstart.py": ("torchrun", 2, 8),
    "docs/examples/diloco_quickstart.py": ("torchrun", 2, 1),
    "docs/examples/onebit_adam_quickstart.py": ("torchrun", 2, 1),
    "docs/examples/fsdp_quickstart.py": ("torchrun", 4, 8),
    "docs/examples/accelerate_quickstart.py": ("torchrun", 2, 8),
    "docs/examples/trainer_quickstart.py": ("torchrun", 2, 8),
}
"""A launcher, how many ranks, and the bits of the codec."""

START = (ROOT / "docs" / "start.md").read_text()
PAGE = (ROOT / "docs" / "codecs" / "index.md").read_text()

NAMES = {
    "OneBit": "onebit",
    "Ternary": "ternary",
    "ECQ": "ecq",
    "QSGD": "qsgd",
    "TopK": "topk",
    "Int8": "int8",
    "FP16": "fp16",
    "BF16": "bf16",
    "NoCompression": "none",
}


@pytest.mark.parametrize("tab", STARTS)
def test_a_script_of_the_first_page_prints_what_stands_there(tab: str) -> None:
    """Compressed, then not; processors round losses and accuracies differently, but bytes are exact."""
    launcher, script = STARTS[tab]
    text = "".join(re.findall(rf"````\{{tab\}} {tab}\n(.*?)\n````", START, re.DOTALL))
    assert f"examples/{Path(script).name}\n:language" in text
    blocks = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    accuracies = []
    for block, options in zip(blocks, ((), ("--uncompressed",)), strict=True):
        printed = _results(_printed(launcher, 2, script, *options))
        shown = _results(block)
        assert printed[3:] == shown[3:], block
        assert printed[:2] == pytest.approx(shown[:2], abs=0.02), block
        assert printed[2] == pytest.approx(shown[2], abs=1.0), block
        accuracies.append(printed[2])
    compressed, plain = accuracies
    assert abs(compressed - plain) < 1


def _results(printed: str) -> list[float]:
    """The losses, the accuracy, and the bytes sent and of the gradients."""
    losses = re.search(r"loss: ([\d.]+) at first, ([\d.]+) at last", printed)
    accuracy = re.search(r"accuracy on new samples: ([\d.]+)%", printed)
    sizes = re.search(r"bytes a step: (\d+) for (\d+)", printed)
    assert losses and accuracy and sizes, printed
    return [float(one) for found in (losses, accuracy, sizes) for one in found.groups()]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_trains_and_prints_its_counters(script: str) -> None:
    launcher, ranks, bits = SCRIPTS[script]
    printed = _printed(launcher, ranks, script)
    sizes = re.findall(r"bytes a step (.*?): (\d+)", printed)
    assert [what for what, _ in sizes] == [
        "without compression",
        "handed to gloo" if launcher == "torchrun" else "handed to Horovod",
        "on the wire",
    ]
    plain, handed, wire = (int(size) for _, size in sizes)
    # Two ranks, or replicas: what an allgather and an allreduce send is just the message. The biases, which
    # are not compressed, are 3% of this small model.
    assert handed == wire < plain / (15 if bits == 1 else 3.7), printed
    feedback = re.search(r"norm of what has not been sent yet: [\d.]+", printed)
    assert bool(feedback) == (bits == 1), printed


def test_the_reference_step_is_that_of_the_package() -> None:
    """Averages and residuals, bit for bit; the third of four steps is dropped."""
    printed = _run("torchrun", 2, "docs/examples/reference_step.py")
    norms = re.findall(
        r"step \d: 7\.2% of the bytes, norm of what has not been sent ([\d.]+)", printed
    )
    assert len(norms) == 4 and norms[1] == norms[2] != norms[3], printed


def test_model_parallel_layers_train_and_print_their_counters() -> None:
    printed = _printed("torchrun", 2, "docs/examples/parallel_quickstart.py")
    assert "exchanges a step: 4" in printed
    sizes = re.findall(r"bytes a step (.*?): (\d+)", printed)
    assert [what for what, _ in sizes] == ["of the tensors", "handed to gloo"]
    assert int(sizes[1][1]) < int(sizes[0][1]) / 3.9, printed


def test_a_model_that_ranks_share_out_trains_and_prints_its_counters() -> None:
    printed = _printed("torchrun", 2, "docs/examples/fsdp_shards_quickstart.py")
    plain, handed, wire = (int(size) for size in re.findall(r"bytes a step .*?: (\d+)", printed))
    assert wire == handed / 2 and handed < plain / 3.8, printed


def _printed(launcher: str, ranks: int, script: str, *options: str) -> str:
    """Returns the output of a script, which trains until the loss is half of what it was."""
    printed = _run(launcher, ranks, script, *options)
    losses = re.search(r"loss: ([\d.]+) at first, ([\d.]+) at last", printed)
    assert losses, printed
    assert float(losses[2]) < 0.5 * float(losses[1]), printed
    return printed


def _run(launcher: str, ranks: int, script: str, *options: str) -> str:
    """Returns the output of a script."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    if launcher == "stock":
        done = subprocess.run(
            [sys.executable, "-m", *STOCK, sys.executable, script, *options],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=jobs.TIMEOUT,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout
    command = jobs.forked(launcher, script, *options)
    return jobs.run(launcher, ranks, command, environment, check=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_table_of_codecs(name: str) -> None:
    row = re.search(rf"\| \[`{name}`\]\(\w+\.md\) \| ([\d.]+) \| (yes|no) \| (yes|no) \|", PAGE)
    assert row
    codec = CODECS[NAMES[name]]
    bits = codec().bits_per_element((4096, 4096))
    assert float(row[1]) == pytest.approx(bits, abs=0.001)
    assert (row[2] == "yes") == codec.feedback.enabled
    assert (row[3] == "yes") == (codec.error == "unbiased")


def test_every_codec_is_in_the_table() -> None:
    assert sorted(NAMES.values()) == sorted(CODECS)
