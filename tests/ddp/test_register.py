"""One line that registers a compressor, in one process and on several ranks, by hand and by trainers."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.ddp as hvdc
from hvd_compress import Int8, OneBit
from hvd_compress.ranks.launch import say_alone
from tests.ranks import on_ranks


def test_one_process_has_nothing_to_compress(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(64, 100)
    say_alone.cache_clear()
    with caplog.at_level(logging.INFO, "hvd_compress"):
        compressor = hvdc.register(model, OneBit())
        saved = hvdc.GatheredState(compressor).state_dict()
        hvdc.GatheredState(compressor).load_state_dict(saved)
        hvdc.register(nn.Linear(64, 100), OneBit())
    assert caplog.text.count("there is one rank: nothing is sent") == 1
    assert "without residuals" in caplog.text
    model(torch.randn(2, 64)).sum().backward()
    assert compressor.counters.steps == 0 and saved == {"ranks": []}
    assert hvdc.register(model, compressor) is compressor
    with pytest.raises(
        TypeError, match="compression: expected a compressor of Horovod's frontends"
    ):
        compressor.compress(model.weight)
    with pytest.raises(TypeError, match="no options beside a compressor, got threshold"):
        hvdc.register(model, compressor, threshold=0)


@on_ranks(2, launcher="torchrun")
def test_a_model_is_registered_once() -> None:
    model = DistributedDataParallel(nn.Linear(64, 100))
    compressor = hvdc.register(model, OneBit())
    for again in (Int8(), compressor):
        with pytest.raises(ValueError, match=r"got one that has it: .*call set_codec\(\)"):
            hvdc.register(model, again)
    model(torch.randn(2, 64)).sum().backward()
    assert compressor.counters.steps == 1


@on_ranks(2, launcher="torchrun")
def test_the_first_encoded_step_is_logged_once() -> None:
    told: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("hvd_compress")
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    model = DistributedDataParallel(nn.Linear(64, 100))
    compressor = hvdc.register(model, OneBit(), warmup_steps=1)
    for _ in range(4):
        model(torch.randn(2, 64)).sum().backward()
    logger.removeHandler(handler)
    logger.setLevel(before)
    assert compressor.counters.steps == 4
    told = [one for one in told if one.startswith("first encoded step: ")]
    if dist.get_rank():
        assert told == []
        return
    (line,) = told
    assert "1 gradient (6,400 elements) as OneBit" in line and "through allgather" in line
    assert "1 gradient (100 elements) as NoCompression()" in line
    payload = OneBit().payload_bytes((100, 64)) + 4 * 100
    assert line.endswith(" in place of 26,000")
    sent = int(line.split("; ")[1].split()[0].replace(",", ""))
    assert sent == pytest.approx(payload, rel=0.1)


@on_ranks(2, launcher="torchrun")
def test_wrapped_models_get_the_hook() -> None:
    from lightning import Fabric

    def steps(model: nn.Module, outer: nn.Module, codec: Any = OneBit()) -> int:  # noqa: B008
        compressor = hvdc.register(outer, codec)
        assert repr(compressor).endswith(": 0 steps, nothing exchanged>")
        model(torch.randn(2, 64)).sum().backward()
        assert " 1 step, " in repr(compressor) and "% of the bytes>" in repr(compressor)
        return compressor.counters.steps

    for codec in (OneBit(), "auto", "int8"):
        model = DistributedDataParallel(nn.Linear(64, 100))
        assert steps(model, model, codec) == 1
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()  # In the process group that there is.
    model = fabric.setup(nn.Linear(64, 100))
    assert steps(model, model) == 1
    model = DistributedDataParallel(nn.Linear(64, 100))
    assert steps(model, torch.compile(model, backend="eager")) == 1
    with pytest.raises(TypeError, match="expected a DistributedDataParallel model among 2 ranks"):
        hvdc.register(nn.Linear(64, 100), OneBit())
    composed = replicate(nn.Linear(64, 100))
    with pytest.raises(
        TypeError, match=r"got DDPLinear: call model.register_comm_hook\(Compressor"
    ):
        hvdc.register(composed, OneBit())
    compressor = hvdc.Compressor(composed, OneBit(), threshold=0)
    composed.register_comm_hook(compressor, hvdc.hook)
    composed(torch.ones(8, 64)).sum().backward()
    assert compressor.counters.steps == 1 and compressor.counters.encoded_elements == 6500


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 100)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layer(inputs), labels)}


def _fit(folder: str, steps: int, resume: str | None = None, argument: str | None = None) -> Any:
    from transformers import Trainer, TrainingArguments

    from hvd_compress.transformers import CompressGradients

    torch.manual_seed(0)
    data = [{"inputs": torch.randn(64), "labels": torch.tensor(i % 100)} for i in range(128)]
    trainer = Trainer(
        model=_Network(),
        args=TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=steps,
            per_device_train_batch_size=8,
            lr_scheduler_type="constant",
            optim="sgd",
            save_strategy="steps",
            save_steps=2,
            resume_from_checkpoint=argument,
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=data,
    )
    compress = CompressGradients(trainer, OneBit())
    trainer.add_callback(compress)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model, compress.compressor


@on_ranks(2, launcher="torchrun", alone=True)
def test_the_trainer_goes_on_from_its_checkpoint_bit_for_bit() -> None:
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, 0)
        whole, half, other = (f"{folders[0]}/{name}" for name in ("whole", "half", "other"))
        model, compressor = _fit(whole, 4)
        _fit(half, 2)
        path = f"{half}/checkpoint-2"
        for folder, argument in ((half, None), (f"{folders[0]}/elsewhere", path)):
            resumed, again = _fit(folder, 4, path, argument)
            assert compressor.counters.steps == 4 and again.counters.steps == 2
            assert again.residual_norm() == compressor.residual_norm() > 0
            assert torch.equal(resumed.layer.weight, model.layer.weight)
        # Not in the folder given to train() alone; then not there at all.
        moved, without = _fit(other, 4, path)
        assert without.counters.steps == 2 and moved is not None
        assert without.residual_norm() != compressor.residual_norm()
        dist.barrier()


@on_ranks(2, launcher="torchrun", alone=True)
def test_a_trial_of_a_search_keeps_its_residuals_in_its_own_folder() -> None:
    """As Transformers trains a trial of Optuna, which need not be installed for that."""
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import HPSearchBackend

    from hvd_compress.transformers import CompressGradients

    data = [{"inputs": torch.randn(64), "labels": torch.tensor(i)} for i in range(100)]
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, 0)
        arguments = TrainingArguments(
            output_dir=folders[0], use_cpu=True, max_steps=4, save_steps=2, report_to="none"
        )
        searching = Trainer(model_init=_Network, args=arguments, train_dataset=data)
        searching.add_callback(CompressGradients(searching, OneBit()))
        searching.hp_search_backend, searching.hp_name = HPSearchBackend.OPTUNA, None
        searching.hp_space = lambda trial: trial.params
        with mock.patch(
            "transformers.integrations.integration_utils.hp_params", vars
        ):  # It wants Optuna's class.
            for number in range(2):
                searching.train(trial=SimpleNamespace(number=number, params={}))
        saved = sorted(
            str(one.relative_to(folders[0])) for one in Path(folders[0]).rglob("compressor.pt")
        )
        steps = [
            f"run-{number}/checkpoint-{step}/compressor.pt" for number in (0, 1) for step in (2, 4)
        ]
        assert saved == steps
        dist.barrier()


def test_a_trainer_of_one_process_trains(tmp_path: Path) -> None:
    _, compressor = _fit(str(tmp_path), 2)
    assert compressor.counters.steps == 0
    assert not (tmp_path / "checkpoint-2" / "compressor.pt").exists()


def test_the_callback_wants_the_trainer() -> None:
    from hvd_compress.transformers import CompressGradients

    with pytest.raises(TypeError, match=r"add_callback\(CompressGradients\(trainer, Int8\(\)\)\)"):
        CompressGradients(Int8(), Int8())
