"""Linear layers with weights that are split over the ranks of a parallel group."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional as F

from hvd_compress.codecs import NoCompression
from hvd_compress.papers import functions
from hvd_compress.papers.group import ParallelGroup


class _ParallelLinear(nn.Module):
    _split: str

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: ParallelGroup,
        bias: bool,
        batch_parallel: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        **settings: bool,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if not isinstance(group, ParallelGroup):
            raise TypeError(f"{name}.group: expected a ParallelGroup, got {group!r}")
        self.in_features, self.out_features = in_features, out_features
        self.group = group
        self.batch_parallel = batch_parallel
        split = getattr(self, self._split)
        with group.telling():
            if split < 1 or split % group.size:
                raise ValueError(
                    f"{name}.{self._split}: expected a multiple of {group.size}, the number of ranks, got "
                    f"{split}"
                )
        group.agree(
            {
                "layer": name,
                "in_features": in_features,
                "out_features": out_features,
                "bias": bias,
                "batch_parallel": batch_parallel,
                "dtype": str(dtype or torch.get_default_dtype()),
                **settings,
            }
        )
        # All of the unsharded layer's weights are drawn, so that ranks with one seed have its parts.
        whole = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._take(whole.weight.detach(), None if whole.bias is None else whole.bias.detach())

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: ParallelGroup, **options: Any) -> Self:
        """Makes this rank's part of an unsharded layer, which must be the same on all ranks.

        Args:
            linear: the unsharded layer.
            group: the ranks and the codecs.
            options: further arguments, except for ``bias``, ``device`` and ``dtype``, which are taken from
                the unsharded layer.
        """
        weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        made = cls(
            linear.in_features,
            linear.out_features,
            group,
            bias=bias is not None,
            device=weight.device,
            dtype=weight.dtype,
            **options,
        )
        made._take(weight, bias)
        return made

    def _take(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        raise NotImplementedError

    def _check(self, x: torch.Tensor, features: int) -> None:
        with self.group.telling(x.device):
            if not x.dim() or x.shape[-1] != features:
                raise ValueError(
                    f"{type(self).__name__}: expected inputs of {features} features on each rank, got "
                    f"shape {tuple(x.shape)}"
                )

    def _parts(self, own: torch.Tensor) -> torch.Tensor:
        return self.group.gather(own.detach(), "parameters", NoCompression())

    def _as_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
        made = nn.Linear(
            self.in_features,
            self.out_features,
            bias is not None,
            device=weight.device,
            dtype=weight.dtype,
        )
        with torch.no_grad():
            made.weight.copy_(weight)
            if bias is not None:
                made.bias.copy_(bias)
        return made

    def extra_repr(self) -> str:
        """The description of the layer for ``print``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"rank={self.group.rank} of {self.group.size}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer with outputs that are split over the ranks (Dettmers, 2016, section 2.2).

    Rank ``r`` has the ``r``-th part of the rows of ``weight``, shape=(out_features / size, in_features),
    and of ``bias``. In the forward pass, the ranks' outputs are encoded and concatenated. In the backward
    pass, each rank's gradient of the inputs is a partial sum; these are encoded and added up. Gradients of
    the parameters stay on their ranks. If the inputs need no gradient, no gradient is sent for them.

    With the same random seed on all ranks, the weights are the parts of those that ``torch.nn.Linear``
    would draw.

    Args:
        in_features: the same as in ``torch.nn.Linear``.
        out_features: the same as in ``torch.nn.Linear``; a multiple of the number of ranks.
        group: the ranks and the codecs.
        bias: whether there is a bias.
        gather_output: whether every rank gets all outputs, shape=(..., out_features). If not, each rank
            keeps its own outputs, shape=(..., out_features / size), for a :class:`RowParallelLinear`.
        batch_parallel: whether each rank has inputs for its own samples, shape=(n, ..., in_features), after
            data-parallel layers. If so, inputs are encoded and concatenated
            (:func:`~hvd_compress.papers.gather_batch`), and outputs are those of all samples. If
            not, all ranks have the same inputs.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
        ExchangeError: the ranks' arguments differ; raised on every rank.
    """

    _split = "out_features"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: ParallelGroup,
        *,
        bias: bool = True,
        gather_output: bool = True,
        batch_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.gather_output = gather_output
        common = in_features, out_features, group, bias, batch_parallel, device, dtype
        super().__init__(*common, gather_output=gather_output)

    def to_linear(self) -> nn.Linear:
        """Makes the unsharded layer, exactly and on every rank; all ranks must call this."""
        bias = None if self.bias is None else self._parts(self.bias).flatten()
        return self._as_linear(self._parts(self.weight).flatten(0, 1), bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the outputs according to ``gather_output`` and ``batch_parallel``.

        Raises:
            ValueError, TypeError: another number of features, or a dtype that cannot be encoded.
            ExchangeError: the ranks' inputs have different shapes or dtypes, or another rank raises an
                error; raised on every rank.
            PayloadError: a payload was altered in transit; raised on every rank.
        """
        self._check(x, self.in_features)
        enter = functions.gather_batch if self.batch_parallel else functions.copy_to_parallel
        y = F.linear(enter(x, self.group), self.weight, self.bias)
        return functions.gather_from_parallel(y, self.group) if self.gather_output else y

    def _take(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        rank, size = self.group.rank, self.group.size
        self.weight = nn.Parameter(weight.chunk(size)[rank].clone())
        self.bias = None if bias is None else nn.Parameter(bias.chunk(size)[rank].clone())


class RowParallelLinear(_ParallelLinear):
    """A linear layer with inputs that are split over the ranks (Dettmers, 2016, section 2.2).

    Rank ``r`` has the ``r``-th part of the columns of ``weight``, shape=(out_features, in_features / size).
    In the forward pass, each rank's output is a partial sum; these are encoded and added up. ``bias`` is a
    parameter of the first rank alone, which adds it to its partial sum; on the other ranks, ``bias`` is
    None. So each parameter is on one rank, and ranks cannot drift apart.

    With the same random seed on all ranks, the weights are the parts of those that ``torch.nn.Linear``
    would draw.

    Args:
        in_features: the same as in ``torch.nn.Linear``; a multiple of the number of ranks.
        out_features: the same as in ``torch.nn.Linear``.
        group: the ranks and the codecs.
        bias: whether there is a bias.
        input_is_parallel: whether each rank has only its own part of the inputs,
            shape=(..., in_features / size), such as the outputs of a :class:`ColumnParallelLinear` without
            ``gather_output``. If not, all ranks have all inputs, and the backward pass encodes and
            concatenates the parts of the inputs' gradient.
        batch_parallel: whether each rank gets only the outputs for its own samples, for a loss or for
            data-parallel layers (:func:`~hvd_compress.papers.reduce_scatter_batch`). If not, all
            ranks get the same outputs.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Raises:
        TypeError, ValueError: an argument is wrong, "expected X, got Y".
        ExchangeError: the ranks' arguments differ; raised on every rank.
    """

    _split = "in_features"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: ParallelGroup,
        *,
        bias: bool = True,
        input_is_parallel: bool = False,
        batch_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.input_is_parallel = input_is_parallel
        self._has_bias = bias
        common = in_features, out_features, group, bias, batch_parallel, device, dtype
        super().__init__(*common, input_is_parallel=input_is_parallel)

    def to_linear(self) -> nn.Linear:
        """Makes the unsharded layer, exactly and on every rank; all ranks must call this."""
        bias = None
        if self._has_bias:
            own = self.weight.new_zeros(self.out_features) if self.bias is None else self.bias
            bias = self._parts(own)[0]
        return self._as_linear(functions._stacked(self._parts(self.weight)), bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the outputs according to ``batch_parallel``.

        Raises:
            ValueError, TypeError, ExchangeError, PayloadError: see :meth:`ColumnParallelLinear.forward`.
        """
        size = self.group.size
        self._check(x, self.in_features // size if self.input_is_parallel else self.in_features)
        if not self.input_is_parallel:
            x = functions.scatter_to_parallel(x, self.group)
        y = F.linear(x, self.weight, self.bias)
        if self.batch_parallel:
            return functions.reduce_scatter_batch(y, self.group)
        return functions.reduce_from_parallel(y, self.group)

    def _take(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        rank, size = self.group.rank, self.group.size
        self.weight = nn.Parameter(weight.chunk(size, 1)[rank].clone())
        self.bias = nn.Parameter(bias.clone()) if bias is not None and rank == 0 else None
