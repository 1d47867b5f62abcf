"""The calls of the frontends' compressors, each in its framework; no ranks are needed."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pickle
import pydoc
import re
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import pytest

import hvd_compress
from hvd_compress import codecs
from hvd_compress.codecs import CODECS, Codec
from hvd_compress.codecs.registry import FACTORS
from tests.frameworks import without_keras, without_tensorflow
from tests.ranks import on_ranks

FRONTENDS = ("torch", "distributed", "ddp", "fsdp", "tensorflow", "keras")
NAMED = ("torch", "tensorflow", "keras")
"""Frontends for Horovod, whose compressors Horovod's users know by the codecs' names."""


@pytest.fixture(params=FRONTENDS)
def hvdc(request: pytest.FixtureRequest) -> Any:
    """A frontend."""
    return _module(request.param)


@pytest.fixture(params=NAMED)
def named(request: pytest.FixtureRequest) -> Any:
    """A frontend whose compressors have the codecs' names, too."""
    return _module(request.param)


def _module(frontend: str) -> Any:
    reasons = {"tensorflow": without_tensorflow, "keras": without_keras}
    if frontend in reasons and (reason := reasons[frontend]()):
        pytest.skip(reason)
    return importlib.import_module(f"hvd_compress.{frontend}")


def _codecs_of(named: Any) -> list[type[Codec]]:
    return [*(CODECS | FACTORS if named.__name__.endswith("torch") else CODECS).values()]


def test_codecs_are_in_the_package_itself() -> None:
    for codec in (CODECS | FACTORS).values():
        assert getattr(hvd_compress, codec.__name__) is codec
        assert codec.__name__ in hvd_compress.__all__


def test_every_option_is_in_signature_and_help(hvdc: Any) -> None:
    signature = inspect.signature(hvdc.Compressor)
    assert all(p.kind is not p.VAR_KEYWORD for p in signature.parameters.values())
    text = pydoc.plain(pydoc.render_doc(hvdc.Compressor))
    for name in signature.parameters:
        assert f"{name}: " in text


def test_the_exchange_follows_the_number_of_ranks_unless_named(hvdc: Any) -> None:
    assert inspect.signature(hvdc.Compressor).parameters["exchange"].default == "auto"


def test_typed_options_are_those_that_there_are() -> None:
    from hvd_compress.engine.compressor import CompressorBase
    from hvd_compress.engine.options import Options

    parameters = inspect.signature(CompressorBase.__init__).parameters.values()
    assert set(get_type_hints(Options)) == {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_tensorflow_has_the_shared_options() -> None:
    if reason := without_tensorflow():
        pytest.skip(reason)
    from hvd_compress.exchanges.options import SharedOptions
    from hvd_compress.tensorflow import Compressor

    assert set(get_type_hints(SharedOptions)) <= set(inspect.signature(Compressor).parameters)


def test_named_compressors_pass_all_fields_on(named: Any) -> None:
    for codec in _codecs_of(named):
        cls = getattr(named, codec.__name__)
        assert cls.__name__ in named.__all__
        assert issubclass(cls, named.Compressor) and pickle.loads(pickle.dumps(cls)) is cls
        parameters = inspect.signature(cls).parameters
        fields = {field.name: field.default for field in dataclasses.fields(codec)}
        assert fields.items() <= {(p.name, p.default) for p in parameters.values()}
        others = parameters.keys() - fields.keys()
        assert others == inspect.signature(named.Compressor).parameters.keys() - {"codec"}


@on_ranks(1)
def test_a_named_compressor_is_one_with_that_codec() -> None:
    import torch

    import hvd_compress.torch as hvdc

    model = torch.nn.Linear(40, 40)
    settings: dict[str, dict[str, Any]] = {
        "OneBit": {"group": 64},
        "Int8": {"kind": "static", "group": 128, "offset": 2},
        "Ternary": {"bucket": 64, "clip": 3.0, "coding": "entropy"},
        "ECQ": {"levels": 3, "norm": "l2", "bucket": 64, "coding": "entropy"},
        "QSGD": {"levels": 3, "norm": "l2", "bucket": 64, "coding": "entropy"},
        "TopK": {"chunk": 128, "keep": 9, "bits": 4},
        "PowerSGD": {"rank": 3},
        "BF16": {"rounding": "stochastic"},
    }
    rotated = {name: {"bucket": 64, "rotate": True} for name in ("ECQ", "QSGD")}
    pairs = [(codec, settings.get(codec.__name__, {})) for codec in _codecs_of(hvdc)]
    pairs += [(getattr(codecs, name), fields) for name, fields in rotated.items()]
    for codec, fields in pairs:
        made = getattr(hvdc, codec.__name__)(model, threshold=0, **fields)
        assert made.routes()["weight"].codec == codec(**fields)
        assert made.routes()["weight"].feedback == codec(**fields).feedback


@on_ranks(1)
def test_the_model_is_called_model() -> None:
    import torch

    import hvd_compress.torch as hvdc

    model = torch.nn.Linear(40, 40)
    for made in (
        hvdc.Int8(model=model),
        hvdc.Compressor(model=model, codec="Int8"),
        hvdc.Auto(model=model),
    ):
        assert made.routes().keys() == {"weight", "bias"}
    for make in (hvdc.Int8, hvdc.Auto):
        with pytest.raises(TypeError, match=r"expected 'model', got an unexpected .*'named_param"):
            make(named_parameters=model.named_parameters())
    with pytest.raises(TypeError, match=r"keyword 'bits': .*ECQ\(levels=7\) 4"):
        hvdc.Int8(model, bits=4)


@pytest.mark.parametrize("frontend", ("ddp", "distributed", "fsdp"))
def test_frontends_without_names_of_codecs_say_what_to_write(frontend: str) -> None:
    for codec in (CODECS | FACTORS).values():
        name = codec.__name__
        with pytest.raises(AttributeError, match=rf"write Compressor\(model, {name}\(\)\), with"):
            getattr(_module(frontend), name)


def test_wrong_calls_are_answered(named: Any) -> None:
    keywords = ", ".join(inspect.signature(named.OneBit).parameters)
    expected = (
        f"OneBit: expected 'group', got an unexpected keyword 'gruop'. Its keywords: {keywords}"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(expected)}$"):
        named.OneBit(None, gruop=3)


def test_missing_arguments_are_named(hvdc: Any) -> None:
    needed = "model, Int8()" if _needs_a_model(hvdc) else "Int8()"
    with pytest.raises(
        TypeError, match=f"^Compressor: expected {re.escape(f'Compressor({needed})')}, got no"
    ):
        hvdc.Compressor()
    near = re.escape("Compressor: expected 'threshold', got an unexpected keyword 'treshold'")
    with pytest.raises(TypeError, match=near):
        hvdc.Compressor(codecs.Int8(), treshold=3)


def _needs_a_model(hvdc: Any) -> bool:
    return not any(name in hvdc.Compressor.__module__ for name in ("tensorflow", "distributed"))


def test_horovod_is_given_a_class() -> None:
    import horovod.torch as hvd
    import torch

    import hvd_compress.torch as hvdc

    for cls in (hvdc.OneBit, hvdc.Auto):
        write = rf"the class {cls.__name__}: write compression={cls.__name__}\(model\)"
        with pytest.raises(TypeError, match=write):
            hvd.allreduce(torch.ones(3), op=hvd.Average, compression=cls)


def test_horovod_is_given_a_codec() -> None:
    import horovod.torch as hvd
    import torch

    with pytest.raises(
        TypeError, match=r"the codec Int8: write compression=hvdc\.Compressor\(model, Int8"
    ):
        hvd.allreduce(torch.ones(3), op=hvd.Average, compression=codecs.Int8())


def test_tensorflow_is_given_a_class() -> None:
    if reason := without_tensorflow():
        pytest.skip(reason)
    import tensorflow as tf

    import hvd_compress.tensorflow as hvdc

    for cls in (hvdc.OneBit, hvdc.Auto):
        write = rf"the class {cls.__name__}: write compression={cls.__name__}\(\)"
        with pytest.raises(TypeError, match=write):
            cls.compress(tf.zeros(3))


def test_keras_is_given_a_class() -> None:
    if reason := without_keras():
        pytest.skip(reason)
    import keras

    import hvd_compress.keras as hvdc

    write = r"the class OneBit: write DistributedOptimizer\(optimizer, OneBit\(\)\)"
    with pytest.raises(TypeError, match=write):
        hvdc.DistributedOptimizer(keras.optimizers.SGD(), hvdc.OneBit)


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("state", "got"),
    (
        (
            lambda hvdc: hvdc.Compressor,
            r"the class Compressor: write .*register_comm_hook\(Compressor\(model, Int8\(\)\), hook\)",
        ),
        (
            lambda hvdc: None,
            r"None: write .*register_comm_hook\(Compressor\(model, Int8\(\)\), hook\)",
        ),
        (
            lambda hvdc: codecs.OneBit(),
            r"the codec OneBit\(.*register_comm_hook\(Compressor\(model, OneBit\(",
        ),
        (lambda hvdc: "onebit", "type str: write"),
    ),
    ids=("class", "None", "codec", "str"),
)
@pytest.mark.usefixtures("process_group")
def test_ddp_is_given_another_state(state: Callable[[Any], Any], got: str) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import hvd_compress.ddp as hvdc

    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model.register_comm_hook(state(hvdc), hvdc.hook)
    with pytest.raises((TypeError, RuntimeError), match=f"hook: expected an instance .* {got}"):
        model(torch.ones(2, 4)).sum().backward()
