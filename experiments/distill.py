"""Ways to distill a posterior over all weights into one forward pass, compared on real images.

    python -m experiments.distill resnet20          # or lenet, mlp

The teacher is the tuned posterior of a network over all its weights: EKFAC on the pretrained ResNet-20 (CIFAR-10,
against SVHN), Kronecker factors on LeNet-5 or an MLP 784-200-200-10 (MNIST, against Fashion-MNIST, KMNIST and
notMNIST). Every student keeps the network's outputs and learns their covariance from the teacher's at the same training
images and perturbed training images; none sees another data set. Printed for each: NLL on test images, the AUROC of
entropy and of mutual information against each other data set, and KL(teacher ‖ student). The fit and the teacher's
answers are kept in --cache. Needs LAPWING_DATA.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from experiments._arguments import Experiment
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing import metrics
from lapwing.predictive import GaussianFunction, predict_targets
from lapwing.predictive.distilled import perturbed
from lapwing.predictive.distilledlayer import EnergyNetwork, fit_head, quadratic_weights

ABOUT = {"paper": "001, appendix D", "minutes": None}

Answers = dict[str, Tensor]
Student = Callable[[Answers], tuple[Tensor, Tensor]]
"""From what is known of some images (outputs, energies, last features) to probabilities and expected entropies."""

WIDTH, RATE, POINTS = 64, 3e-3, 512
OTHERS = {"resnet20": ("svhn",), "lenet": ("fashion", "kmnist", "notmnist"), "mlp": ("fashion", "kmnist", "notmnist")}


def trained(name: str, size: int, epochs: int, path: Path) -> nn.Module:
    if name == "resnet20":
        return networks.pretrained_resnet(20)
    torch.manual_seed(0)
    model = networks.lenet() if name == "lenet" else networks.mlp([784, 200, 200, 10])
    if path.exists():
        model.load_state_dict(load_file(path))
        return model.eval()
    data = datasets.images("mnist", "train")[:size]
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(data)).split(128):
            optimizer.zero_grad()
            decay = 0.5 / len(data) * sum(p.square().sum() for p in model.parameters())
            (F.cross_entropy(model(data.inputs[rows]), data.targets[rows]) + decay).backward()
            optimizer.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), path)
    return model.eval()


def batches(data: datasets.Dataset, prepare: Callable[[Tensor], Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(prepare(data.inputs).split(100), data.targets.split(100)))


def asked(la: lapwing.Laplace, body: EnergyNetwork, last: nn.Module, inputs: Tensor, path: Path) -> Answers:
    """What the teacher and the network say of some images, from the cache where it is there."""
    if path.exists():
        return load_file(path)
    begin, parts = time.perf_counter(), []
    for x in inputs.split(50):
        p, features = la.predict(x), []
        hook = last.register_forward_pre_hook(lambda _, args, kept=features: kept.append(args[0].detach()))
        with torch.no_grad():
            f, z = body(x)
            la.module(x)
        hook.remove()
        covariance = p.function.contrast_covariance * la.logit_temperature**2
        parts.append({"f": f, "z": z, "a": features[0], "c": covariance, "p": p.probs, "h": p.aleatoric})
    found = {key: torch.cat([part[key] for part in parts]).contiguous() for key in parts[0]}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(found, path)
    print(f"{path.stem}: {len(inputs)} images in {time.perf_counter() - begin:.0f} s", flush=True)
    return found


def by_covariance(la: lapwing.Laplace, basis: Tensor, variances: Callable[[Answers], Tensor]) -> Student:
    """A student whose covariances are U diag(v) Uᵀ."""

    def student(at: Answers) -> tuple[Tensor, Tensor]:
        basis_ = (basis - basis.mean(0)).to(at["f"])
        with torch.no_grad():
            v = variances(at).to(at["f"])
        function = GaussianFunction(at["f"], (basis_ * v[:, None]) @ basis_.mT, contrasts=True)
        p = predict_targets(function.scaled(1 / la.logit_temperature), la.likelihood, samples=POINTS)
        return p.probs, p.aleatoric

    return student


def minimize(loss: Callable[[Tensor], Tensor], parameters: list[Tensor], size: int, epochs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(parameters, RATE, weight_decay=1e-2)
    for _ in range(epochs):
        for rows in torch.randperm(size, generator=generator).split(256):
            optimizer.zero_grad()
            loss(rows).backward()
            optimizer.step()


def standardized(at: Answers, like: Answers) -> Tensor:
    """Last features and outputs, in standard deviations of the data."""
    x, y = (torch.cat([each["a"], each["f"]], -1) for each in (at, like))
    return (x - y.mean(0)) / y.std(0).clamp(min=1e-3 * float(y.std()))


def last_layer(know: Answers, target: Tensor) -> Callable[[Answers], Tensor]:
    """A quadratic form in the last features, in the eigenbasis of their second moments."""
    one = lambda a: torch.cat([a, torch.ones_like(a[:, :1])], -1)  # noqa: E731
    _, vectors = torch.linalg.eigh(one(know["a"]).mT @ one(know["a"]))
    weights = quadratic_weights((one(know["a"]) @ vectors).square(), target)
    return lambda at: (one(at["a"]) @ vectors).square() @ weights.to(at["a"]).mT


def sparse_process(know: Answers, target: Tensor, epochs: int, points: int = 64) -> Callable[[Answers], Tensor]:
    """The variance of a Gaussian process with a fixed mean on the last features, with learned inducing points."""
    x, k = know["a"], target.shape[-1]
    center, scale = x.mean(0), x.std(0).clamp(min=1e-3 * float(x.std()))
    x = (x - center) / scale
    places = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:points]].clone().requires_grad_()
    length = torch.cdist(x[:300], x[:300]).median().log().requires_grad_()
    size = (4 * target.mean(0)).log().to(x).requires_grad_()
    noise = torch.zeros(k, len(places), requires_grad=True)
    kernel = lambda a: torch.exp(-0.5 * (torch.cdist(a, places) / length.exp()).square())  # noqa: E731

    def variance(a: Tensor) -> Tensor:
        inner = kernel(places) + torch.diag_embed(noise.exp() + 1e-4)
        explained = torch.linalg.solve_triangular(
            torch.linalg.cholesky(inner), kernel(a).mT.expand(k, -1, -1), upper=False
        )
        return size.exp() * (1 - explained.square().sum(1).mT).clamp(min=1e-6)

    goal = target.log().to(x)
    loss = lambda rows: (variance(x[rows]).log() - goal[rows]).square().mean()  # noqa: E731
    minimize(loss, [places, length, size, noise], len(x), epochs)
    return lambda at: variance((at["a"] - center) / scale)


def dirichlet(la: lapwing.Laplace, know: Answers, epochs: int) -> Student:
    """A Dirichlet over the probabilities: its total and a temperature of the logits come from the last features."""
    torch.manual_seed(0)
    inputs = know["a"].shape[-1] + know["f"].shape[-1]
    net = nn.Sequential(nn.Linear(inputs, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 2))

    def law(x: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        out = net(x)
        p = (F.softplus(out[:, :1] + 0.5) * f / la.logit_temperature).softmax(-1)
        total = (out[:, 1:] + 3).exp().clamp(1e-2, 1e5)
        return p, torch.digamma(total[:, 0] + 1) - (p * torch.digamma(total * p + 1)).sum(-1)

    x, least = standardized(know, know), 1e-6
    wanted = (metrics.entropy(know["p"]) - know["h"]).clamp(min=least).log()

    def loss(rows: Tensor) -> Tensor:
        p, h = law(x[rows], know["f"][rows])
        kl = (torch.special.xlogy(know["p"][rows], know["p"][rows]) - know["p"][rows] * p.clamp(min=1e-12).log()).sum(
            -1
        )
        information = (metrics.entropy(p) - h).clamp(min=least).log()
        return kl.mean() + 0.1 * (information - wanted[rows]).square().mean()

    minimize(loss, list(net.parameters()), len(x), epochs)

    def student(at: Answers) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return law(standardized(at, know), at["f"])

    return student


def line(name: str, student: Student, test: Answers, targets: Tensor, others: dict[str, Answers]) -> None:
    (p, h), teacher = student(test), test["p"].double()
    kl = (torch.special.xlogy(teacher, teacher) - teacher * p.double().clamp(min=1e-30).log()).sum(-1).mean()
    text = f"{name:38s} NLL {metrics.nll(p, targets):.4f}  KL {kl:.5f}"
    for place, at in others.items():
        q, g = student(at)
        areas = [metrics.auroc(*pair) for pair in (
            (metrics.entropy(p), metrics.entropy(q)), (metrics.entropy(p) - h, metrics.entropy(q) - g))]  # fmt: skip
        text += f"  {place} {areas[0]:.3f} {areas[1]:.3f}"
    print(text, flush=True)


def main() -> None:
    smoke = {"network": "mlp", "train": 256, "steps": 1, "fit": 100, "validation": 100, "items": 40, "test": 50,
             "outside": 30, "epochs": 2}  # fmt: skip
    parser = Experiment(__doc__, smoke=smoke)
    parser.add_argument("network", nargs="?", choices=tuple(OTHERS), default="resnet20")
    parser.add_argument("--train", type=int, default=55_000, help="images that LeNet and the MLP are trained on")
    parser.add_argument("--steps", type=int, default=6, help="epochs of that training")
    parser.add_argument("--fit", type=int, default=2_000, help="training images of the posterior")
    parser.add_argument("--validation", type=int, default=1_000, help="images that tune it")
    parser.add_argument("--items", type=int, default=800, help="training images that students learn from")
    parser.add_argument("--test", type=int, default=1_000)
    parser.add_argument("--outside", type=int, default=500, help="images of each other data set")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--cache", type=Path, default=Path(".cache/experiments"))
    given = parser.parse_args()
    name, images = given.network, "cifar10" if given.network == "resnet20" else "mnist"
    prepare = networks.standardize if images == "cifar10" else lambda x: x
    train, test = datasets.images(images, "train"), datasets.images(images, "test")
    model = trained(name, given.train, given.steps, given.cache / f"distill-{name}-network.safetensors")
    path = given.cache / f"distill-{name}.lapwing"
    if path.exists():
        la = lapwing.load(path, model)
    else:
        held = test[: given.validation] if images == "cifar10" else train[55_000 : 55_000 + given.validation]
        structure, n = ("ekfac", 50_000) if images == "cifar10" else ("kron", given.train)
        la = lapwing.fit(model, batches(train[: given.fit], prepare), "classification", structure=structure, n_data=n)
        la = la.tune(batches(held, prepare))
        path.parent.mkdir(parents=True, exist_ok=True)
        la.save(path)
    print(la.tuned or f"prior {la.prior}, logits / {la.logit_temperature:.3f}", flush=True)
    own = prepare(train[given.fit : given.fit + given.items].inputs)
    generator = torch.Generator().manual_seed(5)
    moved = [torch.cat(each) for each in zip(*(perturbed(x, generator) for x in own.split(100)))]
    judged = test[given.validation : given.validation + given.test]
    sets = {"own": own, "noisy": moved[0], "mixed": moved[1], "test": prepare(judged.inputs)}
    sets |= {place: prepare(datasets.images(place, "test")[: given.outside].inputs) for place in OTHERS[name]}
    body = EnergyNetwork(model, la.network.outputs, own[:20])
    last = [part for part in model.modules() if isinstance(part, nn.Linear)][-1]
    answers = {
        key: asked(la, body, last, x, given.cache / f"distill-{name}-{key}.safetensors") for key, x in sets.items()
    }
    know = {key: torch.cat([answers[part][key] for part in ("own", "noisy", "mixed")]) for key in answers["own"]}
    only = answers["own"]
    compare(la, body, know, only, answers["test"], judged.targets, {k: answers[k] for k in OTHERS[name]}, given.epochs)


def compare(
    la: lapwing.Laplace, body: EnergyNetwork, know: Answers, only: Answers, test: Answers, targets: Tensor,
    others: dict[str, Answers], epochs: int,
) -> None:  # fmt: skip
    """Print one line for the teacher, the network and each student; AUROC by entropy, then by mutual information."""
    s, inside = la.logit_temperature, len(only["f"])
    plain = lambda at: ((at["f"] / s).softmax(-1), metrics.entropy((at["f"] / s).softmax(-1)))  # noqa: E731
    students: dict[str, Student] = {"teacher": lambda at: (at["p"], at["h"]), "network": plain}

    def ours(data: Answers, epochs: int) -> Student:
        head = fit_head(
            data["f"], data["z"], data["c"], body.widths, inside=inside, shift_invariant=True, epochs=epochs,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        return by_covariance(la, head.basis, lambda at: head(at["f"], at["z"]).square())

    students["energies, corrected (la.distill)"] = ours(know, epochs)
    students["energies alone (epochs=0)"] = ours(know, 0)
    students["energies, corrected, not perturbed"] = ours(only, epochs)
    basis = fit_head(
        only["f"], only["z"], only["c"], body.widths, inside=inside, shift_invariant=True, epochs=0,
        generator=torch.Generator().manual_seed(0),
    ).basis[:, :-1].double()  # fmt: skip
    target = torch.einsum("ik,nij,jk->nk", basis, know["c"].double(), basis).clamp(min=1e-8)
    students["quadratic form in last features"] = by_covariance(la, basis, last_layer(know, target))
    students["sparse Gaussian process on features"] = by_covariance(la, basis, sparse_process(know, target, epochs))
    students["Dirichlet head on features"] = dirichlet(la, know, epochs)
    for name, student in students.items():
        line(name, student, test, targets, others)


if __name__ == "__main__":
    main()
