"""A job and the reference that goes along with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_compress.exchanges.reference import Simulation
from tests.contract.cases import SHAPES, USUAL, Row, gradients
from tests.contract.frontend import Arrays, Frontend, Job


class Beside:
    """A job, and the reference that goes along with it.

    Args:
        frontend: the row.
        exchange: the job's.
        row: the codec and its feedback; None is the usual codec.
        shapes: the shapes of its parameters.
        ranks: the ranks that take part; None is all.
        dtype: the dtype of its parameters.
        seed: the seed of the noise.
        simulated: options of the reference alone.
        asked: the exchange that the frontend is asked for; None is ``exchange``.
        options: the options of :meth:`Frontend.make`.
    """

    def __init__(
        self,
        frontend: Frontend,
        exchange: str,
        row: Row | None = None,
        *,
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
        ranks: Sequence[int] | None = None,
        dtype: str = "float32",
        seed: int = 0,
        simulated: Mapping[str, Any] | None = None,
        asked: str | None = None,
        **options: Any,
    ) -> None:
        self.frontend, self.shapes, self.dtype = frontend, dict(shapes), dtype
        self.ranks = list(range(frontend.size) if ranks is None else ranks)
        self.codec, self.feedback, *inner = row or USUAL[exchange]
        self.inner = inner[0] if inner else None
        self.exact = exchange != "low_rank"
        self.place = self.ranks.index(frontend.rank) if frontend.rank in self.ranks else None
        options = {"seed": seed, **options}
        if self.inner is not None:
            options["inner"] = self.inner
            simulated = {"inner": self.inner, **(simulated or {})}
        self._make = lambda: frontend.make(
            asked or exchange, self.codec, self.feedback, self.shapes, dtype, **options
        )
        self.job = self._make()
        self._past: list[Job] = []  # Their checkpoints last as long as they do.
        self.simulation: Simulation = frontend.simulation(
            exchange,
            self.codec,
            self.feedback,
            self.shapes,
            size=len(self.ranks),
            seed=seed,
            **(simulated or {}),
        )

    def everybodys(self, step: int) -> list[dict[str, np.ndarray]]:
        """The gradients of the ranks that take part, as their parameters' type has them."""
        return [
            {n: self.rounded(g) for n, g in gradients(rank, step, self.shapes).items()}
            for rank in self.ranks
        ]

    def rounded(self, array: np.ndarray) -> np.ndarray:
        """Returns the array rounded to the parameters' dtype."""
        return array if self.dtype == "float32" else self.frontend.rounded(array, self.dtype)

    def step(
        self,
        step: int,
        *,
        used: Sequence[str] | None = None,
        factor: float = 1.0,
        change: Callable[[list[dict[str, np.ndarray]]], None] = lambda everybodys: None,
    ) -> dict[str, np.ndarray]:
        """Makes a step, whose results have to be the reference's; see :meth:`assert_same`.

        Args:
            step: the number of the gradients.
            used: see :meth:`Job.step`.
            factor: on the average.
            change: alters all ranks' gradients, in place.
        """
        everybodys = self.everybodys(step)
        change(everybodys)
        mine = gradients(self.frontend.rank, step, self.shapes)
        if self.place is not None:
            mine = {name: everybodys[self.place].get(name, g) for name, g in mine.items()}
        got = self.job.step(mine, used)
        expected = self.simulation.average(everybodys)
        if self.place is None:
            expected = mine
        expected = {
            name: self.rounded(np.asarray(np.float32(factor) * e)) for name, e in expected.items()
        }
        self.assert_same(got, expected)
        return got

    def steps(self, *steps: int, **options: Any) -> None:
        """Makes several steps, and then compares the residuals."""
        for step in steps:
            self.step(step, **options)
        self.assert_kept()

    def assert_kept(self) -> None:
        """Fails unless this rank's residuals are those of the reference; see :meth:`assert_same`."""
        if self.place is not None and self.feedback.enabled:
            for got, expected in zip(self.job.kept(), self._expected(), strict=True):
                filled = {name for name, kept in expected.items() if kept.size}
                # What a dropped step began to keep is zeros.
                assert filled <= got.keys()
                assert not any(kept.any() for name, kept in got.items() if name not in filled)
                self.assert_same({n: got[n] for n in filled}, {n: expected[n] for n in filled})

    def assert_same(self, got: Arrays, expected: Arrays) -> None:
        """Fails unless both hold the same names and bits; or nearly the same numbers, as of factors.

        Products of matrices are not added up in the same order everywhere.
        """
        if self.exact:
            assert_same_bits(got, expected)
            return
        assert got.keys() == expected.keys(), (got.keys(), expected.keys())
        part = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}[self.dtype]
        for name, array in expected.items():
            largest = np.abs(array[np.isfinite(array)]).max(initial=1)
            np.testing.assert_allclose(got[name], array, 0, part * largest, err_msg=name)

    def assert_nearly_kept(self, step: int, beside: tuple[str, int] = ("", 0)) -> None:
        """Compares residuals up to the rounding of the gradients of a dropped, or uncompressed, step.

        Args:
            step: the one that was dropped.
            beside: tensor and element of the number that had it dropped: it may be huge.
        """
        largest = {n: np.abs([one[n] for one in self.everybodys(step)]).max() for n in self.shapes}
        for got, expected in zip(self.job.kept(), self._expected(), strict=True):
            for name, kept in expected.items():
                tolerance = 2e-6 * (largest[name] + np.abs(kept).max(initial=0))
                if name not in got or got[name].size < kept.size:
                    assert not kept.any() and not (name in got and got[name].size), name
                    continue  # Nothing has been encoded yet.
                near = np.abs(got[name] - kept) <= tolerance
                if name == beside[0] and near.size > beside[1]:
                    near[beside[1]] = np.isfinite(got[name][beside[1]])
                assert near.all(), (name, tolerance, np.abs(got[name] - kept).max())

    def drop_step(self) -> None:
        """Takes the last step back."""
        self.job.compressor.drop_step()
        self.simulation.drop_step()

    def reset(self) -> None:
        """Discards what was not sent."""
        self.job.compressor.reset()
        self.simulation.reset()

    def leave_out(self, step: int, change: Callable[[list[dict[str, np.ndarray]]], None]) -> None:
        """Tells the reference of a step that the other ranks make without this rank."""
        everybodys = self.everybodys(step)
        change(everybodys)
        self.simulation.average(everybodys)

    def go_on_with_another_job(self) -> None:
        """Continues with a new job that loads this one's checkpoint, as after a restart."""
        self._past.append(self.job)
        self.job = self._make()
        self.job.load(self._past[-1].save())

    def _expected(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        assert self.place is not None
        return self.simulation.residuals[self.place], self.simulation.owned[self.place]


def assert_same_bits(got: Arrays, expected: Arrays) -> None:
    """Fails unless both hold the same names and numbers; a NaN is a NaN."""
    assert got.keys() == expected.keys(), (got.keys(), expected.keys())
    for name, array in expected.items():
        same = np.array_equal(got[name], array, equal_nan=True)
        differ = np.sum(got[name] != array)
        assert same, f"{name}: {differ} of {array.size} differ: {got[name]} and {array}"


def assert_mean(got: np.ndarray, everybodys: list[np.ndarray]) -> None:
    """Fails unless it is the ranks' mean: the exact one of two ranks; of more, it depends on the order."""
    mean = np.mean(everybodys, axis=0)
    if len(everybodys) == 2:
        assert np.array_equal(got, mean)
    else:
        np.testing.assert_allclose(got, mean, rtol=1e-6, atol=1e-5)
