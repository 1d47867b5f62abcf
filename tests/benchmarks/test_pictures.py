"""Pictures of the same results are the same files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.pictures import figure


def draw(path: Path, width: float) -> str:
    with figure(path, size=(width, 2.6)) as ((axes,),):
        axes.plot([1, 2, 3], [1.0, 4.0, 9.0], "o-", label="squares")
        axes.legend()
    return path.read_text()


def test_the_last_bits_of_numbers_do_not_matter(tmp_path: Path) -> None:
    """Processors differ in them, and Matplotlib names clipping paths by digests of their corners."""
    first = draw(tmp_path / "first.svg", 3.4)
    assert draw(tmp_path / "second.svg", float(np.nextafter(3.4, 4))) == first
    assert "squares</text>" in first


def test_what_has_a_name_is_found_by_it(tmp_path: Path) -> None:
    text = draw(tmp_path / "picture.svg", 3.4)
    references = {part.split('"')[0].split(")")[0] for part in text.split("#")[1:]}
    names = {one for one in references if f'id="{one}"' in text}
    assert len(names) >= 2
    assert f"url(#{next(one for one in names if one.startswith('p'))})" in text
