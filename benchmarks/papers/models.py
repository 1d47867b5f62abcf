"""The networks of the papers' experiments that no other benchmark trains."""

from __future__ import annotations

import math

import torch
from torch import nn

from benchmarks import data as data_sets
from benchmarks.data import Data
from benchmarks.models import MODELS
from benchmarks.models.torch import build as build_common
from benchmarks.models.torch.lenet import LeNet

RELU, SIGMOID, DROPOUT = "relu", "sigmoid", "dropout"


def build(name: str, image: tuple[int, ...], classes: int = 10) -> nn.Module:
    """A freshly initialised model; of :data:`benchmarks.models.MODELS`, or one of those here.

    Args:
        name: the model's.
        image: height, width and channels of an input image; it comes channels-first.
        classes: how many.
    """
    inputs = math.prod(image)
    if name == RELU:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, classes)
        )
    if name == SIGMOID:
        return sigmoid(inputs, classes=classes)
    if name == DROPOUT:
        return dropout(inputs, classes=classes)
    if name == "lenet":
        return LeNet(classes, image)
    return build_common(name, classes)


def data(name: str, choice: str) -> Data:
    """Returns the data that a model trains on: LeNet and fully connected networks take images of any size.

    Args:
        name: the model's.
        choice: as for :func:`benchmarks.data.read`.

    Raises:
        ValueError: there are no such images, or none to test on.
    """
    lenet = MODELS["lenet"]
    spec = MODELS.get(name, lenet)
    found = data_sets.read(choice, spec.input) if spec is lenet else data_sets.load(spec, choice)
    if found.test is None:
        raise ValueError(f"{choice}: expected images to test on, got none")
    return found


def sigmoid(inputs: int, width: int = 128, hidden: int = 3, classes: int = 10) -> nn.Module:
    """Fully connected, with sigmoids, as 1-bit SGD's networks (section 5: seven layers of 2,048)."""
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(hidden):
        # Weights for which activations of sigmoids neither saturate nor vanish.
        linear = nn.Linear(inputs, width)
        nn.init.normal_(linear.weight, std=4 / inputs**0.5)
        layers += [linear, nn.Sigmoid()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


def dropout(inputs: int, hidden: int = 2, width: int = 1024, classes: int = 10) -> nn.Module:
    """The 8-bit paper's for MNIST, 784x1024x1024x10 with dropout of 0.2, 0.3 and 0.3 (section 3.4).

    Args:
        inputs: pixels of an image.
        hidden: layers between.
        width: units of each.
        classes: how many.
    """
    layers: list[nn.Module] = [nn.Flatten(), nn.Dropout(0.2)]
    for _ in range(hidden):
        layers += [nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(0.3)]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


class WorkerGradients:
    """Gradients of the mean cross entropy, one for each worker.

    Args:
        model: whose; its parameters may change between calls.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Batch normalization keeps statistics, which torch.func cannot update side by side.
        self._together = not list(model.buffers())
        self._gradient = torch.func.vmap(
            torch.func.grad_and_value(self._loss), in_dims=(None, 0, 0), randomness="different"
        )

    def __call__(
        self, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], float]:
        """The gradients by parameter, shape=(workers, ...) each, and the workers' mean loss.

        Args:
            images: shape=(workers, n, channels, height, width), float32.
            labels: shape=(workers, n), int64.
        """
        if self._together and len(images) > 1:
            parameters = {name: p.detach() for name, p in self._model.named_parameters()}
            gradients, losses = self._gradient(parameters, images, labels)
            return gradients, float(losses.mean())
        names, tensors = zip(*self._model.named_parameters(), strict=True)
        found, losses = [], []
        for x, y in zip(images, labels, strict=True):
            loss = nn.functional.cross_entropy(self._model(x), y)
            found.append(torch.autograd.grad(loss, tensors))
            losses.append(float(loss.detach()))
        stacked = [torch.stack(of_workers) for of_workers in zip(*found, strict=True)]
        return dict(zip(names, stacked, strict=True)), sum(losses) / len(losses)

    def _loss(
        self, parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        logits = torch.func.functional_call(self._model, parameters, (x,))
        return nn.functional.cross_entropy(logits, y)
