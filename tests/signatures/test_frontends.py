"""What the frontends' classes say of themselves, each in its framework; no ranks are needed."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pydoc
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hvd_compress.codecs import SCHEMES
from hvd_compress.codecs.docstrings import entries_of
from hvd_compress.codecs.frontends import title_of
from scripts import stubs
from tests.frameworks import without_keras, without_tensorflow

FRONTENDS = ("torch", "distributed", "ddp", "fsdp", "tensorflow", "keras")


@pytest.fixture(params=FRONTENDS)
def hvdc(request: pytest.FixtureRequest) -> Any:
    """A frontend."""
    reasons = {"tensorflow": without_tensorflow, "keras": without_keras}
    if request.param in reasons and (reason := reasons[request.param]()):
        pytest.skip(reason)
    return importlib.import_module(f"hvd_compress.{request.param}")


def test_every_scheme_has_a_class(hvdc: Any) -> None:
    for scheme in SCHEMES.values():
        title = title_of(scheme)
        cls = getattr(hvdc, title)
        assert title in hvdc.__all__
        assert issubclass(cls, hvdc.Compressor) and pickle.loads(pickle.dumps(cls)) is cls


def test_signature_and_help_show_every_option(hvdc: Any) -> None:
    own = [
        p for p in inspect.signature(hvdc.Compressor).parameters if p not in ("codec", "feedback")
    ]
    signature = inspect.signature(hvdc.OneBit)
    assert sorted(signature.parameters) == sorted([*own, "group", "alpha", "beta"])
    documented = entries_of(hvdc.OneBit, "Args")
    assert documented.keys() == signature.parameters.keys()
    text = pydoc.plain(pydoc.render_doc(hvdc.OneBit))
    for parameter in signature.parameters.values():
        assert parameter.annotation is not parameter.empty
        assert f"{parameter.name}: " in text
    assert "group: Union[int, Literal['tensor', 'row', 'column']] = 1024" in text
    model = ("model",) if _needs_a_model(hvdc) else ()
    bound = signature.bind(*model, group=64, alpha=0.5, exchange="two_shot")
    assert bound.arguments["group"] == 64


def test_wrong_calls_are_answered(hvdc: Any) -> None:
    keywords = ", ".join(inspect.signature(hvdc.OneBit).parameters)
    expected = (
        f"OneBit: expected 'group', got an unexpected keyword 'gruop'. Its keywords: {keywords}"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(expected)}$"):
        hvdc.OneBit(None, gruop=3)
    if _needs_a_model(hvdc):
        with pytest.raises(TypeError, match=r"^OneBit: expected OneBit\(model\), got no model$"):
            hvdc.OneBit()
    else:
        with pytest.raises(TypeError, match=r"^OneBit: expected OneBit\(\), .* got 1 positional"):
            hvdc.OneBit(None)


def _needs_a_model(hvdc: Any) -> bool:
    return not any(name in hvdc.Compressor.__module__ for name in ("tensorflow", "distributed"))


@pytest.mark.parametrize("frontend", stubs.FRONTENDS)
def test_stub_is_up_to_date(frontend: str) -> None:
    if frontend == "tensorflow" and (reason := without_tensorflow()):
        pytest.skip(reason)
    assert stubs.path_of(frontend).read_text() == stubs.stub(frontend), (
        "run: python -m scripts.stubs"
    )


def test_horovod_is_given_a_class() -> None:
    import horovod.torch as hvd
    import torch

    import hvd_compress.torch as hvdc

    for cls in (hvdc.OneBit, hvdc.Auto):
        write = rf"the class {cls.__name__}: write compression={cls.__name__}\(model\)"
        with pytest.raises(TypeError, match=write):
            hvd.allreduce(torch.ones(3), op=hvd.Average, compression=cls)


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
    """Of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("state", "got"),
    (
        (
            lambda hvdc: hvdc.Int8,
            r"the class Int8: write .*register_comm_hook\(Int8\(model\), hook\)",
        ),
        (lambda hvdc: None, r"None: write .*register_comm_hook\(OneBit\(model\), hook\)"),
        (lambda hvdc: "onebit", "type str: write"),
    ),
    ids=("class", "None", "str"),
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
