"""Small reference networks for the tests, the benchmarks and the experiments.

Example:
    >>> model = networks.pretrained_resnet(20)
    >>> logits = model(networks.standardize(datasets.images("cifar10", "test").inputs[:8]))
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from experiments import _datasets as datasets
from lapwing.cli.demo import lenet, small_cnn
from lapwing.errors import BadData


def mlp(sizes: Sequence[int], activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers of the given sizes with an activation between them; inputs are flattened.

    `mlp([784, 200, 200, 10])` is the MNIST network of the VaLLA paper (Ortega et al. 2024).
    """
    if len(sizes) < 2:
        raise BadData(f"an MLP needs at least an input and an output size, got {list(sizes)}")
    layers: list[nn.Module] = [nn.Flatten()]
    for width, following in pairwise(sizes):
        layers += [nn.Linear(width, following), activation()]
    return nn.Sequential(*layers[:-1])


class BasicBlock(nn.Module):
    """conv-bn-relu-conv-bn plus a shortcut without parameters, then relu (He et al. 2015, option A)."""

    def __init__(self, width: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.pad = (channels - width) // 2

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        shortcut = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.pad, self.pad))
        return functional.relu(h + shortcut)


class ResNet(nn.Module):
    """The CIFAR ResNet of depth 6n + 2 (He et al. 2015, section 4.2): 269,722 parameters at depth 20."""

    def __init__(self, depth: int, classes: int = 10) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise BadData(f"the depth of a CIFAR ResNet is 6n + 2 (8, 14, 20, 32, …), got {depth}")
        n = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(BasicBlock(16, 16, 1) for _ in range(n)))
        self.layer2 = nn.Sequential(*(BasicBlock(32 if k else 16, 32, 1 if k else 2) for k in range(n)))
        self.layer3 = nn.Sequential(*(BasicBlock(64 if k else 32, 64, 1 if k else 2) for k in range(n)))
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.bn1(self.conv1(x)))
        return self.linear(self.layer3(self.layer2(self.layer1(h))).mean((2, 3)))


def pretrained_resnet(depth: int) -> ResNet:
    """ResNet-20 or ResNet-32 with akamaster's CIFAR-10 weights from LAPWING_DATA, in evaluation mode."""
    if depth not in (20, 32):
        raise BadData(f"weights exist for depth 20 and 32, got {depth}")
    path = datasets.folder() / "cifar10-resnets" / f"resnet{depth}.safetensors"
    if not path.exists():
        raise BadData(f"{path} is missing")
    model = ResNet(depth)
    # the file leaves out BatchNorm's step counter, which evaluation does not read
    missing, unexpected = model.load_state_dict(load_file(path), strict=False)
    if unexpected or not all(name.endswith("num_batches_tracked") for name in missing):
        raise BadData(f"{path} does not hold this network: missing {missing}, unexpected {unexpected}")
    return model.eval()


def standardize(images: Tensor) -> Tensor:
    """Images in [0, 1], (N, 3, H, W), as the pretrained ResNets expect them (ImageNet's mean and deviation)."""
    mean = torch.tensor([0.485, 0.456, 0.406], dtype=images.dtype, device=images.device)
    deviation = torch.tensor([0.229, 0.224, 0.225], dtype=images.dtype, device=images.device)
    return (images - mean[:, None, None]) / deviation[:, None, None]


__all__ = ["BasicBlock", "ResNet", "lenet", "mlp", "pretrained_resnet", "small_cnn", "standardize"]
