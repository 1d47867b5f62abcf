"""The integer sum: its numbers, ranks that fail, altered sums, and codecs that cannot be added."""

from __future__ import annotations

from dataclasses import replace

import horovod.torch as hvd
import numpy as np
import pytest
import torch

import hvd_compress.torch as hvdc
from hvd_compress import Route
from hvd_compress.codecs import ECQ, ErrorFeedback
from hvd_compress.codecs.feedback import OFF
from hvd_compress.exchanges import integer_sum
from hvd_compress.exchanges.comm import Collective
from hvd_compress.exchanges.reference import Simulation
from tests.codecs.cases import normal
from tests.codecs.rows import Row
from tests.codecs.test_levels import codec_of, every_row
from tests.kernels.arrays import DTYPES, as_dtype, assert_same, bits, widened
from tests.ranks import on_ranks
from tests.torch.lockstep import Lockstep
from tests.torch.probes import distributed, exchange, watch
from tests.torch_models import Probe, targets

SHAPES = {"a": (40, 170), "b": (3000,), "c": (8, 3, 5, 5), "tiny": (3,), "scalar": ()}
WEAK = ErrorFeedback(0.01, 1.0)


def _start() -> tuple[Probe, hvdc.Compressor]:
    model = Probe(SHAPES)
    options = {"exchange": "integer_sum", "threshold": 0}
    return model, hvdc.Compressor(model.named_parameters(), Route(ECQ(), WEAK), **options)


@every_row
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_and_residuals_are_the_references(row: Row, dtype: str) -> None:
    """Bit for bit, also in a step that one rank's Inf drops; the ranks' norms differ."""
    codec = codec_of(row)
    size = min(3, integer_sum.most_ranks(codec))
    shapes = {str(shape): shape for shape in ((), (0,), (65,), (3, 854))}
    for feedback in (OFF, row.feedback, replace(row.feedback, residual_dtype="bfloat16")):
        ranks = Lockstep("integer_sum", codec, feedback, shapes, size)
        reference = Simulation("integer_sum", codec, feedback, shapes, size)
        for step in range(3):
            everybodys = [
                {
                    name: as_dtype(normal(shape, step + 9 * rank, 10.0**rank), dtype).reshape(shape)
                    for name, shape in shapes.items()
                }
                for rank in range(size)
            ]
            if step == 1:
                everybodys[-1]["(65,)"][64] = np.inf
            got = ranks.step(everybodys)
            assert not ranks.errors
            wide = [{name: widened(one) for name, one in own.items()} for own in everybodys]
            expected = reference.average(wide)
            for rank, slots in enumerate(ranks.slots):
                for slot in slots:
                    what = f"{codec}, {feedback}, {slot.name}, step {step}, rank {rank}"
                    want = torch.from_numpy(expected[slot.name]).to(DTYPES[dtype])
                    assert_same(bits(got[rank][slot.name]), bits(want), what)
                    kept = reference.residuals[rank][slot.name]
                    if feedback.enabled:
                        assert slot.residual is not None
                        assert_same(bits(slot.residual.float()).reshape(-1), bits(kept), what)


class _Flip:
    """Alters a bit of a collective's result.

    Args:
        op: the collective's operation.
        place: the position of the number.
        bit: the position of the bit in the number.
        everywhere: whether every rank gets it altered, or only one.
    """

    def __init__(self, op: str, place: int, bit: int, everywhere: bool) -> None:
        self._op, self._place, self._everywhere = op, place, everywhere
        self._mask = -(2**31) if bit == 31 else 1 << bit
        self.before = self.after = 0.0

    def __call__(self, collective: Collective, results: list[torch.Tensor]) -> None:
        if collective.op == self._op:
            self.before = results[1][self._place].item()
            for result in results if self._everywhere else results[1:2]:
                result.view(torch.int32)[self._place] ^= self._mask
            self.after = results[1][self._place].item()


@pytest.mark.parametrize("everywhere", (False, True), ids=("on one rank", "on all"))
@pytest.mark.parametrize(("op", "length"), (("max", 5), ("sum", 18)))
def test_a_bit_that_is_altered_on_its_way(op: str, length: int, everywhere: bool) -> None:
    """Every bit, of norms, flags, levels, the count and the check."""
    shapes, size = {"a": (7, 10), "b": (5,)}, 3
    everybodys = [targets(shapes, rank, 0) for rank in range(size)]
    quiet = 0
    for place in range(length):
        for bit in range(32):
            flip = _Flip(op, place, bit, everywhere)
            ranks = Lockstep("integer_sum", ECQ(bucket=64), WEAK, shapes, size)
            ranks.step(everybodys, alter=flip)
            assert flip.before != flip.after
            if everywhere and op == "max" and not ranks.errors:
                quiet += 1
                assert flip.after > flip.before  # Norms that all can use, only larger than needed.
                assert place < length - len(shapes)  # No flag.
                continue
            noticed = size if everywhere or op == "max" else 1
            assert len(ranks.errors) == noticed, (place, bit)
            for error in ranks.errors:
                assert isinstance(error, (hvdc.PayloadError, hvdc.ExchangeError))
            assert any(isinstance(error, hvdc.PayloadError) for error in ranks.errors)
    assert (quiet > 0) == (everywhere and op == "max")
    with pytest.raises(IndexError):
        ranks.step(everybodys, alter=_Flip(op, length, 0, everywhere))  # No place was left out.


@on_ranks(2, alone=True)
def test_a_sum_that_is_altered_on_its_way_to_one_rank() -> None:
    """The rank with the altered sum raises an error; the other one waits only for its end."""
    model, compressor = _start()
    optimizer = distributed(model, compressor)
    exchange(model, optimizer, targets(SHAPES, hvd.rank(), 0))

    def flip_a_bit(name: str, result: torch.Tensor) -> None:
        if result.dtype == torch.int32:
            result[5] ^= 16

    if hvd.rank() == 0:
        exchange(model, optimizer, targets(SHAPES, 0, 1))
        return
    watch(compressor, result=flip_a_bit)
    with pytest.raises(hvdc.PayloadError, match="expected levels and norms that agree with their"):
        exchange(model, optimizer, targets(SHAPES, 1, 1))
