"""Bases and products of low-rank factors: the bits of single elements' operations, in a known order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_compress.engine.low_rank import orthonormal, product
from hvd_compress.engine.sums import ordered_sum
from hvd_compress.exchanges import low_rank
from tests.codecs.cases import normal

SHAPES = ((1, 1), (5, 4), (64, 1), (65, 3), (1000, 8), (3000, 4))


def _sum(x: np.ndarray) -> np.float64:
    """Halves are added until one number is left."""
    x = np.append(x, np.zeros((1 << (len(x) - 1).bit_length()) - len(x)))
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


def _orthonormal(matrix: np.ndarray) -> np.ndarray:
    columns = list(matrix.astype(np.float64).T)
    for number, column in enumerate(columns):
        column /= np.sqrt(_sum(column * column))
        for other in columns[number + 1 :]:
            other -= _sum(column * other) * column
    return np.stack(columns, 1).astype(np.float32)


def _drawn(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    drawn = [normal(shape, seed=number) for number, shape in enumerate(shapes)]
    return [torch.from_numpy(one).view(shape) for one, shape in zip(drawn, shapes, strict=True)]


def test_bases_have_the_bits_of_numpys_elements_together_and_alone() -> None:
    matrices = _drawn(*SHAPES)
    together = orthonormal(matrices)
    for matrix, found in zip(matrices, together, strict=True):
        assert found.is_contiguous() and found.dtype == torch.float32
        np.testing.assert_array_equal(found, _orthonormal(matrix.numpy()))
        assert torch.equal(found, orthonormal([matrix])[0])
        rank = matrix.shape[1]
        torch.testing.assert_close(found.T @ found, torch.eye(rank), rtol=0, atol=1e-5)
        projected = found @ (found.T @ matrix)
        torch.testing.assert_close(projected, matrix, rtol=0, atol=1e-4)


def test_sums_have_the_bits_of_halves() -> None:
    drawn = normal((3 * 4096,)).astype(np.float64).reshape(3, -1) / 3
    found = ordered_sum(torch.from_numpy(drawn))
    assert found.shape == (3, 1) and found[:, 0].tolist() == [_sum(row) for row in drawn]


@pytest.mark.parametrize("shape", [(300, 4), (64, 2)])
def test_bases_are_those_of_the_reference(shape: tuple[int, int]) -> None:
    (drawn,) = _drawn(shape)
    found, expected = orthonormal([drawn])[0], low_rank.orthonormal(drawn.numpy())
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_columns_that_hold_nothing_new() -> None:
    matrix = torch.zeros(100, 3)
    assert not orthonormal([matrix])[0].any()
    matrix[:, 0] = torch.from_numpy(normal((100,)))
    matrix[:, 2] = 4 * matrix[:, 0]
    found = orthonormal([matrix])[0]
    assert found[:, 0].any() and not found[:, 1:].any(), "a third one would count the first twice"
    np.testing.assert_allclose(found, low_rank.orthonormal(matrix.numpy()), rtol=0, atol=1e-7)
    matrix[:, 2] = 3 * matrix[:, 0]  # This rounds, and what is rounded is new.
    found = orthonormal([matrix])[0]
    assert torch.linalg.matrix_norm(found, 2) < 1 + 1e-6


@pytest.mark.parametrize("size", (1e-30, 1e30))
def test_lengths_of_columns_neither_overflow_nor_vanish(size: float) -> None:
    (matrix,) = _drawn((200, 4))
    expected, found = orthonormal([matrix, size * matrix])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", (float("inf"), float("nan")))
def test_what_is_not_finite_is_in_every_column_that_follows(bad: float) -> None:
    (matrix,) = _drawn((50, 3))
    matrix[17, 0] = bad
    assert orthonormal([matrix])[0].isnan().any(0).all()


@pytest.mark.parametrize("rank", (1, 2, 5))
def test_products_have_the_bits_of_numpys_elements(rank: int) -> None:
    left, right = _drawn((70, rank), (130, rank))
    expected = left[:, :1].numpy() * right[:, 0].numpy()
    for k in range(1, rank):
        expected = expected + left[:, k, None].numpy() * right[:, k].numpy()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        np.testing.assert_array_equal(product(left, right), expected)
    torch.testing.assert_close(product(left, right), left @ right.T)
