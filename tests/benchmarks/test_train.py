"""Real training on two ranks, a few steps each."""

import json
import re
import shutil
import subprocess
import sys
from functools import cache, partial
from types import SimpleNamespace

import pytest

from benchmarks import launch, main_job, results, trainers

STEPS, EVERY, SYNC_EVERY = 40, 5, 10
OF_FRAMEWORK = {
    "fsdp": ["--shards", "2"],
    "diloco": ["--option", f"sync_every={SYNC_EVERY}"],
}
"""Options beside those of all."""

PARTS = {"fsdp": 2, "diloco": SYNC_EVERY}
"""A rank exchanges the gradients of its shards, or one difference in so many steps."""


def _train(out, *more, ranks=2):
    common = ["--model", "lenet", "--steps", "6", "--batch-size", "16", "--json", str(out)]
    launch.horovodrun(ranks, "benchmarks.train", [*common, *more])
    return results.read(out)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Trains for :data:`STEPS` steps with several codecs, once for each framework."""

    @cache
    def train(framework):
        chosen = ["none", "onebit", "ternary:exclude=fc2.*", "local"]
        recipe = ["--steps", str(STEPS), "--curve-points", str(STEPS // EVERY)]
        recipe += ["--lr", "0.05", "--framework", framework]
        recipe += OF_FRAMEWORK.get(framework, [])
        out = tmp_path_factory.mktemp(framework) / "train.json"
        ranks = 4 if framework == "fsdp" else 2
        return _train(out, *recipe, "--compression", *chosen, ranks=ranks)

    return train


@pytest.mark.parametrize("framework", trainers.FRAMEWORKS)
def test_ranks_train_with_several_codecs(several, framework):
    outcome = several(framework)

    assert outcome.configuration["shards"] == outcome.ranks / 2
    assert outcome.configuration["data"] == "digits"
    assert outcome.configuration["framework"] == framework
    assert {"torch", "keras"} <= outcome.versions.keys() and outcome.machine["cpu"]
    none, onebit, ternary, local = outcome.runs
    for run in (none, onebit, ternary):
        assert run.parameters_identical and run.steps == STEPS
        assert [point.step for point in run.curve] == list(range(EVERY, STEPS + 1, EVERY))
        assert run.curve[-1].loss < 0.9 * run.curve[0].loss
        part = 4 * 61_706 / PARTS.get(framework, 1)
        assert run.uncompressed_bytes_per_step == pytest.approx(part)
        assert 0 <= run.test_accuracy <= 1
        assert run.test_top5 is None, "of ten digits"
        assert run.train_seconds > STEPS * run.step_seconds.p10
        assert run.curve[-1].wire_bytes == pytest.approx(STEPS * run.wire_bytes_per_step)
        assert 0 < run.curve[0].seconds < run.curve[-1].seconds <= run.train_seconds
    assert none.curve[0].loss == pytest.approx(onebit.curve[0].loss, rel=0.05), "paired seeds"
    assert none.compression_ratio == pytest.approx(1, rel=0.01)
    assert onebit.compression_ratio > 15
    assert 4 < ternary.compression_ratio < 5, "a sixth of the parameters, fc2, goes as it is"
    assert onebit.residual_norm > 0 == none.residual_norm
    assert onebit.encode_seconds_per_step > 0 and onebit.decode_seconds_per_step > 0
    # DiLoCo's ranks average once, at the end.
    once = 4 * 61_706 / STEPS if framework == "diloco" else 0
    assert local.parameters_identical is None
    assert local.message_bytes_per_step == pytest.approx(once)
    assert local.curve[0].loss == pytest.approx(none.curve[0].loss, rel=0.05)
    assert local.curve[-1].loss != none.curve[-1].loss


@pytest.mark.parametrize(
    ("framework", "dense"),
    # In TensorFlow, the embedding's gradient is sparse, and Horovod gathers its rows.
    [("torch", 470_784), ("keras", 470_784 - 256 * 128)],
)
def test_a_transformer_learns_text_with_adamw(tmp_path, framework, dense):
    recipe = ["--model", "gpt", "--optimizer", "adamw", "--lr", "0.003", "--test-at-end"]
    chosen = ["--compression", "none", "int8", "--framework", framework]
    outcome = _train(tmp_path / "out.json", *recipe, *chosen, "--steps", "20", "--quiet")

    none, int8 = outcome.runs
    for run in (none, int8):
        assert run.parameters_identical and run.uncompressed_bytes_per_step == 4 * dense
        assert run.curve[-1].loss < 0.7 * run.curve[0].loss
        assert 3 < run.test_bits < 6 and 0.1 < run.test_accuracy < 0.5
        assert run.test_accuracy < run.test_top5 < 1
    assert int8.test_bits == pytest.approx(none.test_bits, rel=0.05)
    assert int8.compression_ratio > 3.8


def test_powersgd_beside_stock_ddp(tmp_path):
    chosen = ["none", "powersgd:rank=2,warmup_steps=20", "stock", "--framework", "ddp"]
    recipe = ["--steps", "60", "--lr", "0.05", "--option", "threshold=1024", "--quiet"]
    outcome = _train(tmp_path / "out.json", *recipe, "--compression", *chosen)

    none, powersgd, stock = outcome.runs
    _assert_same_training(stock, none)
    assert none.parameters_identical and powersgd.parameters_identical
    first, last = powersgd.curve[0].wire_bytes, powersgd.curve[-1].wire_bytes
    assert last < len(powersgd.curve) * first / 2, "the warm-up's steps sent more than the others"
    assert powersgd.uncompressed_bytes_per_step == 4 * 61_706
    assert powersgd.curve[-1].loss < 0.9 * powersgd.curve[0].loss
    assert 2.5 < powersgd.compression_ratio < 3, "a third of the steps are uncompressed"
    assert powersgd.residual_norm > 0


def test_fsdp_beside_its_own_exchange_in_bfloat16(tmp_path):
    chosen = ["--compression", "stock", "none", "int8", "--framework", "fsdp", "--autocast", "bf16"]
    recipe = ["--model", "gpt", "--optimizer", "adamw", "--lr", "0.003", "--test-at-end"]
    stock, none, int8 = _train(tmp_path / "out.json", *recipe, *chosen, "--quiet").runs

    _assert_same_training(none, stock)
    assert int8.curve[-1].loss == pytest.approx(stock.curve[-1].loss, rel=0.02)
    assert int8.compression_ratio > 3.8 and stock.test_bits < 8


def test_fsdp_with_encoded_exchanges_within_a_replica(tmp_path):
    """One replica, so that its ranks send each other nothing else."""
    chosen = ["--framework", "fsdp", "--shards", "2", "--test-at-end", "--steps", "20"]
    chosen += ["--compression", "none", "none:reduce_scatter=int8"]
    chosen += ["none:reduce_scatter=int8,all_gather=int8"]
    none, int8, both = _train(tmp_path / "out.json", *chosen, "--quiet").runs

    assert none.wire_bytes_per_step == 0
    assert int8.curve[-1].loss == pytest.approx(none.curve[-1].loss, rel=0.02)
    assert 3.8 < int8.compression_ratio < 4 and int8.wire_bytes_per_step > 30_000
    assert both.curve[-1].loss == pytest.approx(none.curve[-1].loss, rel=0.03)
    # A rank has all gradients, and half of the parameters.
    assert both.uncompressed_bytes_per_step == pytest.approx(1.5 * int8.uncompressed_bytes_per_step)
    assert int8.wire_bytes_per_step < both.wire_bytes_per_step < 2.3 * int8.wire_bytes_per_step


def test_local_steps_of_momentum_are_those_of_ddp_where_every_step_is_averaged(tmp_path):
    """Both are linear in the gradients: an average of parameters is one of gradients."""
    every = "none:sync_every=1,outer_lr=1.0,outer_momentum=0"
    streaming = "int8:sync_every=8,fragments=2,delay=2"
    recipe = ["--steps", "20", "--lr", "0.05", "--framework", "diloco", "--quiet"]
    outcome = _train(tmp_path / "out.json", *recipe, "--compression", "stock", every, streaming)

    stock, one, other = outcome.runs
    _assert_same_training(one, stock)
    assert other.parameters_identical
    # Fragments in steps 8, 12 and 16, and 20 with everything: four halves, and the end.
    assert other.uncompressed_bytes_per_step == pytest.approx(4 * 61_706 * 3 / 20, rel=0.2)


def _assert_same_training(run, other):
    losses, wanted = ([point.loss for point in one.curve] for one in (run, other))
    assert losses == pytest.approx(wanted, rel=1e-3) and run.parameters_identical
    assert run.test_accuracy == pytest.approx(other.test_accuracy, abs=0.01)
    assert run.message_bytes_per_step == pytest.approx(other.message_bytes_per_step, rel=0.01)


@pytest.mark.parametrize(
    ("optimizer", "lr", "chosen"),
    [
        ("onebit-adam", "0.003", ["none", "onebit:warmup_steps=10"]),
        ("muon", "0.01", ["none", "int8", "--framework", "ddp"]),
    ],
)
def test_a_transformer_learns_text_with_another_optimizer(tmp_path, optimizer, lr, chosen):
    recipe = ["--model", "gpt", "--optimizer", optimizer, "--lr", lr, "--test-at-end"]
    recipe += ["--option", "threshold=1024", "--steps", "20", "--quiet"]
    outcome = _train(tmp_path / "out.json", *recipe, "--compression", *chosen)

    none, other = outcome.runs
    for run in (none, other):
        assert run.parameters_identical and run.uncompressed_bytes_per_step == 4 * 470_784
        assert 3 < run.test_bits < 6
    assert other.test_bits == pytest.approx(none.test_bits, rel=0.05)
    if optimizer == "onebit-adam":
        assert 1.9 < other.compression_ratio < 2  # Half of the steps are uncompressed.


def test_keras_trains_as_a_tape_does(several):
    """The same model, batches, learning rates and codecs give the same losses and residuals."""
    for ours, tape in zip(several("keras").runs, several("tensorflow").runs, strict=True):
        losses, wanted = ([point.loss for point in run.curve] for run in (ours, tape))
        assert losses == pytest.approx(wanted, rel=1e-3), ours.compression
        assert ours.residual_norm == pytest.approx(tape.residual_norm, rel=1e-2)
        assert ours.message_bytes_per_step == tape.message_bytes_per_step


@pytest.fixture(scope="module")
def resumable(tmp_path_factory):
    """A file with the runs of a first start, and what that start printed."""
    out = tmp_path_factory.mktemp("resumable") / "train.json"
    text = out.with_suffix(".txt")
    with text.open("w") as file, pytest.MonkeyPatch.context() as patch:
        recording = SimpleNamespace(run=partial(subprocess.run, stdout=file))
        patch.setattr(launch, "subprocess", recording)
        _train(out, "--compression", "local", "none")
    return out, text.read_text()


def test_ranks_train_alone_beside_others_that_do_not(resumable):
    local, none = results.read(resumable[0]).runs
    assert local.parameters_identical is None and none.parameters_identical is True
    assert local.message_bytes_per_step == 0 < none.message_bytes_per_step
    assert local.compression_ratio is None and local.step_seconds.median > 0
    first, last = ([run.curve[at].loss for run in (local, none)] for at in (0, -1))
    assert first[0] == first[1] and last[0] != last[1]
    line = next(line for line in resumable[1].splitlines() if "<stdout>:local" in line)
    assert line.endswith("  -"), "whether ranks agree does not apply"


def test_a_second_start_makes_only_what_is_missing(resumable, tmp_path):
    out = shutil.copy(resumable[0], tmp_path / "train.json")
    first = results.read(out)

    second = _train(out, "--compression", "none", "fp16", "--seeds", "2", "--resume", "--quiet")

    assert second.runs[:2] == first.runs, "not even their time was measured again"
    made = [(run.compression, run.seed) for run in second.runs]
    assert sorted(made) == [("fp16", 0), ("fp16", 1), ("local", 0), ("none", 0), ("none", 1)]


def _check_errors(capfd, *messages):
    """Each rank prints its message in one line, but for ranks that the launcher stopped before they did,
    since another had ended."""
    printed = capfd.readouterr().err
    found = re.findall(r"^\[(\d)\]<stderr>:(error: .*)$", printed, re.MULTILINE)
    assert found and len(dict(found)) == len(found), printed
    for rank, line in found:
        assert re.fullmatch(messages[int(rank)], line)
    assert "<stderr>:Traceback" not in printed


def test_results_of_another_recipe_are_not_mixed(resumable, tmp_path, capfd):
    out = shutil.copy(resumable[0], tmp_path / "train.json")

    with pytest.raises(launch.RankError):
        _train(out, "--compression", "none", "--lr", "0.5", "--resume", "--quiet")

    own = "error: .*: expected configuration .*, got .*"
    _check_errors(capfd, own, "error: rank 0 cannot start; its message says why")
    assert results.read(out).runs == results.read(resumable[0]).runs


def test_the_main_job_fails_where_a_rank_fails(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(main_job, "COMPRESSIONS", ["no such codec"])

    assert main_job.main(["--out", str(tmp_path)]) == 1

    assert "expected benchmarks.train to succeed on 2 ranks" in capfd.readouterr().err
    assert not (tmp_path / "loss.png").exists()


def test_one_process_exchanges_nothing(tmp_path):
    out = tmp_path / "one.json"
    command = ["--model", "lenet", "--compression", "onebit", "--steps", "2", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.train", *command, "--explain"],
        check=True,
        cwd=launch.ROOT,
        capture_output=True,
        text=True,
    )

    assert "--explain: nothing to explain" in done.stderr
    run = json.loads(out.read_text())["runs"][0]
    assert run["message_bytes_per_step"] == 0 and run["compression_ratio"] is None
    assert run["parameters_identical"] is True
