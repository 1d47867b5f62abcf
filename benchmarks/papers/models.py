"""The networks of the papers' experiments that no other benchmark trains."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.models import MODELS
from benchmarks.models.torch import build as build_common

RELU, SIGMOID, DROPOUT = "relu", "sigmoid", "dropout"


def build(name: str, image: tuple[int, int, int]) -> nn.Module:
    """A freshly initialised model with ten classes; :data:`benchmarks.models.MODELS`, or one of those here.

    Args:
        name: the model's.
        image: height, width and channels of an input image; it comes channels-first.
    """
    inputs = image[0] * image[1] * image[2]
    if name == RELU:
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 10))
    if name == SIGMOID:
        return sigmoid(inputs)
    if name == DROPOUT:
        return dropout(inputs)
    return build_common(name, 10)


def image_of(name: str) -> tuple[int, int, int]:
    """Height, width and channels of a model's images."""
    height, width, channels = MODELS[name if name in MODELS else "lenet"].input
    return height, width, channels


def sigmoid(inputs: int, width: int = 128, hidden: int = 3) -> nn.Module:
    """Fully connected, with sigmoids, as 1-bit SGD's networks (section 5: seven layers of 2,048)."""
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(hidden):
        # Weights for which activations of sigmoids neither saturate nor vanish.
        linear = nn.Linear(inputs, width)
        nn.init.normal_(linear.weight, std=4 / inputs**0.5)
        layers += [linear, nn.Sigmoid()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, 10))


def dropout(inputs: int, hidden: int = 2, width: int = 1024) -> nn.Module:
    """The 8-bit paper's for MNIST, 784x1024x1024x10 with dropout of 0.2, 0.3 and 0.3 (section 3.4).

    Args:
        inputs: pixels of an image.
        hidden: layers between.
        width: units of each.
    """
    layers: list[nn.Module] = [nn.Flatten(), nn.Dropout(0.2)]
    for _ in range(hidden):
        layers += [nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(0.3)]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, 10))


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
