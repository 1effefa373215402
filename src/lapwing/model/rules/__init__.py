"""One rule per torch operation: how its calls become rows of a Jacobian. `register` adds yours."""

import torch
from torch.nn import functional as F

from lapwing.model.rules import rule
from lapwing.model.rules.convolution import Convolution, TransposedConvolution
from lapwing.model.rules.elementwise import Norm, PReLU, Product, Sum
from lapwing.model.rules.rule import (
    RULES,
    Call,
    Embedding,
    Linear,
    MatrixRule,
    RowsRule,
    Rule,
    Samples,
    register,
    with_ones,
)

T = torch.Tensor

register(Linear(rule.read_linear), F.linear)
register(Linear(rule.read_matmul, transposed=True), torch.matmul, torch.mm, T.matmul, T.mm, T.__matmul__)
register(Linear(rule.read_addmm, transposed=True), torch.addmm, T.addmm)
register(Convolution(1), F.conv1d)
register(Convolution(2), F.conv2d)
register(Convolution(3), F.conv3d)
register(TransposedConvolution(1), F.conv_transpose1d)
register(TransposedConvolution(2), F.conv_transpose2d)
register(TransposedConvolution(3), F.conv_transpose3d)
register(Embedding(), F.embedding)
register(Norm(F.layer_norm, trailing=True), F.layer_norm)
register(Norm(F.rms_norm, trailing=True), F.rms_norm)
register(Norm(F.group_norm, trailing=False), F.group_norm)
register(Norm(F.batch_norm, trailing=False), F.batch_norm)
register(Norm(F.instance_norm, trailing=False), F.instance_norm)
register(PReLU(), F.prelu, torch.prelu, T.prelu)
register(Sum(), torch.add, T.add, T.add_, T.__add__, T.__radd__, T.__iadd__)
register(Sum(-1), torch.sub, T.sub, T.sub_, T.__sub__, T.__isub__)
register(Product(), torch.mul, T.mul, T.__mul__, T.__rmul__)

__all__ = ["RULES", "Call", "MatrixRule", "RowsRule", "Rule", "Samples", "register", "with_ones"]
