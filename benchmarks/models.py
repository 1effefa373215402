"""Networks that the package does not ship: ResNet-18, a small vision transformer, a wide last layer."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """conv-bn-relu-conv-bn plus a shortcut (a strided 1×1 convolution where shapes differ), then relu."""

    def __init__(self, width: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride > 1 or width != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(width, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(h + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 with the ImageNet stem (He et al. 2015, table 1): 11,181,642 parameters with ten classes."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
        widths += [(256, 512, 2), (512, 512, 1)]
        self.layers = nn.Sequential(*(Block(*width) for width in widths))
        self.linear = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.layers(self.stem(x)).mean((2, 3)))


class EncoderLayer(nn.Module):
    """Attention and a feed-forward net of four times the width, each after a layer norm (pre-norm)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class VisionTransformer(nn.Module):
    """Patches of 4×4, a learned position embedding, five layers of width 128, mean pooling: 1,007,370 parameters."""

    def __init__(self, classes: int = 10, width: int = 128, layers: int = 5, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.positions = nn.Parameter(0.02 * torch.randn(64, width))
        self.layers = nn.Sequential(*(EncoderLayer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.layers(tokens)).mean(1))


def wide_head(features: int = 1280, classes: int = 1000) -> nn.Sequential:
    """The end of an ImageNet classifier: pooled features, relu, one linear layer; 1,281,000 parameters."""
    return nn.Sequential(nn.ReLU(), nn.Linear(features, classes))


class NextTokens(nn.Module):
    """A causal language model as a plain function from tokens (B, T) to logits (B, T, vocabulary)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


class FlatTokens(nn.Module):
    """The same with one row per token, (B·T, vocabulary): the shape that peers accept."""

    def __init__(self, model: NextTokens) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).flatten(0, 1)
