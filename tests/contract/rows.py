"""Makes the contract's tests: each property, for each exchange, on ranks of one frontend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests import device
from tests.contract import counters, errors, residuals, results
from tests.contract.cases import FLAT, ROWS
from tests.contract.frontend import Frontend
from tests.ranks import on_ranks

ALL = tuple(ROWS)

Layout = tuple[int, bool]
"""The number of ranks, and whether they are on two hosts."""

ONE, TWO, THREE, FOUR = (1, False), (2, False), (3, False), (4, False)
HOSTS_OF_ONE, HOSTS_OF_TWO = (2, True), (4, True)


@dataclass(frozen=True)
class Property:
    """A property, and the exchanges and ranks for which it is tried.

    Attributes:
        body: the test's body; called with the frontend and the exchange's name.
        exchanges: the exchanges that it is tried with.
        flat: the ranks.
        hierarchical: the ranks for the hierarchical exchange.
        single: whether a single rank has it, too. That is tried on a device, where NCCL connects a rank
            with itself, but not two ranks that share a GPU.
    """

    body: Callable[[Frontend, str], None]
    exchanges: Sequence[str] = ALL
    flat: Sequence[Layout] = (TWO,)
    hierarchical: Sequence[Layout] = (HOSTS_OF_TWO,)
    single: bool = False

    def layouts(self, exchange: str) -> Sequence[Layout]:
        """The ranks that an exchange is tried on."""
        chosen = self.hierarchical if exchange == "hierarchical" else self.flat
        return (*chosen, ONE) if self.single and device.TYPE != "cpu" else chosen


PROPERTIES = (
    Property(
        results.every_codec,
        flat=(ONE, TWO, THREE),
        hierarchical=(ONE, TWO, HOSTS_OF_ONE, HOSTS_OF_TWO),
    ),
    Property(results.the_default_exchange, ("allgather",), (TWO,)),
    Property(results.the_default_exchange, ("two_shot",), (THREE, FOUR)),
    Property(
        results.payloads_of_any_length,
        ("allgather", "two_shot", "hierarchical"),
        flat=(TWO, THREE),
    ),
    Property(results.every_form, single=True),
    Property(results.half_precision, single=True),
    Property(results.other_defaults, single=True),
    Property(results.long_messages, ("allgather", "two_shot"), single=True),
    Property(results.some_of_the_ranks, FLAT, (THREE,)),
    Property(results.gradients_in_another_order_on_each_rank, flat=(THREE,), single=True),
    Property(results.parameters_that_are_not_used, single=True),
    Property(results.zeros, single=True),
    Property(residuals.nonfinite_gradients, single=True),
    Property(residuals.an_average_that_overflows, ("two_shot",)),
    Property(residuals.a_sum_beyond_half_precision, ("allgather", "two_shot")),
    Property(residuals.a_step_that_the_script_drops, single=True),
    Property(residuals.a_change_of_codec_that_the_script_drops, flat=(THREE,), single=True),
    Property(residuals.an_owner_step_that_the_script_drops, ("two_shot",), single=True),
    Property(residuals.loaded_residuals_that_the_script_would_drop, ("two_shot",), single=True),
    Property(residuals.a_return_to_an_earlier_model, single=True),
    Property(residuals.a_return_without_a_reset, single=True),
    Property(residuals.a_checkpoint_goes_on_bit_for_bit, single=True),
    Property(results.uncompressed_at_first, single=True),
    Property(results.owner_steps_from_a_cold_start, ("two_shot",), flat=(TWO, THREE), single=True),
    Property(
        residuals.residuals_in_bfloat16,
        ("allgather", "two_shot", "hierarchical", "integer_sum"),
        single=True,
    ),
    Property(residuals.a_change_of_codec_loses_no_mass, single=True),
    Property(
        residuals.a_change_of_exchange_loses_no_mass, ("hierarchical", "integer_sum", "low_rank")
    ),
    Property(residuals.a_rank_that_joins, flat=(THREE,)),
    Property(residuals.a_rank_that_joins_at_once, ("allgather",)),
    Property(residuals.a_rank_that_joins_in_the_warm_up),
    Property(counters.counters_follow_the_formulas, flat=(THREE,)),
    Property(results.each_tensor_its_own_route, single=True),
    Property(errors.what_it_cannot_carry),
    Property(errors.gradients_that_are_too_small, ("allgather",)),
    Property(errors.ranks_that_disagree, flat=(THREE,)),
    Property(errors.half_precision_on_one_rank, ("allgather",)),
    Property(errors.a_change_of_codec_on_some_ranks, flat=(THREE,)),
    Property(errors.a_reset_on_some_ranks, flat=(THREE,)),
)


def contract_of(frontend: Frontend, module: str) -> dict[str, Any]:
    """The contract's tests of a frontend, by name; for the global names of that module."""
    names = {one.body.__name__ for one in PROPERTIES}
    assert names >= frontend.cannot.keys() | frontend.alone, "a property by another name"
    tests = {}
    without = set(frontend.cannot)
    if not frontend.varies:
        without.add(results.payloads_of_any_length.__name__)
    for one in PROPERTIES:
        if one.body.__name__ not in without:
            for exchange in [
                each for each in one.exchanges if each in ROWS.keys() - frontend.lacks
            ]:
                for layout in one.layouts(exchange):
                    if layout != ONE or frontend.single:
                        test = _test(frontend, one.body, exchange, layout, module)
                        tests[test.__name__] = test
    return tests


def _test(
    frontend: Frontend,
    body: Callable[[Frontend, str], None],
    exchange: str,
    layout: Layout,
    module: str,
) -> Callable[[], None]:
    ranks, hosts = layout

    def run() -> None:
        body(frontend, exchange)

    run.__module__, run.__doc__ = module, body.__doc__
    place = f"{ranks}_ranks_of_two_hosts" if hosts else f"{ranks}_ranks" if ranks > 1 else "a_rank"
    run.__name__ = f"test_{body.__name__}_by_{exchange}_on_{place}"
    return on_ranks(
        ranks,
        alone=body.__name__ in frontend.alone,
        environment=dict(frontend.environment.get(layout, {})),
        launcher=frontend.launcher_of_hosts if hosts else frontend.launcher,
    )(run)
