"""Ways to distill a posterior over all weights into one forward pass, compared on real images.

    python -m experiments.distill [--seeds 3] [--out DIR] [--cache DIR]      # the MLP; or lenet, resnet20

The teacher is the tuned posterior of a network over all its weights: EKFAC on the pretrained ResNet-20 (CIFAR-10,
against SVHN), Kronecker factors on LeNet-5 or an MLP 784-200-200-10 (MNIST, against Fashion-MNIST, KMNIST and
notMNIST). Every student keeps the network's outputs and learns their covariance from the teacher's at the same training
images and perturbed training images; none sees another data set. The table has, for each, NLL on test images, the AUROC
of entropy and of mutual information against each other data set, and KL(teacher ‖ student). Needs LAPWING_DATA.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._cache import tensors_once, trained_once
from experiments._results import Claim, Scores, verdict
from experiments._study import study, told
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing import metrics
from lapwing.predictive import GaussianFunction, predict_targets
from lapwing.predictive.distilled import perturbed
from lapwing.predictive.distilledlayer import EnergyNetwork, fit_head, quadratic_weights

ABOUT = {"paper": "001, appendix D", "minutes": 1, "quick": 0.3}

Answers = dict[str, Tensor]
Student = Callable[[Answers], tuple[Tensor, Tensor]]
"""From what is known of some images (outputs, energies, last features) to probabilities and expected entropies."""

TEACHER, NETWORK, OURS = "teacher", "network", "energies, corrected (la.distill)"
WIDTH, RATE, POINTS = 64, 3e-3, 512
OTHERS = {"resnet20": ("svhn",), "lenet": ("fashion", "kmnist", "notmnist"), "mlp": ("fashion", "kmnist", "notmnist")}


def trained(seed: int, given: argparse.Namespace) -> nn.Module:
    if given.network == "resnet20":
        return networks.pretrained_resnet(20)
    torch.manual_seed(seed)
    model = networks.lenet() if given.network == "lenet" else networks.mlp([784, 200, 200, 10])

    def train() -> nn.Module:
        data = datasets.images("mnist", "train")[: given.train]
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(given.steps):
            for rows in torch.randperm(len(data)).split(128):
                optimizer.zero_grad()
                decay = 0.5 / len(data) * sum(p.square().sum() for p in model.parameters())
                (F.cross_entropy(model(data.inputs[rows]), data.targets[rows]) + decay).backward()
                optimizer.step()
        return model.eval()

    return trained_once(given.cache, "distill", [given.network, given.train, given.steps, seed], model, train)


def batches(data: datasets.Dataset, prepare: Callable[[Tensor], Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(prepare(data.inputs).split(100), data.targets.split(100)))


def asked(la: lapwing.Laplace, body: EnergyNetwork, last: nn.Module, inputs: Tensor) -> Answers:
    """What the teacher and the network say of some images."""
    parts = []
    for x in inputs.split(50):
        p, features = la.predict(x), []
        hook = last.register_forward_pre_hook(lambda _, args, kept=features: kept.append(args[0].detach()))
        with torch.no_grad():
            f, z = body(x)
            la.module(x)
        hook.remove()
        covariance = p.function.contrast_covariance * la.logit_temperature**2
        parts.append({"f": f, "z": z, "a": features[0], "c": covariance, "p": p.probs, "h": p.aleatoric})
    return {key: torch.cat([part[key] for part in parts]).contiguous() for key in parts[0]}


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


def scored(student: Student, test: Answers, targets: Tensor, others: dict[str, Answers]) -> dict[str, float]:
    """NLL, KL from the teacher, and AUROC by entropy and by mutual information."""
    (p, h), teacher = student(test), test["p"].double()
    kl = (torch.special.xlogy(teacher, teacher) - teacher * p.double().clamp(min=1e-30).log()).sum(-1).mean()
    found = {"NLL": float(metrics.nll(p, targets)), "KL from the teacher": float(kl)}
    for place, at in others.items():
        q, g = student(at)
        found[f"entropy, {place}"] = float(metrics.auroc(metrics.entropy(p), metrics.entropy(q)))
        found[f"information, {place}"] = float(metrics.auroc(metrics.entropy(p) - h, metrics.entropy(q) - g))
    return found


def run(seed: int, given: argparse.Namespace) -> Scores:
    name, images = given.network, "cifar10" if given.network == "resnet20" else "mnist"
    prepare = networks.standardize if images == "cifar10" else lambda x: x
    train, test = datasets.images(images, "train"), datasets.images(images, "test")
    model = trained(seed, given)
    held = test[: given.validation] if images == "cifar10" else train[55_000 : 55_000 + given.validation]
    structure, n = ("ekfac", 50_000) if images == "cifar10" else ("kron", given.train)
    data = batches(train[: given.fit], prepare)
    la = lapwing.fit(model, data, "classification", structure=structure, n_data=n, progress=False)
    la = la.tune(batches(held, prepare))
    own = prepare(train[given.fit : given.fit + given.items].inputs)
    generator = torch.Generator().manual_seed(5 + seed)
    moved = [torch.cat(each) for each in zip(*(perturbed(x, generator) for x in own.split(100)))]
    judged = test[given.validation : given.validation + given.test]
    sets = {"own": own, "noisy": moved[0], "mixed": moved[1], "test": prepare(judged.inputs)}
    sets |= {place: prepare(datasets.images(place, "test")[: given.outside].inputs) for place in OTHERS[name]}
    body = EnergyNetwork(model, la.network.outputs, own[:20])
    last = [part for part in model.modules() if isinstance(part, nn.Linear)][-1]
    key_of = [name, given.train, given.steps, given.fit, given.validation, seed]
    answers = {
        key: tensors_once(given.cache, "answers", [*key_of, key, len(x)], lambda x=x: asked(la, body, last, x))
        for key, x in sets.items()
    }
    know = {key: torch.cat([answers[part][key] for part in ("own", "noisy", "mixed")]) for key in answers["own"]}
    others = {place: answers[place] for place in OTHERS[name]}
    made = students(la, body, know, answers["own"], seed, given.epochs)
    return {label: scored(student, answers["test"], judged.targets, others) for label, student in made.items()}


def students(
    la: lapwing.Laplace, body: EnergyNetwork, know: Answers, only: Answers, seed: int, epochs: int
) -> dict[str, Student]:
    """The teacher, the network and each student, by name."""
    s, inside = la.logit_temperature, len(only["f"])
    plain = lambda at: ((at["f"] / s).softmax(-1), metrics.entropy((at["f"] / s).softmax(-1)))  # noqa: E731
    made: dict[str, Student] = {TEACHER: lambda at: (at["p"], at["h"]), NETWORK: plain}

    def head(data: Answers, epochs: int) -> Any:
        return fit_head(
            data["f"], data["z"], data["c"], body.widths, inside=inside, shift_invariant=True, epochs=epochs,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip

    def ours(data: Answers, epochs: int) -> Student:
        found = head(data, epochs)
        return by_covariance(la, found.basis, lambda at: found(at["f"], at["z"]).square())

    made[OURS] = ours(know, epochs)
    made["energies alone (epochs=0)"] = ours(know, 0)
    made["energies, corrected, not perturbed"] = ours(only, epochs)
    basis = head(only, 0).basis[:, :-1].double()
    target = torch.einsum("ik,nij,jk->nk", basis, know["c"].double(), basis).clamp(min=1e-8)
    made["quadratic form in last features"] = by_covariance(la, basis, last_layer(know, target))
    made["sparse Gaussian process on features"] = by_covariance(la, basis, sparse_process(know, target, epochs))
    made["Dirichlet head on features"] = dirichlet(la, know, epochs)
    return made


def judge(mean: Scores) -> list[Claim]:
    kl = {name: cells["KL from the teacher"] for name, cells in mean.items() if name != TEACHER}
    nll = {name: mean[name]["NLL"] for name in (TEACHER, NETWORK, OURS)}
    areas = {
        name: sum(found) / len(found)
        for name in nll
        if (found := [value for key, value in mean[name].items() if key.startswith("entropy")])
    }
    return [
        Claim(
            "A further speed up can be achieved by distilling the predictive distributions of the Laplace network into "
            "a smaller, deterministic feedforward network as successfully demonstrated in (Balan et al., 2015) for "
            "posterior samples using HMC.",
            "appendix D",
            f"Test NLL: {told(nll, 4)}. Mean AUROC of the entropy: {told(areas)}. KL from the teacher: {told(kl)}.",
            verdict(
                abs(nll[OURS] - nll[TEACHER]) < 0.005,
                abs(areas[OURS] - areas[TEACHER]) < 0.01,
                kl[OURS] < kl[NETWORK] / 2,
            ),
            "three parts, for `la.distill`: the student's NLL is within 0.005 nats of the teacher's, its mean AUROC "
            "within 0.01, and its KL divergence from the teacher is below half of the network's own. It is the network "
            "itself with a small head, not a smaller network.",
        )
    ]


if __name__ == "__main__":
    parser = Experiment(
        __doc__,
        smoke={"network": "mlp", "train": 256, "steps": 1, "fit": 100, "validation": 100, "items": 40, "test": 50,
               "outside": 30, "epochs": 2},
        quick={"network": "mlp", "train": 5000, "steps": 2, "fit": 300, "validation": 200, "items": 150, "test": 150,
               "outside": 80, "epochs": 20}, seeds=3,
    )  # fmt: skip
    parser.add_argument("network", nargs="?", choices=tuple(OTHERS), default="mlp")
    parser.add_argument("--train", type=int, default=55_000, help="images that LeNet and the MLP are trained on")
    parser.add_argument("--steps", type=int, default=6, help="epochs of that training")
    parser.add_argument("--fit", type=int, default=2_000, help="training images of the posterior")
    parser.add_argument("--validation", type=int, default=1_000, help="images that tune it")
    parser.add_argument("--items", type=int, default=800, help="training images that students learn from")
    parser.add_argument("--test", type=int, default=1_000)
    parser.add_argument("--outside", type=int, default=500, help="images of each other data set")
    parser.add_argument("--epochs", type=int, default=50)
    told_of = {"resnet20": "the pretrained ResNet-20", "lenet": "LeNet-5", "mlp": "an MLP 784-200-200-10"}
    given = parser.parse_args()
    notes = [
        f"The network is {told_of[given.network]}; `lenet`, `mlp` and `resnet20` are options of the script. One run of "
        "each, with other sizes, is in [decision 32](../decisions/0032-distilled-predictors.md). Entropy and "
        "information are AUROCs of test images against images of the other data set.",
    ]
    study("distill", ABOUT, "Distilling a posterior into one forward pass", run, judge, given, notes=notes)
