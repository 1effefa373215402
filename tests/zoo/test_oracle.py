"""The oracle can be wrong too: it is checked against finite differences and, on simple nets, against torch.func."""

import pytest
import torch
from torch.func import functional_call, jacrev

from .architectures import ZOO
from .oracle import (
    call,
    canonical,
    ggn,
    hessian_bernoulli,
    hessian_categorical,
    jacobian,
    outputs,
    score_bernoulli,
    score_categorical,
    score_gaussian,
    selected,
    take,
)

# Where autograd is told to return something else than the derivative: rounding passed straight through, detached
# branches, a hook on a gradient, gradients divided by counts or dropped at a padding index, weights renormalized
# by the forward itself.
NOT_A_DERIVATIVE = {
    "stop_gradient",
    "quantized_weight",
    "tensor_hook_in_forward",
    "embedding_scale_grad_by_freq",
    "embedding_max_norm",
    "embedding_padding_idx",
    "embedding_negative_padding_idx",
    "embedding_bag_padding_idx",
    "embedding_tied_module_head",
    "hf_bert",
    "hf_bert_tokens",
    "spectral_norm_linear",  # the power iteration's vectors are constants
}
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
DIMS = {"scalar": 1, "vector": 2, "tokens": 3, "image": 4}


@pytest.mark.parametrize("name", ZOO)
def test_architectures_are_what_they_say(name):
    arch = ZOO[name]
    module, x = arch.build().eval(), arch.inputs(4)
    with torch.no_grad():
        f = call(module, x)
        alone = [call(module, take(x, slice(n, n + 1))) for n in range(4)]
    assert f.dtype == torch.float64
    assert f.shape[0] == 4
    assert f.dim() == DIMS[arch.kind]
    torch.testing.assert_close(torch.cat(alone), f, rtol=1e-10, atol=1e-12, msg="samples mix")
    assert 0 < sum(p.numel() for p in selected(module).values()) <= 800
    again = arch.build()
    for a, b in zip(arch.build().state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", [k for k, a in ZOO.items() if k not in NOT_A_DERIVATIVE and a.tolerance <= 1e-10])
def test_jacobian_equals_finite_differences(name):
    arch = ZOO[name]
    module, x = arch.build().eval(), arch.inputs(3)
    j = jacobian(module, x)
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(j.shape[-1], dtype=torch.float64, generator=generator)
    step, sides = 1e-6, []
    for sign in (1, -2):  # to +step, then to -step
        with torch.no_grad():
            params = selected(module).values()
            for p, d in zip(params, v.split([p.numel() for p in params]), strict=True):
                p.add_(sign * step * d.view_as(p))
        sides.append(outputs(module, x).flatten(1))
    torch.testing.assert_close(j @ v, (sides[0] - sides[1]) / (2 * step), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "name", ["mlp_tanh", "conv2d_circular", "layer_norm", "module_called_twice", "tokens_linear", "unet"]
)
def test_jacobian_equals_jacrev(name):
    arch = ZOO[name]
    module, x = arch.build().eval(), arch.inputs(3)
    params = {k: p.detach() for k, p in selected(module).items()}
    j = jacrev(lambda p: canonical(functional_call(module, p, (x,))).flatten(1))(params)
    flat = torch.cat([v.flatten(2) for v in j.values()], -1)
    torch.testing.assert_close(jacobian(module, x), flat, rtol=1e-12, atol=1e-13)


def test_output_hessians_and_scores_are_derivatives_of_log_densities():
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(1, 2, 3, dtype=torch.float64, generator=generator)
    y = torch.tensor([[2, 0]])
    binary = torch.randint(2, f.shape, generator=generator).double()
    target = torch.randn(f.shape, dtype=torch.float64, generator=generator)
    cases = [
        (lambda z: torch.log_softmax(z, -1).gather(-1, y[..., None]).sum(), hessian_categorical, score_categorical, y),
        (lambda z: (binary * z - torch.nn.functional.softplus(z)).sum(), hessian_bernoulli, score_bernoulli, binary),
        (lambda z: -0.5 * (target - z).square().sum(), lambda z: torch.eye(6).double()[None], score_gaussian, target),
    ]
    for log_prob, hessian, score, observed in cases:
        h = torch.autograd.functional.hessian(log_prob, f).reshape(1, 6, 6)
        torch.testing.assert_close(hessian(f), -h, rtol=1e-12, atol=1e-14)
        g = torch.autograd.functional.jacobian(log_prob, f).reshape(1, 6)
        torch.testing.assert_close(score(f, observed), g, rtol=1e-12, atol=1e-14)


def test_ggn_of_a_linear_model_is_the_hessian_of_its_loss():
    arch = ZOO["linear"]
    module, x = arch.build().eval(), arch.inputs(4)
    y = torch.tensor([0, 2, 1, 1])

    def loss(theta):
        return torch.nn.functional.cross_entropy(x @ theta[:9].view(3, 3).T + theta[9:], y, reduction="sum")

    theta = torch.cat([p.detach().flatten() for p in module.parameters()])
    exact = torch.autograd.functional.hessian(loss, theta)
    torch.testing.assert_close(ggn(jacobian(module, x), hessian_categorical(outputs(module, x))), exact)
