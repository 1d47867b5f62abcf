"""Models that get other weights, or other parameters to train, after their DiLoCo was made."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hvd_compress.distributed as hvdc
from hvd_compress import NoCompression, OneBit
from tests.diloco.nesterov import DiLoCo
from tests.ranks import on_ranks
from tests.torch_models import assert_same_bits

HALF = torch.bfloat16


class _Model(nn.Module):
    """A layer to train, and one that is not trained at first."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.head = nn.Linear(40, 30, dtype=dtype, device="cpu")
            self.body = nn.Linear(40, 40, dtype=dtype, device="cpu")
        self.body.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(x))
        return y


def _diloco(model: nn.Module, **options: int) -> DiLoCo:
    return DiLoCo(model, hvdc.Compressor(OneBit(), threshold=0), **{"sync_every": 2, **options})


def _train(diloco: DiLoCo, model: nn.Module, steps: int, lr: float = 0.1) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=lr)
    generator = torch.Generator(device="cpu").manual_seed(dist.get_rank() + 10 * diloco.steps)
    dtype = trained[0].dtype
    for _ in range(steps):
        x = torch.randn(8, 40, generator=generator, dtype=dtype, device="cpu")
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        diloco.step()


def _residual(diloco: DiLoCo) -> torch.Tensor | None:
    """A copy of this rank's residual of a weight."""
    found = diloco.compressor.state_dict()["tensors"]["body.weight"]["residual"]
    return None if found is None else found.clone()


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _assert_alike(model: nn.Module) -> None:
    told: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(told, _values(model))
    for one in told:
        assert_same_bits(one, told[0])


@on_ranks(2, launcher="torchrun")
def test_weights_that_are_loaded_before_the_first_step_are_what_ranks_begin_with() -> None:
    for only_first in (False, True):
        loaded = _Model(seed=5)
        model = _Model(seed=dist.get_rank())
        diloco = _diloco(model)
        if dist.get_rank() == 0 or not only_first:
            model.load_state_dict(loaded.state_dict())
        _train(diloco, model, 4, lr=0.0)
        assert_same_bits(_values(model), _values(loaded))

    # As if they had been loaded before, bit for bit.
    before, after = _Model(seed=5), _Model(seed=dist.get_rank())
    right, late = _diloco(before), _diloco(after)
    after.load_state_dict(loaded.state_dict())
    for diloco, model in ((right, before), (late, after)):
        _train(diloco, model, 6)
    assert_same_bits(_values(after), _values(before))
    assert_same_bits(late.common_parameters, right.common_parameters)


def _step_in_backward(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None


@on_ranks(2, launcher="torchrun")
def test_steps_in_the_backward_pass_are_not_taken_for_loaded_weights() -> None:
    """The optimizer's hooks are there before DiLoCo's, or after."""
    for before in (True, False):
        model = _Model(seed=5)

        def hook(model: nn.Module = model) -> None:
            for parameter in model.head.parameters():
                parameter.register_post_accumulate_grad_hook(_step_in_backward)

        if before:
            hook()
        outer = functools.partial(torch.optim.SGD, lr=1.0)
        diloco = DiLoCo(model, NoCompression(), sync_every=1, outer_optimizer=outer)
        if not before:
            hook()
        generator = torch.Generator(device="cpu").manual_seed(dist.get_rank())
        model(torch.randn(8, 40, generator=generator, device="cpu")).square().mean().backward()
        expected = _values(model.head)
        for one in expected.values():
            dist.all_reduce(one)
            one /= 2
        diloco.step()
        for name, one in model.head.named_parameters():
            torch.testing.assert_close(one.detach(), expected[name])


@on_ranks(2, launcher="torchrun")
def test_a_checkpoint_in_any_order_of_loading() -> None:
    model = _Model(seed=5)
    diloco = _diloco(model, sync_every=4)
    _train(diloco, model, 6)
    saved = copy.deepcopy([model.state_dict(), diloco.state_dict()])
    _train(diloco, model, 6)
    for order in (0, 1):
        again = _Model(seed=6)
        resumed = _diloco(again, sync_every=4)
        parts = [(again, saved[0]), (resumed, saved[1])]
        for one, state in parts[::-1] if order else parts:
            one.load_state_dict(copy.deepcopy(state))
        _train(resumed, again, 6)
        assert_same_bits(_values(again), _values(model))


@on_ranks(2, launcher="torchrun")
def test_other_parameters_to_train_are_an_error_on_every_rank() -> None:
    def unfreeze(model: _Model) -> None:
        model.body.requires_grad_(True)

    def replace(model: _Model) -> None:
        model.head = nn.Linear(40, 30, dtype=torch.float32, device="cpu")

    def add(model: _Model) -> None:
        model.more = nn.Linear(40, 30, dtype=torch.float32, device="cpu")

    def remove(model: _Model) -> None:
        del model.head

    changes: list[tuple[Callable[[_Model], None], str]] = [
        (unfreeze, "body.bias"),
        (replace, "head.weight"),
        (add, "more.weight"),
        (remove, r"without \['head.weight"),
    ]
    for change, message in changes:
        for everywhere in (True, False):
            model = _Model(seed=5)
            diloco = _diloco(model)
            _train(diloco, model, 3)
            before = {name: one.clone() for name, one in diloco.common_parameters.items()}
            wrong = everywhere or dist.get_rank() == 1
            if wrong:
                change(model)
            error = ValueError if wrong else hvdc.ExchangeError
            with pytest.raises(error, match=message):
                diloco.step()
            assert_same_bits(diloco.common_parameters, before)
            with pytest.raises(error, match=message):
                diloco.synchronize()


@on_ranks(2, launcher="torchrun")
def test_a_parameter_that_one_rank_adds_before_the_first_step() -> None:
    for trained in (True, False):
        model = nn.Linear(40, 30)
        diloco = DiLoCo(model, OneBit(), sync_every=2)
        if dist.get_rank():
            model.register_parameter("more", nn.Parameter(torch.zeros(3), requires_grad=trained))
        diloco.step()
        if not trained:
            diloco.step()
            assert diloco.rounds == 1
            continue
        with pytest.raises(ValueError if dist.get_rank() else hvdc.ExchangeError, match="more"):
            diloco.step()


@on_ranks(2, launcher="torchrun")
def test_what_is_frozen_later_stays_and_is_trained_again() -> None:
    """Bit for bit, although the outer optimizer has momentum and the codec has not sent everything."""
    for codec, dtype in ((OneBit(), torch.float32), ("none", torch.float32), ("none", HALF)):
        model = _Model(seed=5, dtype=dtype)
        model.body.requires_grad_(True)
        diloco = DiLoCo(model, hvdc.Compressor(codec, threshold=0), sync_every=2)
        _train(diloco, model, 4)
        model.body.requires_grad_(False)
        kept = _values(model.body)
        common = diloco.common_parameters["body.weight"].clone()
        residual = _residual(diloco)
        assert (residual is None) == (codec == "none")
        _train(diloco, model, 8)
        diloco.synchronize()
        assert_same_bits(_values(model.body), kept)
        assert torch.equal(diloco.common_parameters["body.weight"], common)
        if residual is not None:
            assert torch.equal(_residual(diloco), residual)
        model.body.requires_grad_(True)
        _train(diloco, model, 4)
        assert not torch.equal(model.body.weight, kept["weight"])
        _assert_alike(model)


@on_ranks(2, launcher="torchrun")
def test_what_was_learnt_before_a_parameter_was_frozen_arrives_once() -> None:
    """A fragment that is wholly frozen still takes part in exchanges, and they count."""
    for fragments in (1, [["head*"], ["body*"]]):
        for delay in (0, 1, 3):  # With 3, an exchange is under way when they are frozen.
            model = _Model(seed=5)
            model.body.requires_grad_(True)
            compressor = hvdc.Compressor(OneBit(), threshold=0)
            diloco = DiLoCo(model, compressor, sync_every=4, fragments=fragments, delay=delay)
            _train(diloco, model, 9)
            common = diloco.common_parameters["body.weight"].clone()
            model.body.requires_grad_(False)
            _train(diloco, model, 6)
            arrived = _values(model.body)
            assert_same_bits(arrived, {n: diloco.common_parameters[f"body.{n}"] for n in arrived})
            assert not torch.equal(arrived["weight"], common)
            rounds, saved = diloco.rounds, copy.deepcopy([model.state_dict(), diloco.state_dict()])
            _train(diloco, model, 8)
            assert diloco.rounds == rounds + 2 * len(diloco._fragments)
            assert_same_bits(_values(model.body), arrived)
            # The same in a job that starts again.
            again = _Model(seed=6)
            again.body.requires_grad_(True)
            compressor = hvdc.Compressor(OneBit(), threshold=0)
            resumed = DiLoCo(again, compressor, sync_every=4, fragments=fragments, delay=delay)
            again.load_state_dict(saved[0])
            resumed.load_state_dict(saved[1])
            again.body.requires_grad_(False)
            _train(resumed, again, 8)
            assert_same_bits(_values(again), _values(model))


@on_ranks(2, launcher="torchrun")
def test_a_frozen_fragment_while_plans_are_tried() -> None:
    model = _Model(seed=5)
    model.body.requires_grad_(True)
    compressor = hvdc.Auto(threshold=0)
    diloco = DiLoCo(model, compressor, sync_every=2, fragments=[["head*"], ["body*"]])
    _train(diloco, model, 3)
    diloco.synchronize()
    model.body.requires_grad_(False)
    kept = _values(model.body)
    _train(diloco, model, 40)
    assert_same_bits(_values(model.body), kept)
    model.body.requires_grad_(True)
    _train(diloco, model, 20)
    assert not torch.equal(model.body.weight, kept["weight"])
    diloco.synchronize()
    _assert_alike(model)


@on_ranks(2, launcher="torchrun")
def test_a_parameter_that_only_one_rank_freezes_is_an_error_on_every_rank() -> None:
    for fragments in (1, [["head*"], ["body*"]]):  # With 2, that rank has none in one of them.
        model = _Model(seed=5)
        model.body.requires_grad_(True)
        diloco = DiLoCo(
            model, hvdc.Compressor(OneBit(), threshold=0), sync_every=4, fragments=fragments
        )
        _train(diloco, model, 6)
        diloco.synchronize()
        model.body.requires_grad_(dist.get_rank() == 0)
        with pytest.raises(hvdc.ExchangeError, match=r"absent on rank [01]"):
            _train(diloco, model, 4)
        dist.barrier()


@on_ranks(2, launcher="torchrun")
def test_a_rank_that_joins_while_a_parameter_is_frozen() -> None:
    """It does not have to know that before it joins."""
    rank, alone = dist.get_rank(), dist.new_group([0])
    model = _Model(seed=rank)
    model.body.requires_grad_(True)
    if rank == 0:
        compressor = hvdc.Compressor(OneBit(), process_group=alone, threshold=0)
        diloco = DiLoCo(model, compressor, sync_every=2)
        _train(diloco, model, 4)
        model.body.requires_grad_(False)
        _train(diloco, model, 2)
        diloco.rebind()
    else:
        diloco = _diloco(model)
    kept = _values(model.body)
    model.body.requires_grad_(False)
    _train(diloco, model, 4)
    assert_same_bits(_values(model.body), kept)
    _assert_alike(model)
    model.body.requires_grad_(True)
    _train(diloco, model, 2)
    _assert_alike(model)


@on_ranks(2, launcher="torchrun")
def test_weights_that_are_loaded_into_frozen_parameters() -> None:
    """They count as what a rank has learnt, until nothing of them is left to send."""
    model = _Model(seed=5)
    model.body.requires_grad_(True)
    plain = functools.partial(torch.optim.SGD, lr=1.0)
    compressor = hvdc.Compressor(OneBit(), threshold=0)
    diloco = DiLoCo(model, compressor, sync_every=2, outer_optimizer=plain)
    _train(diloco, model, 4)
    model.body.requires_grad_(False)
    _train(diloco, model, 4)
    loaded = _Model(seed=7).body
    model.body.load_state_dict(loaded.state_dict())
    _train(diloco, model, 200)
    _assert_alike(model)
    assert (model.body.weight - loaded.weight).norm() < 0.05 * loaded.weight.norm()

    # On one rank alone, it is an error on both, until that rank sets them back.
    model.body.requires_grad_(True)
    diloco = DiLoCo(model, "none", sync_every=2)
    model.body.requires_grad_(False)
    _train(diloco, model, 2)
    kept = model.body.weight.clone()
    if dist.get_rank():
        model.body.weight.data.zero_()
    with pytest.raises(hvdc.ExchangeError, match=r"absent on rank [01]"):
        _train(diloco, model, 2)
    if dist.get_rank():
        model.body.weight.data.copy_(kept)
    diloco.synchronize()
    assert torch.equal(model.body.weight, kept)
    _assert_alike(model)


@on_ranks(2, launcher="torchrun")
def test_frozen_weights_of_any_dtype_are_those_of_the_first_rank() -> None:
    model = _Model(seed=dist.get_rank())
    for name, dtype in (
        ("codes", torch.uint8),
        ("halves", torch.bfloat16),
        ("turns", torch.cfloat),
    ):
        values = torch.full((5, 3), 1 + dist.get_rank(), dtype=dtype, device="cpu").t()
        model.register_parameter(name, nn.Parameter(values, requires_grad=False))
    diloco = _diloco(model)
    _train(diloco, model, 4)
    _assert_alike(model)
    assert model.codes.unique().tolist() == [1]  # type: ignore[operator]
    assert "codes" not in diloco.common_parameters


@on_ranks(2, launcher="torchrun")
def test_complex_parameters_are_refused_at_once() -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(3, dtype=torch.cfloat, device="cpu"))})
    with pytest.raises(TypeError, match="a: make a parameter of its view_as_real"):
        _diloco(model)
