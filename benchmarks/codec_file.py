"""Codecs in a file of the user's: loads and registers them, and checks them by the contract of codecs."""

from __future__ import annotations

import hashlib
import sys
import traceback
from importlib import import_module
from pathlib import Path

from hvd_compress.codecs import Codec, register
from hvd_compress.testing import check_codec


def load(path: Path) -> tuple[str, ...]:
    """Imports a Python file, and registers the codecs that it defines.

    These are the classes derived from :class:`hvd_compress.codecs.Codec` whose own names do not begin with
    an underscore. The file can import modules of its folder.

    Returns:
        The codecs' names, in the order of the file.

    Raises:
        ValueError: no such file, an error in it, no codec in it, an incomplete codec, or the name or the id
            of another codec.
    """
    path = path.resolve()
    if not path.is_file():
        raise ValueError(f"expected a Python file with a codec, got {path}, which is no file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        module = import_module(path.stem)
    except Exception as error:
        raise ValueError(_told(error, path)) from error
    if (other := getattr(module, "__file__", None)) != str(path):
        raise ValueError(
            f"{path}: expected a name that no other module has, got {path.stem}, the name of "
            f"{other or 'a module of Python'}: rename the file"
        )
    found = [
        one
        for name, one in vars(module).items()
        if isinstance(one, type)
        and issubclass(one, Codec)
        and one.__module__ == module.__name__
        and not name.startswith("_")
    ]
    if not found:
        raise ValueError(
            f"{path}: expected a class derived from hvd_compress.codecs.Codec, got none"
        )
    try:
        return tuple(register(getattr(one, "name", one.__name__), one).name for one in found)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def check(codec: Codec) -> None:
    """Checks a codec of a file by :func:`hvd_compress.testing.check_codec`.

    The file may have a dictionary ``CHECK`` with further arguments of ``check_codec``, by codec name, such
    as ``{"ternary": {"clipped": clip}}``.

    Raises:
        ValueError: a property does not hold, or the codec raises an error.
    """
    module = sys.modules[type(codec).__module__]
    try:
        check_codec(codec, **getattr(module, "CHECK", {}).get(codec.name, {}))
    except AssertionError as error:
        raise ValueError(f"{module.__file__}: the contract of codecs is broken: {error}") from error
    except Exception as error:
        raise ValueError(f"{_told(error, Path(str(module.__file__)))}, in {codec!r}") from error


def digest(path: Path) -> str:
    """The SHA-256 of a file's content, as hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _told(error: Exception, path: Path) -> str:
    """An error with the last line of the file that it passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    where = f"{path}:{lines[-1]}" if lines else str(path)
    return f"{where}: {type(error).__name__}: {error}"
