"""AlexNet in one tower (Krizhevsky, "One weird trick for parallelizing CNNs", 2014)."""

from __future__ import annotations

import torch
from torch import nn


class AlexNet(nn.Module):
    """Five convolutions and three wide layers, which hold 96% of its 61 million parameters."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
        )
        self.drop1 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(256 * 6 * 6, 4096)
        self.drop2 = nn.Dropout(0.5)
        self.fc2 = nn.Linear(4096, 4096)
        self.fc3 = nn.Linear(4096, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, shape=(n, classes), of images, shape=(n, 3, 224, 224)."""
        x = self.features(x).flatten(1)
        x = torch.relu(self.fc1(self.drop1(x)))
        x = torch.relu(self.fc2(self.drop2(x)))
        return self.fc3(x)
