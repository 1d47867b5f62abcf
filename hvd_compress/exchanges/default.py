"""The exchange that ``exchange="auto"``, the default, stands for.

Among K ranks, a rank sends (K - 1) payloads in an allgather, and 2 (K - 1) / K payloads in two shots. For
two ranks both are one payload, and the allgather quantizes once and takes one collective. For more ranks,
two shots send less. The number of ranks alone decides, so that all ranks choose the same exchange, and so
that all gradients of a bucket travel together.
"""

from __future__ import annotations

AUTO = "auto"
"""The value of the option ``exchange`` for which the number of ranks chooses the exchange.

It measures nothing, unlike the frontends' ``Auto``.
"""

MOST_RANKS_TO_GATHER = 2
"""The largest number of ranks for which an allgather sends no more than two shots."""


def exchange_for(ranks: int, *, divisible: bool = True) -> tuple[str, str]:
    """The exchange for a number of ranks, and the reason.

    Args:
        ranks: the number of ranks that exchange a tensor.
        divisible: whether the ranks can divide the tensor; a TensorFlow gradient whose shape tracing does
            not know cannot be divided.

    Returns:
        The name of the exchange, and a short text that says why.
    """
    among = f"auto, {ranks} {'rank' if ranks == 1 else 'ranks'}"
    if not divisible:
        return "allgather", f"{among}, unknown shape"
    return ("allgather" if ranks <= MOST_RANKS_TO_GATHER else "two_shot"), among
