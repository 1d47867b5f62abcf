"""Why a plan was chosen, in words and numbers."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_compress.planner.measured import KINDS, Measured
from hvd_compress.planner.planner import Planner
from hvd_compress.planner.plans import Plan, Tensor, label, price, routes_of
from hvd_compress.planner.trials import Trial, Trials


def explain(planner: Planner) -> str:
    """What was measured, every plan's predicted and measured cost, and what each tensor's choices cost."""
    parts = [_headline(planner)]
    if planner.measured is not None:
        parts.append(_measurements(planner.measured))
    if planner.trials is not None and planner.measured is not None:
        parts.append(_plans(planner.trials, planner.plan))
        parts.append(_tensors(planner, planner.measured))
    return "\n\n".join(parts)


def describe(plan: Plan, tensors: Sequence[Tensor]) -> str:
    """A plan in a few words, such as ``onebit two_shot for 3 tensors, none for 2``."""
    routes = routes_of(tensors)
    names = [label(route, routes) for route in plan]
    counts = {name: names.count(name) for name in names}
    return ", ".join(f"{name} for {count}" for name, count in counts.items()) + " of the tensors"


def _headline(planner: Planner) -> str:
    plan = describe(planner.plan, planner.tensors)
    number, state = planner.plans, "decided"
    if not planner.settled:
        number, state = planner.plans + 1, "not decided yet"
    return f"step {planner.step}, plan {number}, {state}: {plan}\n{planner.reason}"


def _measurements(measured: Measured) -> str:
    probe = measured.probe
    rates = ", ".join(f"{8e-6 * probe.bandwidth(kind):.0f} by {kind}" for kind in KINDS)
    lines = [
        f"hosts: {measured.hosts}, ranks on each: {measured.local}",
        f"Mbit/s that a rank sends: {rates}",
        f"a small allreduce takes {1e3 * probe.small:.2f} ms; the backward pass hides "
        f"{1e3 * measured.window:.2f} ms of transfer",
    ]
    for (codec, feedback), speed in measured.speeds.items():
        with_feedback = " with error feedback" if feedback.enabled else ""
        lines.append(
            f"{codec}{with_feedback}: {1e9 * speed.encode:.2f} ns an element to encode, "
            f"{1e9 * speed.decode:.2f} ns to decode"
        )
    return "\n".join(lines)


def _plans(trials: Trials, chosen: Plan) -> str:
    rows = [
        [
            "",
            "plan",
            "sent MB",
            "codec ms",
            "wire ms",
            "exposed ms",
            "step ms predicted",
            "measured",
        ]
    ]
    for trial in sorted(trials.trials, key=lambda t: (t.median, t.candidate.seconds)):
        candidate = trial.candidate
        rows.append(
            [
                "*" if candidate.plan == chosen else "",
                candidate.label,
                f"{1e-6 * candidate.price.sent:.2f}",
                _ms(candidate.price.codec),
                _ms(candidate.price.wire),
                _ms(candidate.seconds),
                _ms(trials.predicted(trial)),
                _measured(trial),
            ]
        )
    cost = f"Measuring has cost {1e3 * trials.cost:.1f} ms"
    if trials.best.seconds:
        cost += f", {trials.cost / trials.best.median:.1f} steps of the best plan"
    return f"{_table(rows)}\n{cost}."


def _measured(trial: Trial) -> str:
    if not trial.seconds:
        return "not tried: it would cost more than it can gain"
    return f"{_ms(trial.median)} in {len(trial.seconds)} steps"


def _tensors(planner: Planner, measured: Measured) -> str:
    routes = routes_of(planner.tensors)
    names = [label(route, routes) for route in routes]
    rows = [["tensor", "elements", *(f"{name} ms" for name in names), "takes"]]
    for tensor, taken in zip(planner.tensors, planner.plan, strict=True):
        if len(tensor.choices) == 1:
            continue
        cells = []
        for route in routes:
            if route in tensor.choices:
                cost = price(tensor, route, measured)
                cells.append(_ms(cost.codec + cost.wire))
            else:
                cells.append("-")
        rows.append([tensor.name, str(tensor.count), *cells, label(taken, routes)])
    left = sum(len(tensor.choices) == 1 for tensor in planner.tensors)
    text = f"Predicted for each tensor, codec and transfer, nothing hidden:\n{_table(rows)}"
    return f"{text}\n{left} tensors have no choice and go uncompressed." if left else text


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
