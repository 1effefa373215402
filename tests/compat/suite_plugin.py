"""A pytest plugin for laplace-torch's own test suite: Lapwing as `laplace`, and a stand-in for torchvision.

The suite asks torchvision for one large network. Here it is a small convolutional one with a last layer of that name.
"""

import importlib.util
import sys
from types import ModuleType

import torch
from torch import nn

from lapwing.compat.laplace_torch import install


class SmallResNet(nn.Module):
    """Convolutions with a skip connection and a last layer `fc`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv1(x).relu()
        return self.fc((h + self.conv2(h)).mean((2, 3)))


if importlib.util.find_spec("torchvision") is None:
    torchvision, models = ModuleType("torchvision"), ModuleType("torchvision.models")
    models.wide_resnet50_2 = SmallResNet
    torchvision.models = models
    sys.modules |= {"torchvision": torchvision, "torchvision.models": models}

install()
