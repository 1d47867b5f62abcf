"""Docstrings in parts, and put together again; in Google's style."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping

_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns):$", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): ", re.MULTILINE)


def summary_of(documented: type) -> str:
    """The first line."""
    return inspect.cleandoc(documented.__doc__ or "").partition("\n")[0]


def text_of(documented: type) -> str:
    """What stands between the first line and the sections; empty if there is nothing."""
    head = _SECTION.split(inspect.cleandoc(documented.__doc__ or ""))[0]
    return head.partition("\n")[2].strip()


def entries_of(documented: type, section: str) -> dict[str, str]:
    """A section's entries by name, with the indentation of their further lines.

    Args:
        documented: what has a docstring of its own.
        section: ``"Args"``, ``"Attributes"`` or ``"Raises"``; without it there are no entries.
    """
    parts = _SECTION.split(inspect.cleandoc(documented.__doc__ or ""))
    named = dict(zip(parts[1::2], parts[2::2], strict=True))
    body = named.get(section, "")
    entries = _ENTRY.split(body)
    return {name: text.rstrip() for name, text in zip(entries[1::2], entries[2::2], strict=True)}


def compose(paragraphs: list[str], sections: Mapping[str, Mapping[str, str]]) -> str:
    """A docstring of paragraphs, and of sections by their titles; empty ones are left out."""
    parts = [paragraph for paragraph in paragraphs if paragraph]
    for title, entries in sections.items():
        if entries:
            lines = (f"    {name}: {text}" for name, text in entries.items())
            parts.append("\n".join([f"{title}:", *lines]))
    return "\n\n".join(parts)
