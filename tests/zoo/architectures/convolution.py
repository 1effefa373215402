"""Convolutions of every kind, transposed ones, and the networks made of them."""

import torch
import torch.nn.functional as F
from torch import nn

from .registry import Net, add, architecture, floats, weight

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def pooled(conv, out=4, head=2):
    """conv, tanh, mean over positions, linear."""
    return Net(lambda s, x: s.head(torch.tanh(s.conv(x)).flatten(2).mean(-1)), conv=conv, head=nn.Linear(out, head))


def flattened(conv, positions, out=4):
    return Net(lambda s, x: s.head(torch.tanh(s.conv(x)).flatten(1)), conv=conv, head=nn.Linear(out * positions, 2))


CASES = {
    "plain": {},
    "stride": {"stride": 2},
    "dilation": {"dilation": 2},
    "padded_stride": {"stride": 2, "padding": 1},
    "groups": {"groups": 2, "padding": 1},
    "depthwise": {"groups": 2, "padding": 1, "bias": False},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "replicate": {"padding": 2, "padding_mode": "replicate"},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "same": {"padding": "same"},
    "same_circular_dilated": {"padding": "same", "padding_mode": "circular", "dilation": 2},
    "valid": {"padding": "valid", "bias": False},
}
for _case, _options in CASES.items():
    for _d, _size in ((1, 6), (2, 5)):
        _out = 2 if _case == "depthwise" else 4
        add(
            f"conv{_d}d_{_case}",
            lambda d=_d, out=_out, o=_options: pooled(CONV[d](2, out, 3, **o), out),
            floats(2, *(_size,) * _d),
        )
add("conv3d", lambda: pooled(nn.Conv3d(1, 4, (2, 1, 2), stride=(1, 2, 1), padding=(1, 0, 1))), floats(1, 3, 3, 3))
add(
    "conv3d_groups_replicate",
    lambda: pooled(nn.Conv3d(2, 4, 2, groups=2, padding=1, padding_mode="replicate")),
    floats(2, 2, 2, 2),
)
add(
    "conv2d_anisotropic",
    lambda: flattened(nn.Conv2d(2, 4, (2, 3), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2), 3),
    floats(2, 4, 5),
)
add(
    "conv2d_same_even_kernel",
    lambda: Net(
        lambda s, x: s.head(torch.tanh(s.conv(x)).flatten(2).amax(-1)),
        conv=nn.Conv2d(1, 4, (2, 4), padding="same"),
        head=nn.Linear(4, 2),
    ),
    floats(1, 4, 4),
)
add("conv1d_one_position", lambda: flattened(nn.Conv1d(2, 4, 3), 1), floats(2, 3), once=True)
add("conv2d_one_position", lambda: flattened(nn.Conv2d(2, 4, 3, stride=2), 1), floats(2, 3, 3), once=True)
add("conv2d_one_position_groups", lambda: flattened(nn.Conv2d(2, 4, 3, groups=2), 1), floats(2, 3, 3), once=True)
add(
    "conv3d_one_position_depthwise",
    lambda: flattened(nn.Conv3d(2, 2, 2, groups=2, bias=False), 1, 2),
    floats(2, 2, 2, 2),
    once=True,
)

TRANSPOSED_CASES = {
    "plain": {},
    "stride": {"stride": 2},
    "output_padding": {"stride": 2, "padding": 1, "output_padding": 1},
    "groups": {"groups": 2, "padding": 1},
    "dilation": {"dilation": 2, "padding": 1, "bias": False},
    "depthwise": {"groups": 2, "stride": 2},
}
for _case, _options in TRANSPOSED_CASES.items():
    for _d in (1, 2):
        _out = 2 if _case == "depthwise" else 4
        add(
            f"conv_transpose{_d}d_{_case}",
            lambda d=_d, out=_out, o=_options: pooled(TRANSPOSED[d](2, out, 3, **o), out),
            floats(2, *(3,) * _d),
        )
add("conv_transpose3d", lambda: pooled(nn.ConvTranspose3d(1, 2, 2, stride=(1, 2, 1)), 2), floats(1, 2, 2, 2))
add(
    "conv_transpose2d_one_position",
    lambda: flattened(nn.ConvTranspose2d(3, 2, 3, padding=1), 1, 2),
    floats(3, 1, 1),
    once=True,
)


@architecture(floats(2, 3))
def conv_transpose_output_size():
    return Net(
        lambda s, x: s.head(torch.tanh(s.up(x, output_size=[6])).mean(-1)),
        up=nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1),
        head=nn.Linear(3, 2),
    )


@architecture(floats(2, 4, 4))
def conv_functional_keywords():
    def call(s, x):
        h = F.conv2d(weight=s.w, input=x, padding=1, stride=(2, 2), bias=None)
        h = F.conv2d(torch.tanh(h), s.v, s.b, 1, "same", groups=1)
        return h.mean((2, 3))

    return Net(call, w=weight(3, 2, 3, 3), v=weight(2, 3, 1, 1), b=weight(2))


@architecture(floats(1, 4, 4))
def conv_channels_last():
    net = pooled(nn.Conv2d(1, 4, 3, padding=1))
    return Net(lambda s, x: s.net(x.contiguous(memory_format=torch.channels_last)), net=net)


@architecture(floats(2, 4, 4))
def resnet_block():
    """conv, batch norm, in-place relu and addition, strided projection shortcut."""

    def call(s, x):
        h = F.relu_(s.bn1(s.conv1(x)))
        h = s.bn2(s.conv2(h))
        h += s.down(x)
        return s.head(F.relu(h, inplace=True).mean((2, 3)))

    down = nn.Sequential(nn.Conv2d(2, 3, 1, stride=2, bias=False), nn.BatchNorm2d(3))
    return Net(
        call,
        conv1=nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False),
        bn1=nn.BatchNorm2d(3),
        conv2=nn.Conv2d(3, 3, 3, padding=1, bias=False),
        bn2=nn.BatchNorm2d(3),
        down=down,
        head=nn.Linear(3, 2),
    )


@architecture(floats(1, 4, 4))
def resnet_padded_shortcut():
    """He et al.'s shortcut without parameters: subsample and pad with zero channels."""

    def call(s, x):
        x = F.relu(s.stem(x))
        h = s.conv2(F.relu(s.conv1(x)))
        return s.head(F.relu(h + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 1))).mean((2, 3)))

    return Net(
        call,
        stem=nn.Conv2d(1, 2, 3, padding=1),
        conv1=nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False),
        conv2=nn.Conv2d(4, 4, 3, padding=1, bias=False),
        head=nn.Linear(4, 2),
    )


@architecture(floats(1, 6, 6))
def lenet_pooling():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 2, 2),
        nn.Tanh(),
        nn.AvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2, 2),
    )


@architecture(floats(1, 4, 4))
def mobilenet_block():
    """expand, depthwise, squeeze and excite, project, residual."""

    def call(s, x):
        h = F.hardswish(s.expand(x))
        h = F.relu6(s.depth(h))
        gate = torch.sigmoid(s.excite(F.relu(s.squeeze(F.adaptive_avg_pool2d(h, 1)))))
        return s.head((s.project(h * gate) + x).flatten(1))

    return Net(
        call,
        expand=nn.Conv2d(1, 4, 1, bias=False),
        depth=nn.Conv2d(4, 4, 3, padding=1, groups=4),
        squeeze=nn.Conv2d(4, 2, 1),
        excite=nn.Conv2d(2, 4, 1),
        project=nn.Conv2d(4, 1, 1),
        head=nn.Linear(16, 2),
    )


@architecture(floats(1, 4, 4), "image")
def segmentation():
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 3, 1), nn.MaxPool2d(2))


@architecture(floats(1, 4, 4), "image")
def unet():
    def call(s, x):
        a = torch.tanh(s.enc(x))
        b = torch.tanh(s.down(a))
        return s.out(torch.cat([a, torch.tanh(s.up(b))], 1))

    return Net(
        call,
        enc=nn.Conv2d(1, 2, 3, padding=1),
        down=nn.Conv2d(2, 3, 2, stride=2),
        up=nn.ConvTranspose2d(3, 2, 2, stride=2),
        out=nn.Conv2d(4, 2, 1),
    )


@architecture(floats(2, 2, 2), "image")
def pixel_shuffle():
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.PixelShuffle(2), nn.Tanh(), nn.Upsample(scale_factor=0.5, mode="nearest")
    )


@architecture(floats(1, 3, 3), "image")
def upsampling_decoder():
    return nn.Sequential(
        nn.Upsample(size=(4, 4), mode="bilinear", align_corners=False), nn.Conv2d(1, 2, 3, stride=2, padding=1)
    )


@architecture(floats(2, 4, 4))
def modulated_conv():
    """StyleGAN2: the batch is folded into the groups of one convolution."""

    def call(s, x):
        n = x.shape[0]
        style = s.style(x.mean((2, 3)))
        w = s.w * style.view(n, 1, 2, 1, 1)
        w = w / (w.square().sum((2, 3, 4), keepdim=True) + 1e-3).sqrt()
        h = F.conv2d(x.reshape(1, n * 2, 4, 4), w.reshape(n * 3, 2, 3, 3), padding=1, groups=n)
        return s.head(torch.tanh(h.view(n, 3, 4, 4)).mean((2, 3)))

    return Net(call, style=nn.Linear(2, 2), w=weight(1, 3, 2, 3, 3), head=nn.Linear(3, 2))


@architecture(floats(1, 4, 4))
def unfold_conv():
    """A convolution written by hand with unfold and a matrix product."""

    def call(s, x):
        patches = F.unfold(x, 2, stride=2)  # (n, 4, positions)
        return s.head(torch.tanh(s.w @ patches).amax(-1))

    return Net(call, w=weight(3, 4), head=nn.Linear(3, 2))
