"""Wrong arguments are refused where they are given, with what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Any

import numpy as np
import pytest

from hvd_compress.codecs import (
    CODECS,
    ECQ,
    QSGD,
    Codec,
    ErrorFeedback,
    Int8,
    NoCompression,
    OneBit,
    Ternary,
    codec_from_config,
)
from hvd_compress.codecs.feedback import OFF
from hvd_compress.exchanges.routing import Route

BAD_GROUPS = (
    (0, ValueError),
    (-64, ValueError),
    (63, ValueError),
    (100, ValueError),
    (65536 + 64, ValueError),
    ("layer", ValueError),
    (64.0, TypeError),
    (None, TypeError),
    (True, TypeError),
    ((64,), TypeError),
)

WRONG: tuple[tuple[Callable[..., Any], dict[str, Any], type[Exception]], ...] = (
    *((OneBit, {"group": value}, error) for value, error in BAD_GROUPS),
    *((Int8, {"group": value}, error) for value, error in BAD_GROUPS),
    *((Ternary, {"bucket": value}, error) for value, error in BAD_GROUPS),
    *((ECQ, {"bucket": value}, error) for value, error in BAD_GROUPS),
    (Int8, {"group": "row"}, ValueError),
    (Ternary, {"bucket": "column"}, ValueError),
    (ECQ, {"bucket": "row"}, ValueError),
    (Int8, {"kind": "tree"}, ValueError),
    (Int8, {"kind": None}, ValueError),
    (Int8, {"offset": 21}, ValueError),
    (Int8, {"offset": -21}, ValueError),
    (Int8, {"offset": 1.0}, TypeError),
    (Int8, {"offset": True}, TypeError),
    (Ternary, {"clip": 0.0}, ValueError),
    (Ternary, {"clip": -2.5}, ValueError),
    (Ternary, {"clip": 1001}, ValueError),
    (Ternary, {"clip": float("nan")}, ValueError),
    (Ternary, {"clip": float("inf")}, ValueError),
    (Ternary, {"clip": "2.5"}, TypeError),
    (ECQ, {"levels": 0}, ValueError),
    (ECQ, {"levels": 128}, ValueError),
    (ECQ, {"levels": 4.0}, TypeError),
    (ECQ, {"levels": True}, TypeError),
    (ECQ, {"norm": "l1"}, ValueError),
    (ECQ, {"norm": 2}, ValueError),
    (ErrorFeedback, {"alpha": -0.1}, ValueError),
    (ErrorFeedback, {"alpha": 1.1}, ValueError),
    (ErrorFeedback, {"alpha": float("nan")}, ValueError),
    (ErrorFeedback, {"alpha": "1"}, TypeError),
    (ErrorFeedback, {"alpha": None}, TypeError),
    (ErrorFeedback, {"beta": -0.1}, ValueError),
    (ErrorFeedback, {"beta": 1.5}, ValueError),
    (ErrorFeedback, {"beta": True}, TypeError),
)


@pytest.mark.parametrize(("make", "arguments", "error"), WRONG)
def test_wrong_arguments(
    make: Callable[..., Any], arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error) as raised:
        make(**arguments)
    ((field, value),) = arguments.items()
    message = str(raised.value)
    assert message.startswith(f"{make.__name__}.{field}: expected ")
    assert message.endswith(f", got {value!r}")


@pytest.mark.parametrize("group", (64, 128, 65536, "tensor", "row", "column"))
def test_groups_that_onebit_takes(group: Any) -> None:
    assert OneBit(group).group == group


@pytest.mark.parametrize(
    ("one", "other"),
    (
        (Ternary(clip=2), Ternary(clip=2.0)),
        (Ternary(clip=2.5), Ternary(clip=np.float32(2.5))),  # type: ignore[arg-type]
        (ECQ(levels=4), ECQ(levels=np.int64(4))),  # type: ignore[arg-type]
        (Int8(offset=2), Int8(offset=np.int8(2))),  # type: ignore[arg-type]
    ),
)
def test_equal_configurations_have_equal_hashes(one: Codec, other: Codec) -> None:
    assert one == other
    assert one.to_config() == other.to_config()
    assert one.config_hash() == other.config_hash()
    assert repr(one) == repr(other)


def test_feedback_is_stored_as_floats() -> None:
    feedback = ErrorFeedback(1, np.float32(0.5))  # type: ignore[arg-type]
    assert repr(feedback).startswith("ErrorFeedback(alpha=1.0, beta=0.5, ")


def test_configurations_are_frozen() -> None:
    for codec in (OneBit(), Int8(), Ternary(), ECQ()):
        for field in codec.__dataclass_fields__:
            with pytest.raises(FrozenInstanceError):
                setattr(codec, field, 64)


@pytest.mark.parametrize(
    ("config", "error"),
    (
        ({}, ValueError),
        ({"codec": "zip"}, ValueError),
        ({"codec": "onebit", "group": 65}, ValueError),
        ({"codec": "onebit", "groups": 64}, TypeError),
    ),
    ids=str,
)
def test_wrong_json(config: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        codec_from_config(config)
    if "codec" in config and config["codec"] in CODECS:
        return
    with pytest.raises(error, match=r"expected one of 'onebit', .*, got"):
        codec_from_config(config)


def test_papers_feedback() -> None:
    feedback = {name: (codec.feedback.alpha, codec.feedback.beta) for name, codec in CODECS.items()}
    assert feedback["onebit"] == (1.0, 1.0)
    assert all(not CODECS[name].feedback.enabled for name in ("int8", "ternary", "qsgd", "none"))


def test_ecq_has_its_papers_feedback_with_its_papers_norm() -> None:
    """Records show no gain from feedback with the largest value as the norm."""
    paper = ErrorFeedback(0.01, 1.0)
    assert ECQ(4, "l2").feedback == Route(ECQ(1, "l2", coding="entropy")).feedback == paper
    assert OFF == ECQ.feedback == ECQ().feedback == ECQ(1).feedback == QSGD(4, "l2").feedback
    assert replace(ECQ(norm="l2"), norm="linf").feedback == OFF


def test_the_defaults_of_four_bits_are_one_bucket_and_no_residual() -> None:
    assert ECQ().bucket == QSGD().bucket == 512
    assert Route(ECQ()).feedback == Route(QSGD()).feedback == OFF


def test_a_codec_has_no_feedback_unless_it_says_so() -> None:
    @dataclass(frozen=True)
    class Other(Codec):
        pass

    assert not Other().feedback.enabled


def test_payload_sizes_in_bits() -> None:
    assert OneBit().bits_per_element((0,)) == float("inf")
    assert NoCompression().bits_per_element((4,)) == 8 * 48 / 4
