"""Parts of a model that are exchanged in different steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn


def split(
    parameters: Mapping[str, nn.Parameter], fragments: int | Sequence[Sequence[str]]
) -> list[list[str]]:
    """The names of each fragment's parameters.

    Args:
        parameters: the parameters by name, in the model's order.
        fragments: the number of fragments, which then have nearly equal numbers of elements and are in the
            model's order; or, for each fragment, patterns (``fnmatch``) of names.

    Raises:
        ValueError: there are more fragments than parameters; a parameter belongs to no fragment or to
            several; or a pattern matches nothing.
    """
    if isinstance(fragments, int):
        return _equal(parameters, fragments)
    found = [[name for name in parameters if _matches(name, patterns)] for patterns in fragments]
    for patterns in fragments:
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in parameters):
                raise ValueError(
                    f"DiLoCo.fragments: expected a pattern that matches a parameter's name, got "
                    f"{pattern!r}"
                )
    for name in parameters:
        count = sum(name in names for names in found)
        if count != 1:
            raise ValueError(
                f"DiLoCo.fragments: expected each parameter in one fragment, got {name!r} in {count}"
            )
    return found


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _equal(parameters: Mapping[str, nn.Parameter], count: int) -> list[list[str]]:
    if not 1 <= count <= len(parameters):
        raise ValueError(
            f"DiLoCo.fragments: expected 1 to {len(parameters)}, the number of trainable parameters, got "
            f"{count}"
        )
    found: list[list[str]] = [[] for _ in range(count)]
    total = sum(parameter.numel() for parameter in parameters.values())
    before, left = 0, len(parameters)
    index = 0
    for name, parameter in parameters.items():
        # The next fragment begins where its share does, or where each of the rest needs a parameter.
        middle = before + parameter.numel() / 2
        while (
            index + 1 < count
            and found[index]
            and (middle >= (index + 1) * total / count or left <= count - 1 - index)
        ):
            index += 1
        found[index].append(name)
        before += parameter.numel()
        left -= 1
    return found
