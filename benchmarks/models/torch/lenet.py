"""LeNet-5 (LeCun et al., "Gradient-based learning applied to document recognition", 1998)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class LeNet(nn.Module):
    """LeNet-5 as it is taught today: ReLU, max pooling, every map connected to every map.

    The paper's 32x32 input is a 28x28 image with a border of two, which the first convolution adds.

    Args:
        classes: how many.
        image: height, width and channels.
    """

    def __init__(self, classes: int, image: tuple[int, ...] = (28, 28, 1)) -> None:
        super().__init__()
        height, width, channels = image
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2), 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, shape=(n, classes), of images, shape=(n, channels, height, width)."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.relu(self.fc2(x))
        return self.fc3(x)
