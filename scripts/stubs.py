"""Writes ``__init__.pyi`` of each frontend: its compressors' signatures, for editors and type checkers.

They read source and do not run it, so that they see nothing of the classes that
``hvd_compress.codecs.frontends`` makes. Run it after a change of a codec's fields or of a compressor's
arguments; a test tells when it is due:

    python -m scripts.stubs
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hvd_compress.codecs import SCHEMES, ErrorFeedback, Scheme
from hvd_compress.codecs.docstrings import compose, entries_of, summary_of
from hvd_compress.codecs.frontends import signature_of, title_of

FRONTENDS = ("torch", "distributed", "ddp", "fsdp", "tensorflow")
"""Those that call ``compressors``."""

PACKAGE = Path(__file__).parent.parent / "hvd_compress"


def path_of(frontend: str) -> Path:
    """Where a frontend's stub is."""
    return PACKAGE / frontend / "__init__.pyi"


def stub(frontend: str) -> str:
    """The text of a frontend's stub; imports the frontend."""
    module = importlib.import_module(f"hvd_compress.{frontend}")
    base = module.Compressor
    found = _Imports()
    source = ast.parse((PACKAGE / frontend / "__init__.py").read_text())
    for name in module.__all__:
        if origin := _origin(source, name):
            found.add(origin)
    found.add(("hvd_compress.codecs.frontends", "ByName", "ByName"))
    classes = "".join(_class(base, scheme, found) for scheme in SCHEMES.values())
    names = "".join(f'    "{name}",\n' for name in _as_ruff_sorts(module.__all__))
    return (
        "# Written by scripts/stubs.py.\n"
        f'"""{inspect.getdoc(module)}\n"""\n\n'
        f"{found.lines()}\n"
        f"__all__ = [\n{names}]\n\n"
        f"class Compression(ByName[Compressor]): ...\n{classes}"
    )


def _class(base: type, scheme: Scheme, found: _Imports) -> str:
    """A class statement; notes the imports that its annotations need."""
    own = entries_of(scheme.codec, "Attributes") | entries_of(ErrorFeedback, "Attributes")
    paragraphs = [scheme.summary or summary_of(scheme.codec)]
    if scheme.summary:
        paragraphs.append(summary_of(scheme.codec))
    paragraphs.append("Keywords from ``exchange`` on are those of :class:`Compressor`.")
    doc = textwrap.indent(compose(paragraphs, {"Args": own}), "    ").lstrip()
    parameters = list(signature_of(base, scheme, evaluate=False).parameters.values())[1:]
    lines, keyword_only = ["self"], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            lines.append("*")
        annotation = parameter.annotation.replace("'", '"')
        default = _default(parameter)
        lines.append(f"{parameter.name}: {annotation}{default}")
        found.take(_owner(base, scheme, parameter.name), annotation)
    arguments = "".join(f"        {line},\n" for line in lines)
    return (
        f'\nclass {title_of(scheme)}(Compressor):\n    """{doc}\n    """\n\n'
        f"    def __init__(\n{arguments}    ) -> None: ...\n"
    )


def _default(parameter: inspect.Parameter) -> str:
    value = parameter.default
    if value is parameter.empty:
        return ""
    if isinstance(value, str):
        return ' = "' + value.replace('"', '\\"') + '"'
    plain = value is None or isinstance(value, (bool, int, float)) or value == ()
    return f" = {value!r}" if plain else " = ..."


def _owner(base: type, scheme: Scheme, name: str) -> str:
    """The module whose source has a parameter's annotation."""
    for cls in (*scheme.codec.__mro__, ErrorFeedback):
        if name in inspect.get_annotations(cls):
            return cls.__module__
    return inspect.unwrap(base.__init__).__module__  # type: ignore[misc]


def _origin(tree: ast.Module, name: str) -> tuple[str, str, str] | None:
    """The module, the name there and the name here of what a source imports; an empty name is a module."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                if (alias.asname or alias.name.split(".")[0]) == name:
                    if isinstance(node, ast.ImportFrom):
                        return str(node.module), alias.name, name
                    return alias.name, "", name
    return None


class _Imports:
    """The imports that a stub needs."""

    def __init__(self) -> None:
        self._found: set[tuple[str, str, str]] = set()

    def add(self, origin: tuple[str, str, str]) -> None:
        """Notes a module, a name in it and the name here."""
        self._found.add(origin)

    def take(self, module: str, annotation: str) -> None:
        """Notes what an annotation in that module needs."""
        tree = ast.parse(inspect.getsource(sys.modules[module]))
        for node in ast.walk(ast.parse(annotation, mode="eval")):
            if isinstance(node, ast.Name) and not hasattr(builtins, node.id):
                self.add(_origin(tree, node.id) or (module, node.id, node.id))

    def lines(self) -> str:
        """Import statements, in ruff's order."""
        sections = (
            self._section(lambda top: top in sys.stdlib_module_names),
            self._section(lambda top: top not in sys.stdlib_module_names | {"hvd_compress"}),
            self._section(lambda top: top == "hvd_compress"),
        )
        return "\n".join("".join(f"{line}\n" for line in lines) for lines in sections if lines)

    def _section(self, belongs: Any) -> list[str]:
        here = [origin for origin in self._found if belongs(origin[0].split(".")[0])]
        lines = []
        for module, original, name in sorted(here):
            if not original:
                lines.append(f"import {module}" + (f" as {name}" if name != module else ""))
        for module in sorted({module for module, original, _ in here if original}):
            names = {
                original + (f" as {name}" if name != original else "")
                for other, original, name in here
                if other == module and original
            }
            lines.append(f"from {module} import {', '.join(_as_ruff_sorts(names))}")
        return lines


def _as_ruff_sorts(names: Iterable[str]) -> Iterator[str]:
    """Constants, then classes, then the others."""
    yield from sorted(names, key=lambda n: (0 if n.isupper() else 1 if n[:1].isupper() else 2, n))


def main() -> None:
    """Writes them all."""
    for frontend in FRONTENDS:
        path_of(frontend).write_text(stub(frontend))


if __name__ == "__main__":
    main()
