"""The rotation of groups, beside a Hadamard matrix."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.codecs import ECQ
from hvd_compress.codecs.rotation import rotate, rotate_back
from tests.codecs.cases import floats, normal, tensors, through


def matrix_of(size: int) -> np.ndarray:
    """Orthogonal, of powers of one matrix of two rows."""
    pair = np.array([[1.0, 1.0], [1.0, -1.0]]) / np.sqrt(2)
    return reduce(np.kron, [pair] * (size.bit_length() - 1), np.eye(1))


@pytest.mark.parametrize("group", (64, 256, 4096))
def test_a_group_is_multiplied_by_signs_and_a_hadamard_matrix(group: int) -> None:
    signs = rotate_back(rotate(np.ones(group, np.float32), group), group)
    np.testing.assert_allclose(signs, 1, rtol=1e-5)
    first = rotate(np.eye(1, group, dtype=np.float32)[0], group)
    assert len(set(first.tolist())) == 1
    columns = np.stack([rotate(one, group) for one in np.eye(group, dtype=np.float32)[:64]], 1)
    ratios = columns / matrix_of(group)[:, :64]
    np.testing.assert_allclose(np.abs(ratios), 1, rtol=1e-5)
    assert np.array_equal(np.sign(ratios), np.broadcast_to(np.sign(ratios[0]), ratios.shape))
    assert 16 <= np.sum(ratios[0] < 0) <= 48


@given(st.integers(0, 400).flatmap(lambda count: tensors(count, floats(1e15))))
def test_rotations_keep_norms_and_turn_back(x: np.ndarray) -> None:
    turned = rotate(x, 64)
    for begin in range(0, x.size, 64):
        before, after = (part[begin : begin + 64].astype(np.float64) for part in (x, turned))
        norm = np.linalg.norm(before)
        assert np.linalg.norm(after) == pytest.approx(norm, rel=1e-5, abs=1e-40)
        again = rotate_back(turned, 64)[begin : begin + 64]
        assert np.abs(again - before).max() <= 1e-5 * norm + 1e-40


def test_large_elements_cost_the_others_less() -> None:
    plain, turned = ECQ(bucket=4096), ECQ(bucket=4096, rotate=True)
    x = normal((2**18,))
    errors = [np.sum((through(codec, x) - x) ** 2) for codec in (plain, turned)]
    assert errors[1] == pytest.approx(errors[0], rel=0.15)
    x[::1000] *= 100
    errors = [np.sum((through(codec, x) - x) ** 2) for codec in (plain, turned)]
    assert errors[1] < errors[0] / 8


def test_the_largest_norm_of_a_rotated_bucket() -> None:
    x = np.zeros(64, np.float32)
    for exponent, finite in ((122, True), (123, False)):
        x[5] = 2.0**exponent
        assert np.isfinite(through(ECQ(bucket=64, rotate=True), x)).all() == finite
        assert np.isfinite(through(ECQ(bucket=64), x)).all()


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    (
        (
            {"bucket": 192},
            ValueError,
            "ECQ.bucket: expected a power of two with rotate=True, got 192",
        ),
        (
            {"bucket": "tensor"},
            ValueError,
            "expected a power of two with rotate=True, got 'tensor'",
        ),
        ({"norm": "l2"}, ValueError, "ECQ.norm: expected 'linf' with rotate=True, got 'l2'"),
        ({"rotate": 1}, TypeError, "ECQ.rotate: expected True or False, got 1"),
    ),
)
def test_what_cannot_be_rotated(
    fields: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ECQ(**{"rotate": True, **fields})  # type: ignore[arg-type]
