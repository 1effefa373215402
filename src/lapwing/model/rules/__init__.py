"""The registry: one rule an operation. A new rule is one class and one line here."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from lapwing.model.rules import norm
from lapwing.model.rules.convolution import Convolution, TransposedConvolution
from lapwing.model.rules.elementwise import PReLU, Product, Sum
from lapwing.model.rules.embedding import Embedding
from lapwing.model.rules.linear import Addmm, Linear, Matmul
from lapwing.model.rules.norm import Norm
from lapwing.model.rules.rule import Call, MatrixRule, RowsRule, Rule

T = torch.Tensor

RULES: dict[Callable, Rule] = {
    F.linear: Linear(),
    **dict.fromkeys((torch.matmul, torch.mm, T.matmul, T.mm, T.__matmul__), Matmul()),
    **dict.fromkeys((torch.addmm, T.addmm), Addmm()),
    F.conv1d: Convolution(1),
    F.conv2d: Convolution(2),
    F.conv3d: Convolution(3),
    F.conv_transpose1d: TransposedConvolution(1),
    F.conv_transpose2d: TransposedConvolution(2),
    F.conv_transpose3d: TransposedConvolution(3),
    F.embedding: Embedding(),
    F.layer_norm: Norm(norm.layer_norm, trailing=True),
    F.rms_norm: Norm(norm.rms_norm, trailing=True),
    F.group_norm: Norm(norm.group_norm, trailing=False),
    F.batch_norm: Norm(norm.batch_norm, trailing=False),
    F.instance_norm: Norm(norm.instance_norm, trailing=False),
    **dict.fromkeys((F.prelu, torch.prelu, T.prelu), PReLU()),
    **dict.fromkeys((torch.add, T.add, T.add_, T.__add__, T.__radd__, T.__iadd__), Sum()),
    **dict.fromkeys((torch.sub, T.sub, T.sub_, T.__sub__, T.__isub__), Sum(-1)),
    **dict.fromkeys((torch.mul, T.mul, T.__mul__, T.__rmul__), Product()),
}

__all__ = ["RULES", "Call", "MatrixRule", "RowsRule", "Rule"]
