"""Codecs and frontends say where a compressor's arguments belong."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import pytest
import torch

from hvd_compress.codecs import CODECS, ECQ, Codec, Int8, OneBit, TopK


@pytest.mark.parametrize("codec", CODECS.values())
def test_a_codec_takes_no_model_and_no_options(codec: Any) -> None:
    write = rf"Compressor\(model, {codec.__name__}\(\), warmup_steps=10\)"
    model = torch.nn.Linear(2, 2)
    for wrong in (model, model.named_parameters()):
        with pytest.raises(
            TypeError, match=rf"{codec.__name__}: expected settings.*a model.*{write}"
        ):
            codec(wrong)
    with pytest.raises(
        TypeError, match=f"got the keyword 'warmup_steps': this is a codec.*{write}"
    ):
        codec(warmup_steps=10)
    made: Codec = codec()
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(
    ("codec", "keyword", "meant"),
    (
        (Int8, "bits", r"ECQ\(levels=7\) 4"),
        (ECQ, "bits", r"ECQ\(levels=7\) 4"),
        (TopK, "ratio", r"TopK\(keep=41, chunk=4096\)"),
        (OneBit, "grouping", r"did you mean 'group'\?"),
    ),
)
def test_a_setting_of_another_name_is_named(codec: Any, keyword: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"got the keyword '{keyword}': .*{meant}"):
        codec(**{keyword: 4})


@pytest.mark.parametrize("frontend", ("ddp", "fsdp", "distributed"))
def test_a_frontend_says_where_codecs_are(frontend: str) -> None:
    module = importlib.import_module(f"hvd_compress.{frontend}")
    for codec in CODECS.values():
        with pytest.raises(AttributeError, match=f"`from hvd_compress import {codec.__name__}`"):
            getattr(module, codec.__name__)
    with pytest.raises(AttributeError, match=r"no attribute 'Nothing'$"):
        _ = module.Nothing
