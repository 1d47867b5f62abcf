"""The networks of the papers' experiments that no other benchmark trains."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks import data as data_sets
from benchmarks.data import Data
from benchmarks.models import CIFAR_DEPTHS, MODELS
from benchmarks.models.chains import CHAINS, Chain, Dense, Dropout, sigmoids
from benchmarks.models.torch import build as build_common
from benchmarks.models.torch import chain
from benchmarks.models.torch.transformer import Transformer

RELU, SIGMOID, DROPOUT = "relu", "sigmoid", "dropout"
RESNETS = tuple(f"resnet{depth}" for depth in CIFAR_DEPTHS)


def dropout(hidden: int = 2, width: int = 1024) -> Chain:
    """The 8-bit paper's network for MNIST, 784x1024x1024x10; dropout of 0.2, 0.3 and 0.3 (section 3.4)."""
    return Chain((Dropout(0.2), *(Dense(width), Dropout(0.3)) * hidden))


_OWN = {RELU: Chain((Dense(128),)), SIGMOID: sigmoids(3, 128), DROPOUT: dropout()}


def build(name: str, image: tuple[int, ...], classes: int = 10) -> nn.Module:
    """A freshly initialised model; of :data:`benchmarks.models.MODELS`, or one of those here.

    Args:
        name: the name of the model.
        image: the height, width and channels of an input image, which is channels-first.
        classes: the number of classes.
    """
    own = _OWN.get(name) or CHAINS.get(name)
    return chain.build(own, classes, image) if own else build_common(name, classes)


def data(name: str, choice: str) -> Data:
    """Returns the data that a model trains on: LeNet and fully connected networks take images of any size.

    Args:
        name: the name of the model.
        choice: the same as in :func:`benchmarks.data.read`; ``"text"`` is the default text.

    Raises:
        ValueError: there is no such data, or none to test on.
    """
    lenet = MODELS["lenet"]
    spec = MODELS.get(name, lenet)
    if spec is lenet:
        found = data_sets.read(choice, spec.input)
    elif name in RESNETS and choice == "digits":
        # Their average over the image takes any size, and digits have only 8x8 pixels of their own.
        found = data_sets.read(choice, (16, 16, 3))
    else:
        found = data_sets.load(spec, None if choice == spec.data else choice)
    if found.test is None:
        raise ValueError(f"{choice}: expected samples to test on, got none")
    return found


class WorkerGradients:
    """Gradients of the mean cross entropy, one for each worker.

    Args:
        model: the model, whose parameters may change between calls.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Batch normalization keeps statistics, which torch.func cannot update side by side; and it has no
        # rule for attention.
        self._together = not list(model.buffers()) and not isinstance(model, Transformer)
        self._gradient = torch.func.vmap(
            torch.func.grad_and_value(self._loss), in_dims=(None, 0, 0), randomness="different"
        )

    def __call__(
        self, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], float]:
        """The gradients by parameter, shape=(workers, ...) each, and the workers' mean loss.

        Args:
            images: shape=(workers, n, channels, height, width), float32; or text, shape=(workers, n,
                tokens), int64.
            labels: shape=(workers, n), or (workers, n, tokens), int64.
        """
        if self._together and len(images) > 1:
            parameters = {name: p.detach() for name, p in self._model.named_parameters()}
            gradients, losses = self._gradient(parameters, images, labels)
            return gradients, float(losses.mean())
        names, tensors = zip(*self._model.named_parameters(), strict=True)
        found, losses = [], []
        for x, y in zip(images, labels, strict=True):
            loss = cross_entropy(self._model(x), y)
            found.append(torch.autograd.grad(loss, tensors))
            losses.append(float(loss.detach()))
        stacked = [torch.stack(of_workers) for of_workers in zip(*found, strict=True)]
        return dict(zip(names, stacked, strict=True)), sum(losses) / len(losses)

    def _loss(
        self, parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        logits = torch.func.functional_call(self._model, parameters, (x,))
        return cross_entropy(logits, y)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy in nats of logits, shape=(..., classes), and labels, shape=(...), int64."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
