"""The reasons for the choice of a plan, in words and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvd_compress.exchanges.routing import UNCOMPRESSED_ROUTE
from hvd_compress.planner.measured import Measured
from hvd_compress.planner.planner import Planner
from hvd_compress.planner.plans import label, price_of, propose, routes_of, uniform
from hvd_compress.planner.trials import Trial

_COLUMNS = ("plan", "sent MB", "codec ms", "wire ms", "exchange ms", "predicted ms", "measured")
_LINKS = {"50 Mbit/s": 50e6, "200 Mbit/s": 200e6, "1 Gbit/s": 1e9, "10 Gbit/s": 10e9}
"""The links that the last table is about, with the bits that a rank sends in a second."""


def explain(planner: Planner) -> str:
    """The measurements, every plan's predicted and measured cost, and each tensor's route, as a text."""
    if not planner.has_choice:
        return (
            "nothing to choose: there is one rank, or no tensor is large enough for a codec, or of a "
            "dtype that has one"
        )
    routes = routes_of(planner.tensors)
    takes: dict[str, list[str]] = {}
    for tensor, route in zip(planner.tensors, planner.plan, strict=True):
        takes.setdefault(label(route, routes), []).append(tensor.name)
    counts = ", ".join(f"{name} for {len(tensors)}" for name, tensors in takes.items())
    state = f"plan {planner.plans}, decided"
    if not planner.settled:
        state = f"plan {planner.plans + 1}, not decided yet"
    lines = [f"step {planner.step}, {state}: {counts} of the tensors", planner.reason, ""]
    if planner.measured is not None:
        lines += [*_measurements(planner.measured), "", *_plans(planner), ""]
        if planner.settled:
            lines += [*_links(planner), ""]
    lines += (f"{name}: {', '.join(tensors)}" for name, tensors in takes.items())
    return "\n".join(lines)


def _measurements(measured: Measured) -> Iterator[str]:
    rates = [f"{8e-6 * measured.bandwidth(kind):.0f} by {kind}" for kind in measured.large]
    if measured.local > 1:
        yield f"hosts: {measured.hosts}, ranks on each: {measured.local}"
    else:
        yield f"ranks: {measured.hosts}, each counted as a host of its own"
    yield f"Mbit/s that a rank sends: {', '.join(rates)}"
    yield f"a small all_reduce takes {_ms(measured.small)} ms"
    for (codec, feedback), speed in measured.speeds.items():
        with_feedback = " with error feedback" if feedback.enabled else ""
        times = f"{1e9 * speed.encode:.2f} ns an element to encode, {1e9 * speed.decode:.2f} ns"
        yield f"{codec}{with_feedback}: {times} to decode"


def _plans(planner: Planner) -> Iterator[str]:
    trials = planner.trials
    rows = [["", *_COLUMNS]]
    tried = trials.trials if trials else [Trial(candidate) for candidate in planner.candidates]
    for trial in sorted(tried, key=lambda t: (t.median, t.candidate.seconds)):
        one = trial.candidate
        measured = "not tried: too costly" if trials else "not tried"
        if trial.seconds:
            measured = f"{_ms(trial.median)} in {len(trial.seconds)} steps"
        codec = one.price.encode + one.price.decode
        times = [_ms(codec), _ms(one.price.wire), _ms(one.seconds)]
        times.append(_ms(trials.predicted(trial)) if trials else "-")
        chosen = "*" if one.plan == planner.plan else ""
        rows.append([chosen, one.label, f"{1e-6 * one.price.sent:.2f}", *times, measured])
    yield from _aligned(rows)
    if trials and trials.best.seconds:
        steps = f"{trials.cost / trials.best.median:.1f} steps of the best plan"
        yield f"Measuring has cost {_ms(trials.cost)} ms, {steps}."


def _links(planner: Planner) -> Iterator[str]:
    """The predicted time of a step on other links, with the best plan there and without compression."""
    assert planner.measured is not None
    rest = planner.trials.rest if planner.trials else 0.0
    uncompressed = uniform(planner.tensors, UNCOMPRESSED_ROUTE)
    what = f"a step, of which {_ms(rest)} ms are not the exchange" if rest else "the exchange"
    yield f"{what}, predicted on other links:"
    rows = [["", "link", "none ms", "best ms", "faster", "best plan"]]
    for name, bits in _LINKS.items():
        there = planner.measured.over_links(bits / 8)
        none = rest + price_of(planner.tensors, uncompressed, there).total
        best = propose(planner.tensors, there)[0]
        seconds = rest + best.seconds
        rows.append(["", name, _ms(none), _ms(seconds), f"{none / seconds:.2f}", best.label])
    yield from _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield from ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
