"""The exchange benchmark: its arithmetic, its command line, and that it sees wrong sums."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import exchange, exchanges, launch
from benchmarks.exchanges.coded import Coded
from hvd_compress.codecs import ErrorFeedback, OneBit
from tests.ranks import on_ranks


def test_traffic_and_bandwidths():
    dense = exchanges.exchange("allreduce:none")
    half = exchanges.exchange("allreduce:fp16")
    onebit = exchanges.exchange("allgather:onebit:group=512")

    # A ring of four sends 2 * 3/4 of the message, a gather three payloads.
    assert dense.wire_bytes(1000, 4) == 6000 and half.wire_bytes(1000, 4) == 3000
    assert onebit.wire_bytes(1000, 4) == 3 * OneBit(512).payload_bytes((1000,))
    assert dense.algorithm_bandwidth(1000, 2.0) == onebit.algorithm_bandwidth(1000, 2.0) == 2000
    assert dense.bus_bandwidth(1000, 4, 2.0) == 3000
    assert onebit.bus_bandwidth(1000, 4, 2.0) == onebit.wire_bytes(1000, 4) / 2
    assert all(case.wire_bytes(1000, 1) == 0 for case in (dense, half, onebit))

    # Three of four parts go to their owners, and each rank's average to three others.
    parts = exchanges.exchange("two_shot:onebit:group=512")
    assert parts.wire_bytes(4096, 4) == 2 * 3 * OneBit(512).payload_bytes((1024,))

    # Sums of four ranks' -1, 0 and 1 take four bits, eight lanes a word; two buckets.
    levels = exchanges.exchange("integer_sum:ternary:bucket=512")
    assert levels.wire_bytes(1000, 4) == 2 * 3 / 4 * 4 * (2 + 64 + 61)


@pytest.mark.parametrize(("kind", "dtype"), [("none", np.float32), ("fp16", np.float16)])
def test_a_sum_may_be_as_wrong_as_its_type_and_no_more(kind, dtype):
    gradients = [np.random.default_rng(r).standard_normal(10_000, np.float32) for r in range(4)]
    total, bound = exchanges.exchange(f"allreduce:{kind}").answer(gradients)

    rounded = [gradient.astype(dtype) for gradient in gradients]
    ring = (((rounded[0] + rounded[1]) + rounded[2]) + rounded[3]).astype(np.float64)

    assert (np.abs(ring - total) <= bound).all()
    assert (bound < 100 * float(np.finfo(dtype).eps) * 4).all()
    assert (np.abs(ring - gradients[3] - total) > bound).mean() > 0.9, "a missing rank"


def test_two_ranks_measure(tmp_path, capfd):
    out = tmp_path / "exchange.json"
    sizes = ["--min-bytes", "4K", "--max-bytes", "64K", "--factor", "16", "--repeats", "2"]
    kinds = ["allreduce:none", "allreduce:fp16", "allgather:onebit", "allgather:ecq:levels=3"]
    kinds += ["two_shot:onebit", "two_shot:ternary", "integer_sum:ternary"]

    launch.horovodrun(2, "benchmarks.exchange", ["--json", str(out), *sizes, "--exchange", *kinds])

    found = json.loads(out.read_text())
    assert found["schema"] == exchange.SCHEMA and found["ranks"] == 2 and found["link"] is None
    made = [(row["exchange"], row["elements"]) for row in found["rows"]]
    assert made == [(kind, elements) for elements in (1024, 16384) for kind in kinds]
    for row in found["rows"]:
        seconds = row["seconds"]["median"]
        assert row["gradient_bytes"] == 4 * row["elements"]
        assert row["algorithm_bytes_per_second"] == pytest.approx(row["gradient_bytes"] / seconds)
        assert row["bus_bytes_per_second"] == pytest.approx(row["wire_bytes"] / seconds)
        parts = {"encode", "transfer", "decode"}
        coded = not row["exchange"].startswith("allreduce")
        assert set(row["parts"]) == parts | ({"between"} if coded else set())
        assert 0 < row["parts"]["transfer"] < 60
    exact = [row["error"] == 0 for row in found["rows"] if "allreduce" not in row["exchange"]]
    assert exact == [True] * 10, "the reference's bits"
    printed = capfd.readouterr().out
    assert "allgather:ecq:levels=3" in printed and " NO" not in printed


@on_ranks(4, launcher="two hosts", environment={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_two_hosts_of_two_ranks_measure():
    from hvd_compress.torch.collectives import HorovodCollectives

    cases = {kind: exchanges.exchange(f"hierarchical:{kind}") for kind in ("onebit", "ternary")}

    rows = exchange.measure(cases, HorovodCollectives(None, "test"), 5000, threads=1, repeats=2)

    assert [row["error"] for row in rows] == [0.0, 0.0], "the reference's bits"
    # One payload of a half of the tensor goes to the other host.
    sizes = [OneBit().payload_bytes((elements,)) for elements in (2048, 2952)]
    assert rows[0]["wire_bytes"] == sum(sizes) / 2


class _Spoilt(Coded):
    """Adds to one element of the sum, on some ranks."""

    def __init__(self, ranks):
        super().__init__("allgather", OneBit(), ErrorFeedback())
        self._ranks = ranks

    def prepare(self, collectives, threads, elements):
        work = super().prepare(collectives, threads, elements)

        def spoilt(gradient, clock):
            result = work(gradient, clock).clone()
            result[elements // 2] += 1e-3 * (collectives.rank in self._ranks)
            return result

        return spoilt


@on_ranks(2)
def test_wrong_sums_are_seen():
    from hvd_compress.torch.collectives import HorovodCollectives

    cases = {
        "right": exchanges.exchange("allgather:onebit"),
        "one rank": _Spoilt({1}),
        "all ranks": _Spoilt({0, 1}),
    }

    rows = exchange.measure(cases, HorovodCollectives(None, "test"), 5000, threads=1, repeats=1)

    assert [row["error"] for row in rows] == [0.0, None, None]
