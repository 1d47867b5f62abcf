"""Compressors in the hands of trainers: made early, saved by the first rank, registered by a callback."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import hvd_compress.ddp as hvdc
from hvd_compress import Int8, OneBit
from hvd_compress.ddp import gathered
from hvd_compress.ddp.gathered import state_unless_interrupted
from hvd_compress.process_group.collectives import Collectives
from tests import jobs
from tests.ddp.probes import Probe, exchange, gradients_of
from tests.ranks import on_ranks

SHAPES = {"a": (64, 33), "b": (1000,)}


@pytest.mark.parametrize("name", ("onebit", "auto"))
def test_a_compressor_joins_ranks_that_come_later(name: str, tmp_path: Path) -> None:
    model = Probe(SHAPES)
    compressor = (
        hvdc.Auto(model, threshold=0)
        if name == "auto"
        else hvdc.Compressor(model, name, threshold=0)
    )
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store")), rank=0, world_size=1
    )
    try:
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(compressor, hvdc.hook)
        gradients = {name: torch.randn(shape) for name, shape in SHAPES.items()}
        exchange(ddp, gradients)
        assert compressor.counters.steps == 1
        assert set(compressor.routes()) == set(SHAPES)
        if name == "onebit":
            twin = hvdc.Compressor(model, OneBit(), threshold=0)
            again = DistributedDataParallel(model)
            again.register_comm_hook(twin, hvdc.hook)
            first = gradients_of(ddp)
            second = exchange(again, gradients)
            assert all(torch.equal(first[one], second[one]) for one in SHAPES)
            assert not torch.equal(first["a"], gradients["a"])
    finally:
        dist.destroy_process_group()


@on_ranks(2, launcher="torchrun")
def test_one_file_holds_the_states_of_all_ranks() -> None:
    torch.manual_seed(dist.get_rank())

    def make() -> tuple[DistributedDataParallel, hvdc.Compressor]:
        model = DistributedDataParallel(Probe(SHAPES))
        compressor = hvdc.Compressor(model, OneBit(), threshold=0)
        model.register_comm_hook(compressor, hvdc.hook)
        return model, compressor

    def gradients() -> dict[str, torch.Tensor]:
        return {name: torch.randn(shape) for name, shape in SHAPES.items()}

    model, compressor = make()
    exchange(model, gradients())
    sent: list[Any] = [hvdc.GatheredState(compressor).state_dict()]
    alone = dist.get_rank() == 1
    assert (sent == [{}]) == alone
    with pytest.raises(ValueError if alone else hvdc.ExchangeError, match="the first rank's state"):
        hvdc.GatheredState(make()[1]).load_state_dict(sent[0])
    dist.broadcast_object_list(sent, 0)
    other_model, other = make()
    hvdc.GatheredState(other).load_state_dict(sent[0])
    assert other.residual_norm() == compressor.residual_norm() > 0
    given = gradients()
    first, second = exchange(model, given), exchange(other_model, given)
    assert all(torch.equal(first[name], second[name]) for name in SHAPES)


def _fit(
    folder: str,
    epochs: int,
    checkpoint: str | None = None,
    drop: Callable[..., None] = lambda *_: None,
    compress: Any = None,
    network: Any = None,
    more: Sequence[Any] = (),
    **options: Any,
) -> Any:
    import lightning.pytorch as lightning

    from hvd_compress.lightning import CompressGradients

    class Network(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 100)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            drop(self, optimizer, compress)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(64, 64), torch.randint(100, (64,)))
    network, compress = network or Network(), compress or CompressGradients(OneBit())
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[compress, *more],
        enable_model_summary=False,
        enable_progress_bar=False,
        **{"logger": False, **options},
    )
    trainer.fit(network, DataLoader(samples, batch_size=8), ckpt_path=checkpoint)
    return network, compress.compressor, trainer.checkpoint_callback.best_model_path


@on_ranks(2, launcher="torchrun", alone=True)
def test_lightning_goes_on_from_its_checkpoint_bit_for_bit() -> None:
    from lightning.pytorch.loggers import CSVLogger

    from hvd_compress.lightning import CompressGradients

    options: dict[str, Any] = {"strategy": "ddp", "devices": 2}
    # Each rank has a folder of its own, of which the first one's is used.
    with tempfile.TemporaryDirectory() as folder:
        logger = CSVLogger(folder)
        told = {"logger": logger, "log_every_n_steps": 2}
        compress = CompressGradients(OneBit(), log=True)
        network, compressor, _ = _fit(f"{folder}/whole", 2, compress=compress, **told, **options)
        if dist.get_rank() == 0:
            lines = Path(logger.log_dir, "metrics.csv").read_text().splitlines()
            rows = [
                dict(zip(lines[0].split(","), one.split(","), strict=True)) for one in lines[1:]
            ]
            assert [row["step"] for row in rows] == ["1", "3", "5", "7"]
            assert all(0 < float(row["compression/ratio"]) < 1 / 15 for row in rows)
            last = float(rows[-1]["compression/residual_norm"])
            assert last == pytest.approx(compressor.residual_norm(), rel=1e-6)
        _, _, path = _fit(f"{folder}/half", 1, **options)
        paths = [path]
        dist.broadcast_object_list(paths, 0)
        resumed, other, _ = _fit(f"{folder}/rest", 2, paths[0], **options)
        assert compressor.counters.steps == 8 and other.counters.steps == 4
        assert compressor.counters.message_bytes < compressor.counters.uncompressed_bytes / 15
        assert other.residual_norm() == compressor.residual_norm() > 0
        assert torch.equal(resumed.layer.weight, network.layer.weight)
        dist.barrier()


@on_ranks(2, launcher="torchrun", alone=True)
def test_a_second_lightning_trainer_has_its_own_scaler() -> None:
    from lightning.pytorch.plugins import MixedPrecision

    from hvd_compress.lightning import CompressGradients

    compress = CompressGradients(OneBit(), threshold=0)
    with tempfile.TemporaryDirectory() as folder:
        network, _, _ = _fit(folder, 1, strategy="ddp", devices=2, compress=compress)
        compressor = compress.compressor
        assert compressor is not None
        for factor in (256.0, 16.0, None):
            plugins: list[Any] = []
            if factor is not None:
                scaler = torch.amp.GradScaler("cpu", init_scale=factor)
                plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
            more = {"strategy": "ddp", "devices": 2, "plugins": plugins}
            _fit(folder, 1, compress=compress, network=network, **more)
            assert compress.compressor is compressor
            scales = {slot.residual_scale for slot in compressor._slots}
            assert scales == {factor or 1.0}
        dist.barrier()


@on_ranks(2, launcher="torchrun", alone=True)
def test_another_lightning_module_gets_another_compressor() -> None:
    from hvd_compress.lightning import CompressGradients

    compress, made = CompressGradients(OneBit()), []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):  # As in folds of a validation.
            network, compressor, _ = _fit(folder, 1, strategy="ddp", devices=2, compress=compress)
            made.append((compressor.residual_norm(), network.layer.weight))
        dist.barrier()
    assert made[0][0] == made[1][0] > 0 and torch.equal(made[0][1], made[1][1])


@on_ranks(2, launcher="torchrun", alone=True)
def test_a_step_that_a_lightning_module_drops() -> None:
    from hvd_compress.lightning import CompressGradients

    norms: dict[int, list[float]] = {}

    def drop(network: Any, optimizer: torch.optim.Optimizer, compress: CompressGradients) -> None:
        assert compress.compressor is not None
        if network.global_step % 2:
            assert compress.compressor.residual_norm() != norms[network.global_step - 1][0]
            optimizer.zero_grad()
            compress.drop_step()
        norms[network.global_step] = [compress.compressor.residual_norm()]

    with tempfile.TemporaryDirectory() as folder:
        _fit(folder, 1, strategy="ddp", devices=2, drop=drop)
        dist.barrier()
    assert len(norms) == 4 and norms[0] == norms[1] != norms[2] == norms[3]


@on_ranks(2, launcher="torchrun", alone=True)
def test_lightning_saves_a_model_whose_backward_pass_was_interrupted() -> None:
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    from hvd_compress.lightning import CompressGradients

    class Interrupted(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            # The last layer fills a bucket: it is sent before the first layer has a gradient.
            self.first, self.last = nn.Linear(64, 600), nn.Linear(600, 600)
            self.fails = True
            self.first.weight.register_hook(self.fail)

        def fail(self, _: torch.Tensor) -> None:
            if self.fails and self.global_step:
                assert compress.compressor is not None and compress.compressor._ranks.busy
                raise ArithmeticError("the backward pass is interrupted")

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.last(self.first(batch[0])), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, 0)
        options: dict[str, Any] = {"devices": 2, "strategy": _small_buckets()}
        compress = CompressGradients(OneBit())
        emergency = OnExceptionCheckpoint(folders[0])
        with pytest.raises(ArithmeticError, match="the backward pass is interrupted"):
            _fit(folder, 1, compress=compress, network=Interrupted(), more=[emergency], **options)
        path = Path(emergency.ckpt_path)
        assert path.exists()
        with _warnings_of("hvd_compress.ddp.gathered") as said:
            network = Interrupted()
            network.fails = False
            options["strategy"] = _small_buckets()
            _, compressor, _ = _fit(folder, 1, str(path), network=network, **options)
        assert compressor.counters.steps == 3  # Of four, one of which was before the interruption.
        assert len(said) == 1 and "training starts without residuals" in said[0]
        dist.barrier()


def _small_buckets() -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    return DDPStrategy(bucket_cap_mb=1)


@contextlib.contextmanager
def _warnings_of(name: str) -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


@on_ranks(2, launcher="torchrun", alone=True)
def test_a_rank_that_was_interrupted_alone() -> None:
    """The others save without residuals: told before they gather or while they do, or after a time."""
    rank = dist.get_rank()
    ddp = DistributedDataParallel(Probe(SHAPES))
    compressor = hvdc.Compressor(ddp, OneBit(), threshold=0)
    ddp.register_comm_hook(compressor, hvdc.hook)
    exchange(ddp, {name: torch.randn(shape) for name, shape in SHAPES.items()})
    whole = state_unless_interrupted(compressor, None)
    assert len(whole.get("ranks", [])) == (0 if rank else 2)

    def join() -> None:  # By the interrupted rank, in place of the gathering that was given up.
        if rank == 1:
            time.sleep(1)
            Collectives(None).all_gather(torch.zeros(1, dtype=torch.int64))[1].wait()
        dist.barrier()

    with _warnings_of("hvd_compress.ddp.gathered") as said:
        if rank == 1:
            compressor._ranks.step = object()  # type: ignore[assignment]
        for late in (0, 1):
            if rank == late:
                time.sleep(1)
            begun = time.monotonic()
            assert state_unless_interrupted(compressor, None) == {"ranks": []}
            assert time.monotonic() - begun < 10
            if late:
                join()
            else:
                dist.barrier()
        compressor._ranks.step = None
        if rank == 0:
            assert state_unless_interrupted(compressor, 0.2) == {"ranks": []}
        else:
            next(gathered._numbers)
        join()
    assert len(said) == (2 if rank else 3)
    assert all("saved without residuals" in text for text in said)


@on_ranks(2, launcher="torchrun", alone=True)
def test_accelerate_goes_on_from_its_checkpoint_bit_for_bit() -> None:
    from accelerate import Accelerator

    def make() -> tuple[Any, ...]:
        torch.manual_seed(0)
        accelerator, model = Accelerator(cpu=True), nn.Linear(64, 100)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, sgd)
        compressor = hvdc.Compressor(model, OneBit())
        model.register_comm_hook(compressor, hvdc.hook)
        accelerator.register_for_checkpointing(hvdc.GatheredState(compressor))
        return accelerator, model, optimizer, compressor

    def train(steps: range, accelerator: Any, model: nn.Module, optimizer: Any, _: Any) -> None:
        for step in steps:
            torch.manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.randn(8, 64)), torch.randint(100, (8,)))
            accelerator.backward(loss)
            optimizer.step()

    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, 0)
        whole, resumed = make(), make()
        train(range(4), *whole)
        whole[0].save_state(folders[0])
        dist.barrier()
        resumed[0].load_state(folders[0])
        train(range(4, 7), *whole)
        train(range(4, 7), *resumed)
        assert resumed[3].residual_norm() == whole[3].residual_norm() > 0
        assert torch.equal(resumed[1].module.weight, whole[1].module.weight)
        dist.barrier()


def test_lightning_on_one_device_has_nothing_to_send(tmp_path: Path) -> None:
    _, compressor, _ = _fit(str(tmp_path), 1, devices=1)
    assert compressor is None


def test_the_callback_wants_a_codec() -> None:
    from hvd_compress.lightning import CompressGradients

    with pytest.raises(ValueError, match=r"CompressGradients\.codec: expected one of 'onebit', "):
        CompressGradients("one bit")
    with pytest.raises(TypeError, match=r"codec: expected .* got the class Int8: write Int8\(\)"):
        CompressGradients(Int8)  # type: ignore[arg-type]
    for codec, wrong in ((Int8(), "treshold"), ("auto", "exchange")):
        with pytest.raises(TypeError, match=f"CompressGradients: expected .* keyword '{wrong}'"):
            CompressGradients(codec, **{wrong: 0})


@on_ranks(2, launcher="torchrun", alone=True)
def test_a_state_that_one_rank_alone_gathers() -> None:
    """The other one ends; PyTorch's error says nothing of what was waited for."""
    ddp = DistributedDataParallel(Probe(SHAPES))
    gathered = hvdc.GatheredState(hvdc.Compressor(ddp, OneBit()))
    if dist.get_rank() == 1:
        raise jobs.Leave
    with pytest.raises(RuntimeError) as caught:
        gathered.state_dict()
    (note,) = caught.value.__notes__
    assert "call it on every rank, and leave the first rank's `if` around torch.save" in note


@on_ranks(2, launcher="torchrun", alone=True)
def test_a_file_of_residuals_that_one_rank_alone_sees() -> None:
    """All ranks begin without residuals, those of another train() before it included."""
    from transformers import Trainer, TrainingArguments

    from hvd_compress.transformers import CompressGradients

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(64, 100)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.layer(x), labels)}

    rank, folders = dist.get_rank(), [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    data = [{"x": torch.randn(64), "labels": rank} for _ in range(32)]
    own = f"{folders[0]}/{rank}"  # As on hosts without a file system in common.
    arguments = TrainingArguments(
        own, use_cpu=True, max_steps=2, save_steps=1, report_to=[], disable_tqdm=True,
        per_device_train_batch_size=2, save_on_each_node=True, logging_steps=1,
    )  # fmt: skip
    trainer = Trainer(Network(), arguments, train_dataset=data)
    compress = CompressGradients(trainer, OneBit(), threshold=0, log=True)
    trainer.add_callback(compress)
    trainer.train()
    told = [one for one in trainer.state.log_history if "compression/ratio" in one]
    assert [one["step"] for one in told] == [1, 2]
    assert all(0 < one["compression/bytes_per_step"] < 4 * 64 * 100 / 15 for one in told)
    assert compress.compressor is not None and compress.compressor.residual_norm() > 0
    norms: list[float] = []
    compress.on_step_begin = lambda *_, **__: norms.append(compress.compressor.residual_norm())
    dist.barrier()
    if rank == 1:
        others = f"{folders[0]}/0/checkpoint-1"
        without = shutil.ignore_patterns("compressor.pt")
        shutil.copytree(others, f"{own}/checkpoint-1", ignore=without, dirs_exist_ok=True)
    trainer.train(resume_from_checkpoint=f"{own}/checkpoint-1")
    assert norms == [0.0]
    dist.barrier()
    shutil.rmtree(folders[0], ignore_errors=True)
