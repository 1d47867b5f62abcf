"""Data sets: their shapes, their splits, and files that are not what they should be."""

import gzip
import pickle
import struct

import numpy as np
import pytest
from PIL import Image

from benchmarks import data, settings
from benchmarks.data import augment, batches, cifar10, digits
from benchmarks.models import MODELS


def test_digits_are_enlarged_split_evenly_and_standardised():
    found = data.load(MODELS["lenet"])

    assert (len(found.train.labels), len(_labels(found.test))) == (1437, 360)
    assert np.bincount(_labels(found.test)).min() >= 34
    images = found.train.load(np.arange(1437))
    assert images.shape == (1437, 28, 28, 1) and images.dtype == np.float32
    assert abs(images.mean()) < 1e-3 and abs(images.std() - 1) < 1e-3


def test_the_split_never_changes():
    first, second = digits.load(), digits.load()

    assert np.array_equal(_labels(first.test), _labels(second.test))
    assert _labels(first.test)[:8].tolist() == [7, 6, 3, 7, 7, 3, 2, 8]


def test_mnist_of_a_package_is_mnist_split_evenly():
    found = data.load(MODELS["lenet"], "mnist5k")

    counts = [np.bincount(part).tolist() for part in (found.train.labels, _labels(found.test))]
    assert counts == [[400] * 10, [100] * 10]
    assert _labels(found.test)[:8].tolist() == [6, 3, 0, 8, 8, 3, 0, 0]
    images = found.train.load(np.arange(4000))
    assert images.shape == (4000, 28, 28, 1) and images.dtype == np.float32
    assert abs(images.mean()) < 0.01 and abs(images.std() - 1) < 0.01, "the statistics of all MNIST"
    pixels = images * 78.567 + 33.318
    assert np.allclose(pixels, np.rint(pixels), atol=1e-3) and pixels.max() > 254


def test_mnist_has_a_border_and_equal_channels_where_a_model_wants_larger_images():
    small, large = (data.load(MODELS[name], "mnist5k") for name in ("lenet", "resnet20"))

    indices = np.array([7, 3999])
    images = large.train.load(indices)
    assert images.shape == (2, 32, 32, 3)
    for channel in range(3):
        assert np.array_equal(images[:, 2:30, 2:30, channel], small.train.load(indices)[..., 0])
    assert np.all(images[:, [0, 1, 30, 31]] == images[0, 0, 0, 0]), "black"


@pytest.mark.parametrize("border", settings.BORDERS.values())
@pytest.mark.parametrize("size", [(6, 6), (4, 4)])
def test_images_are_cut_out_of_a_border_at_random(border, size):
    images = np.arange(1, 1 + 2 * 6 * 6, dtype=np.float32).reshape(2, 6, 6, 1)

    moved = augment.crop(images, size, 2, border, [0, 1])

    assert np.array_equal(moved, augment.crop(images, size, 2, border, [0, 1]))
    assert not np.array_equal(moved, augment.crop(images, size, 2, border, [0, 2]))
    for before, after in zip(images[..., 0], moved[..., 0], strict=True):
        wide = np.pad(before, 2, mode=border)
        starts = range(10 - size[0] + 1)
        windows = [wide[y : y + size[0], x : x + size[1]] for y in starts for x in starts]
        assert any(np.array_equal(after, window) for window in windows)


def test_half_of_the_images_are_mirrored():
    images = np.random.default_rng(0).standard_normal((400, 3, 4, 2)).astype(np.float32)

    moved = augment.mirror(images, 0.5, [0, 1])

    same = (moved == images).all((1, 2, 3))
    assert 150 < same.sum() < 250
    assert np.array_equal(moved[~same], images[~same][:, :, ::-1])
    assert np.array_equal(moved, augment.mirror(images, 0.5, [0, 1]))
    assert augment.mirror(images, 0.0, [0, 1]) is images


def test_ranks_share_an_epoch_without_overlap():
    shards = [
        np.concatenate(batches.epoch(103, 8, seed=1, epoch=2, rank=rank, size=3))
        for rank in range(3)
    ]

    assert [len(shard) for shard in shards] == [32, 32, 32]
    assert len(np.unique(np.concatenate(shards))) == 96


def test_the_order_depends_on_seed_and_epoch_alone():
    def order(seed, epoch):
        return np.concatenate(batches.epoch(64, 8, seed=seed, epoch=epoch)).tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_test_images_are_shared_completely():
    parts = [np.concatenate(list(batches.share(10, 3, rank=r, size=3))) for r in range(3)]

    assert sorted(np.concatenate(parts)) == list(range(10))


@pytest.mark.parametrize("compress", [False, True])
def test_mnist(tmp_path, compress):
    pixels = np.arange(3 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(3, 28, 28)
    for prefix in ("train", "t10k"):
        _write_idx(tmp_path / f"{prefix}-images-idx3-ubyte", pixels, compress)
        _write_idx(
            tmp_path / f"{prefix}-labels-idx1-ubyte", np.array([7, 0, 9], np.uint8), compress
        )

    found = data.load(MODELS["lenet"], tmp_path)

    assert found.name == "mnist" and _labels(found.test).tolist() == [7, 0, 9]
    back = found.train.load(np.array([2]))[0, :, :, 0] * 78.567 + 33.318
    assert np.allclose(back, pixels[2], atol=1e-3)


def test_cifar10(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3072)).astype(np.uint8)
    batch = {b"data": pixels, b"labels": [3, 1, 4, 1]}
    for name in ("data_batch_1", "data_batch_2", "test_batch"):
        (tmp_path / name).write_bytes(pickle.dumps(batch, protocol=2))

    smaller = data.load(MODELS["cifarnet"], tmp_path)
    assert smaller.image == (32, 32, 3), "to be cut to 24x24"
    found = data.load(MODELS["resnet20"], tmp_path)

    assert len(found.train.labels) == 8 and _labels(found.test).tolist() == [3, 1, 4, 1]
    stored, _ = cifar10.read_batch(tmp_path / "test_batch")
    assert stored[1, 2, 5, 2] == pixels[1].reshape(3, 32, 32)[2, 2, 5]


def test_cifar10_runs_no_code_from_a_pickle(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(b"cos\nsystem\n(S'true'\ntR.")

    with pytest.raises(ValueError, match=r"os\.system is not part of an array"):
        cifar10.read_batch(tmp_path / "data_batch_1")


def test_imagenet_folder(tmp_path):
    for part in ("train", "val"):
        for name, colour in (("n01", (255, 0, 0)), ("n02", (0, 0, 255))):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            Image.new("RGB", (300, 260), colour).save(folder / "a.JPEG")

    found = data.load(MODELS["resnet50"], tmp_path)

    assert found.classes == 2 and _labels(found.test).tolist() == [0, 1]
    images = found.train.load(np.array([0, 1]))
    assert images.shape == (2, 224, 224, 3)
    assert images[0, :, :, 0].min() > 2 and images[1, :, :, 2].min() > 2


def test_text_of_python_comes_in_windows_whose_labels_are_the_next_bytes():
    found = data.load(MODELS["gpt"])

    assert found.name.startswith("python 3.") and found.classes == 256
    tokens = found.train.load(np.array([0, 1]))
    assert tokens.shape == (2, 64) and tokens.dtype == np.int64
    assert np.array_equal(found.train.labels[0, :-1], tokens[0, 1:])
    assert found.train.labels[0, -1] == tokens[1, 0], "windows follow each other"
    count = len(_labels(found.test))
    assert 0.04 < count / (count + len(found.train.labels)) < 0.06


def test_test_text_is_not_trained_on(tmp_path):
    words = [f"{number:07d}" for number in range(20_000)]
    (tmp_path / "a.txt").write_text("\n".join(words))

    found = data.load(MODELS["gpt"], tmp_path / "a.txt")

    assert found.name == "a.txt"
    trained = bytes(found.train.load(np.arange(len(found.train.labels))).astype(np.uint8))
    tested = bytes(found.test.load(np.arange(len(found.test.labels))).astype(np.uint8))
    numbers = [{int(n) for n in part.split() if len(n) == 7} for part in (trained, tested)]
    assert len(numbers[1]) > 500 and not numbers[0] & numbers[1]


def _labels(samples):
    assert samples is not None
    return samples.labels


def _write_idx(file, array, compress):
    raw = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    raw += array.tobytes()
    if compress:
        file.with_name(file.name + ".gz").write_bytes(gzip.compress(raw))
    else:
        file.write_bytes(raw)
