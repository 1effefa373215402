"""Normalization layers, with statistics and affine parameters that are not trivial."""

import torch
import torch.nn.functional as F
from torch import nn

from .registry import Net, add, architecture, floats, weight


def between(norm, width=4):
    return nn.Sequential(nn.Linear(3, width), norm, nn.Tanh(), nn.Linear(width, 2))


def image(norm):
    return Net(
        lambda s, x: s.head(torch.tanh(s.norm(s.conv(x))).flatten(2).amax(-1)),
        conv=nn.Conv2d(1, 4, 2, bias=False),
        norm=norm,
        head=nn.Linear(4, 2),
    )


add("layer_norm", lambda: between(nn.LayerNorm(4)), floats(3))
add("layer_norm_no_bias", lambda: between(nn.LayerNorm(4, bias=False)), floats(3))
add(
    "layer_norm_two_axes",
    lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm((2, 4)), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)),
    floats(2, 3),
)
add("layer_norm_not_affine", lambda: between(nn.LayerNorm(4, elementwise_affine=False)), floats(3))
add("rms_norm", lambda: between(nn.RMSNorm(4)), floats(3))
add(
    "rms_norm_tokens",
    lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4, eps=1e-5), nn.Tanh(), nn.Linear(4, 2)),
    floats(3, 3),
    "tokens",
)
add("batch_norm1d", lambda: between(nn.BatchNorm1d(4)), floats(3))
add("batch_norm1d_first", lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), floats(3))
add("batch_norm1d_last", lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), floats(3))
add(
    "batch_norm1d_sequence",
    lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Tanh(), nn.Flatten(), nn.Linear(9, 2)),
    floats(2, 4),
)
add("batch_norm2d", lambda: image(nn.BatchNorm2d(4)), floats(1, 4, 4))
add(
    "batch_norm3d_not_affine",
    lambda: nn.Sequential(
        nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2, affine=False), nn.Tanh(), nn.Flatten(), nn.Linear(2, 2)
    ),
    floats(1, 2, 2, 2),
)
add("group_norm", lambda: image(nn.GroupNorm(2, 4)), floats(1, 4, 4))
add("group_norm_vector", lambda: between(nn.GroupNorm(2, 4)), floats(3))
add("instance_norm_affine", lambda: image(nn.InstanceNorm2d(4, affine=True)), floats(1, 4, 4))
add(
    "instance_norm_running", lambda: image(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), floats(1, 4, 4)
)
add(
    "instance_norm1d",
    lambda: nn.Sequential(
        nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True), nn.Tanh(), nn.Flatten(), nn.Linear(9, 2)
    ),
    floats(2, 4),
)
add("local_response_norm", lambda: image(nn.LocalResponseNorm(2)), floats(1, 4, 4))


@architecture(floats(3))
def rms_norm_by_hand():
    """Llama's: written with pow, mean and rsqrt, the weight multiplied last."""
    return Net(
        lambda s, x: s.head(s.w * (s.fc(x) * torch.rsqrt(s.fc(x).pow(2).mean(-1, keepdim=True) + 1e-5))),
        fc=nn.Linear(3, 4),
        w=weight(4),
        head=nn.Linear(4, 2),
    )


@architecture(floats(3))
def layer_norm_functional_shared():
    """One scale serves two normalizations."""

    def call(s, x):
        h = F.layer_norm(s.a(x), (4,), s.w, s.b)
        h = F.layer_norm(s.m(torch.tanh(h)), (4,), weight=s.w, bias=None)
        return s.head(h)

    return Net(call, a=nn.Linear(3, 4), w=weight(4), b=weight(4), m=nn.Linear(4, 4), head=nn.Linear(4, 2))


@architecture(floats(1, 4, 4))
def film_conditioning():
    """Scale and shift of a normalization come from the data."""

    def call(s, x):
        h = s.norm(s.conv(x))
        gamma, beta = s.film(x.flatten(1)).chunk(2, 1)
        return s.head(torch.tanh(h * gamma[:, :, None, None] + beta[:, :, None, None]).mean((2, 3)))

    return Net(
        call,
        conv=nn.Conv2d(1, 3, 2),
        norm=nn.GroupNorm(1, 3, affine=False),
        film=nn.Linear(16, 6),
        head=nn.Linear(3, 2),
    )


@architecture(floats(1, 4, 4))
def layer_scale_convnext():
    """channels-last layer norm and a layer scale on the residual branch."""

    def call(s, x):
        x = s.stem(x)
        h = s.depth(x).permute(0, 2, 3, 1)
        h = s.down(F.gelu(s.up(s.norm(h)))) * s.gamma
        return s.head((x + h.permute(0, 3, 1, 2)).mean((2, 3)))

    return Net(
        call,
        stem=nn.Conv2d(1, 2, 2, stride=2),
        depth=nn.Conv2d(2, 2, 3, padding=1, groups=2),
        norm=nn.LayerNorm(2),
        up=nn.Linear(2, 4),
        down=nn.Linear(4, 2),
        gamma=weight(2),
        head=nn.Linear(2, 2),
    )
