"""Real weights: the pretrained ResNet-20 and the Llama of 260,032 parameters, against loops over autograd."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import lapwing

from . import oracle
from .architectures.registry import Net
from .cases import Snapshot, assert_same

pytestmark = pytest.mark.data


class Block(nn.Module):
    """He et al. 2015, section 4.2, with the shortcut that has no parameters."""

    def __init__(self, inner, outer, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.widen = inner != outer

    def forward(self, x):
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        if self.widen:
            c = h.shape[1] // 4
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, c, c))
        h += x
        return F.relu(h, inplace=True)


class ResNet20(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16, 1) for _ in range(3)))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1), Block(32, 32, 1))
        self.layer3 = nn.Sequential(Block(32, 64, 2), Block(64, 64, 1), Block(64, 64, 1))
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(x.mean((2, 3)))


@pytest.fixture(scope="module")
def resnet(data_dir):
    module = ResNet20()
    module.load_state_dict(load_file(data_dir / "cifar10-resnets" / "resnet20.safetensors"))
    return module.double().eval()


@pytest.fixture(scope="module")
def images(data_dir):
    image = pytest.importorskip("PIL.Image")
    mosaic = np.asarray(image.open(data_dir / "cifar10" / "test.webp").convert("RGB"))[:32, : 32 * 3]
    x = torch.tensor(mosaic).reshape(32, 3, 32, 3).permute(1, 3, 0, 2).double() / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (x - mean[:, None, None]) / std[:, None, None], torch.tensor(
        np.load(data_dir / "cifar10" / "labels.npz")["test"][:3]
    ).long()


@pytest.fixture(scope="module")
def truth(resnet, images):
    x, _ = images
    f, j = oracle.outputs(resnet, x), oracle.jacobian(resnet, x)
    return f, j, oracle.hessian_categorical(f)


def diagonal(j, lam):
    return torch.einsum("ndp,nde,nep->p", j, lam, j)


def test_resnet_classifies(resnet, images):
    x, y = images
    assert torch.equal(oracle.outputs(resnet, x).argmax(-1), y)


def test_resnet_diag(resnet, images, truth):
    (x, y), (_, j, lam) = images, truth
    before = Snapshot(resnet)
    la = lapwing.fit(resnet, [(x[:2], y[:2]), (x[2:], y[2:])], "classification", structure="diag", prior=50.0)
    before.check(resnet)
    exact = diagonal(j, lam)
    assert_same(la.curvature.matrix.diagonal(), exact)
    variance = torch.einsum("ndp,p,nep->nde", j, 1 / (exact + 50.0), j)
    assert_same(la.predict(x).function.covariance, variance, 1e-9)


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_resnet_covariance_of_factored_structures(resnet, images, truth, structure):
    """J Σ Jᵀ from factors equals J (solve Jᵀ) with explicit rows; EKFAC's trace is exact."""
    (x, y), (_, j, lam) = images, truth
    la = lapwing.fit(resnet, [(x[:2], y[:2]), (x[2:], y[2:])], "classification", structure=structure, prior=50.0)
    if structure == "ekfac":
        assert_same(la.curvature.matrix.trace(), diagonal(j, lam).sum())
    solved = la.posterior.precision.solve(j)
    assert_same(la.predict(x).function.covariance, torch.einsum("ndp,nep->nde", j, solved), 1e-8)


@pytest.mark.parametrize("structure", ["full", "blockdiag"])
def test_resnet_last_layer(resnet, images, truth, structure):
    (x, y), (_, j, lam) = images, truth
    la = lapwing.fit(
        resnet, [(x[:2], y[:2]), (x[2:], y[2:])], "classification", structure=structure, select="last_layer"
    )
    assert la.params.names == ("linear.weight", "linear.bias")
    index = oracle.positions(resnet, la.params.names)
    assert_same(la.curvature.dense(), oracle.ggn(j[..., index], lam))


def test_resnet_in_float32(resnet, images, truth):
    (x, y), (_, j, lam) = images, truth
    module = ResNet20()
    module.load_state_dict(resnet.state_dict())
    la = lapwing.fit(module.float(), [(x.float(), y)], "classification", structure="diag")
    assert_same(la.curvature.matrix.diagonal().double(), diagonal(j, lam), 1e-3)


@pytest.fixture(scope="module")
def llama(data_dir):
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    return transformers.LlamaForCausalLM.from_pretrained(data_dir / "tinystories-260k", dtype=torch.float64).eval()


TOKENS = torch.tensor([[1, 403, 407, 261, 378, 432], [1, 411, 286, 378, 261, 432], [1, 317, 267, 410, 261, 378]])


def test_llama_next_token(llama):
    """Six answers to what comes next; all 260,032 parameters, embedding tied with the head."""
    assert sum(p.numel() for p in llama.parameters()) == 260_032
    module = Net(
        lambda s, input_ids: s.llama(input_ids=input_ids, use_cache=False).logits[:, -1, 260:266], llama=llama
    ).eval()
    y = torch.tensor([0, 3, 5])
    f, j = oracle.outputs(module, TOKENS), oracle.jacobian(module, TOKENS)
    lam = oracle.hessian_categorical(f)
    before = Snapshot(module)
    la = lapwing.fit(module, [(TOKENS[:2], y[:2]), (TOKENS[2:], y[2:])], "classification", structure="diag", prior=10.0)
    before.check(module)
    exact = diagonal(j, lam)
    tolerance = 1e-4  # its RMS norms compute in float32 whatever the model's dtype
    assert_same(la.curvature.matrix.diagonal(), exact, tolerance)
    covariance = torch.einsum("ndp,p,nep->nde", j, 1 / (exact + 10.0), j)
    assert_same(la.predict(TOKENS).function.covariance, covariance, tolerance)


def test_llama_as_language_model(llama):
    """A batch dict with labels; the shift, −100 and the per-token scores of the empirical Fisher."""
    labels = TOKENS.clone()
    labels[0, :3] = -100
    batches = [{"input_ids": TOKENS[:2], "labels": labels[:2]}, {"input_ids": TOKENS[2:], "labels": labels[2:]}]
    la = lapwing.fit(llama, batches, "classification", structure="diag", factor="empirical")
    params, exact, total = list(llama.parameters()), 0, 0.0
    for n in range(3):
        logits = llama(input_ids=TOKENS[n : n + 1], use_cache=False).logits
        loss = F.cross_entropy(logits[0, :-1], labels[n, 1:], ignore_index=-100, reduction="sum")
        exact = exact + oracle.gradient(loss, params).square()
        total -= loss.item()
    assert_same(la.curvature.matrix.diagonal(), exact, 1e-4)
    assert float(la.log_likelihood) == pytest.approx(total, rel=1e-5)


def test_llama_last_layer_is_the_tied_embedding(llama):
    labels = torch.full_like(TOKENS, -100)
    labels[:, -1] = TOKENS[:, -1]  # one prediction a sample counts
    batch = {"input_ids": TOKENS, "labels": labels}
    la = lapwing.fit(
        llama, [batch], "classification", structure="diag", factor="empirical", select="model.embed_tokens.weight"
    )
    exact = 0
    for n in range(3):
        logits = llama(input_ids=TOKENS[n : n + 1], use_cache=False).logits
        loss = F.cross_entropy(logits[:, -2], labels[n : n + 1, -1])
        exact = exact + oracle.gradient(loss, [llama.get_input_embeddings().weight]).square()
    assert_same(la.curvature.matrix.diagonal(), exact, 1e-4)
