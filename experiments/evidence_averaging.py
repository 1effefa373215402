"""Evidence-weighted averaging of networks (paper 001, outlook): beside equal weights, the best member and MAP networks.

    python -m experiments.evidence_averaging [--seeds 5] [--out docs/results]

Eight networks of different widths and depths learn the same images of MNIST and of Fashion-MNIST. Each has a Kronecker
posterior under the prior it was trained with. Their linearized predictions are mixed with weights that are the
posterior probabilities of the models, p(D|M), with equal weights, and beside them are the member with the highest
evidence, a member at random, and the plain average of the networks' own probabilities. Nothing is chosen on test data.
Needs LAPWING_DATA.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from experiments._arguments import Experiment
from experiments._cache import each_seed
from experiments._results import Claim, Result, spread, verdict
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing import metrics
from lapwing.baselines import DeepEnsemble

ABOUT = {"paper": "001, section 6", "minutes": 9.1, "quick": 0.44}

SHAPES = ((25,), (50,), (100,), (200,), (25, 25), (50, 50), (100, 100), (50, 50, 50))
SETS = ("mnist", "fashion")
NAMES = ("random member", "highest evidence", "evidence weights", "equal weights", "average of networks")
Scores = dict[str, dict[str, float]]


def trained(x: Tensor, y: Tensor, hidden: tuple[int, ...], steps: int, prior: float, seed: int) -> nn.Module:
    """Adam on the mean loss with a weight decay that stands for the prior precision."""
    torch.manual_seed(seed)
    model = networks.mlp([784, *hidden, 10], nn.ReLU)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(len(x), (100,), generator=generator)
        decay = sum(p.square().sum() for p in model.parameters()) * (prior / (2 * len(x)))
        optimizer.zero_grad()
        (F.cross_entropy(model(x[rows]), y[rows]) + decay).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def scored(probs: Tensor, y: Tensor) -> dict[str, float]:
    probs = probs.double().detach()
    return {
        "accuracy %": 100 * (probs.argmax(-1) == y).double().mean().item(),
        "NLL": -probs.gather(1, y[:, None]).clamp(min=1e-30).log().mean().item(),
        "ECE": metrics.ece(probs, y).item(),
    }


def run(name: str, seed: int, given: Any) -> tuple[Scores, Tensor, list[float]]:
    """Scores by method, the weights of the members, and their own test NLL."""
    part = datasets.images(name, "train").split(given.train, generator=torch.Generator().manual_seed(seed))[0]
    test = datasets.images(name, "test")[: given.test]
    members = []
    for k, hidden in enumerate(SHAPES[: given.members]):
        model = trained(part.inputs, part.targets, hidden, given.steps, given.prior, 100 * seed + k)
        la = lapwing.fit(
            model, (part.inputs, part.targets), "classification", structure="kron", prior=given.prior, progress=False
        )
        members.append(la)
        print(f"{name} seed {seed} {hidden}: log evidence {members[-1].log_evidence().item():.1f}", flush=True)
    each = [la.predict(test.inputs).probs for la in members]
    mixture = lapwing.Mixture(members, "evidence")
    best = int(mixture.probabilities.argmax())
    found = {
        "random member": {
            key: sum(scored(probs, test.targets)[key] for probs in each) / len(each)
            for key in ("accuracy %", "NLL", "ECE")
        },
        "highest evidence": scored(each[best], test.targets),
        "evidence weights": scored(mixture.predict(test.inputs).probs, test.targets),
        "equal weights": scored(lapwing.Mixture(members).predict(test.inputs).probs, test.targets),
        "average of networks": scored(
            DeepEnsemble([la.module for la in members], "classification").predict(test.inputs).probs, test.targets
        ),
    }
    return found, mixture.probabilities, [scored(probs, test.targets)["NLL"] for probs in each]


def claims(mean: Mapping[str, Mapping[str, Mapping[str, float]]], members: float) -> list[Claim]:
    better = {
        name: {key: mean[name]["evidence weights"][key] for key in ("accuracy %", "NLL")}
        | {f"equal {key}": mean[name]["equal weights"][key] for key in ("accuracy %", "NLL")}
        | {f"random {key}": mean[name]["random member"][key] for key in ("accuracy %", "NLL")}
        for name in mean
    }
    told = "; ".join(
        f"{name}: accuracy {row['accuracy %']:.2f} % (equal weights {row['equal accuracy %']:.2f}, random member "
        f"{row['random accuracy %']:.2f}), NLL {row['NLL']:.4f} ({row['equal NLL']:.4f}, {row['random NLL']:.4f})"
        for name, row in better.items()
    )
    return [
        Claim(
            "The model evidence could further be used to perform Bayesian model averaging on ensembles of neural "
            "networks, potentially improving their generalisation ability and uncertainty estimates.",
            "section 6",
            f"With evidence weights, {told}. The weights amount to {members:.2f} members on average.",
            verdict(
                all(row["accuracy %"] > row["random accuracy %"] for row in better.values()),
                all(row["NLL"] < row["random NLL"] for row in better.values()),
                all(row["accuracy %"] > row["equal accuracy %"] for row in better.values()),
                all(row["NLL"] < row["equal NLL"] for row in better.values()),
            ),
            "four comparisons: with a member at random and with equal weights, in mean accuracy and in mean NLL, each "
            "on both data sets.",
        )
    ]


def figure(weights: Mapping[str, list[Tensor]], losses: Mapping[str, list[list[float]]]) -> Any:
    """Test NLL of every member against its weight, and of both averages."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(10, 4), layout="constrained")
    for axes, name in zip(canvas.subplots(1, len(weights)), weights):
        for k, (own, loss) in enumerate(zip(weights[name], losses[name])):
            axes.scatter(loss, own, label=f"seed {k}", s=18)
        axes.set(xlabel="test NLL of a member", ylabel="weight by evidence", title=name)
    axes.legend(frameon=False)
    return canvas


def main(given: Any) -> None:
    seeds = range(given.first, given.first + given.seeds)
    runs = {
        name: each_seed(f"evidence_averaging-{name}", lambda seed, given, name=name: run(name, seed, given), given)
        for name in SETS
    }
    rows = []
    for name in SETS:
        for method in NAMES:
            each = {key: [scores[method][key] for scores, _, _ in runs[name]] for key in runs[name][0][0][method]}
            rows.append({"data": name, "method": method, **{key: spread(values) for key, values in each.items()}})
    mean = {
        name: {
            method: {key: sum(s[method][key] for s, _, _ in runs[name]) / len(seeds) for key in ("accuracy %", "NLL")}
            for method in NAMES
        }
        for name in SETS
    }
    weights = {name: [w for _, w, _ in runs[name]] for name in SETS}
    losses = {name: [loss for _, _, loss in runs[name]] for name in SETS}
    effective = [1 / sum(x * x for x in w) for each in weights.values() for w in each]
    result = Result(
        "evidence_averaging",
        "Evidence-weighted averaging of networks",
        "001, section 6",
        f"python -m experiments.evidence_averaging --seeds {given.seeds} --train {given.train} --test {given.test} "
        f"--members {given.members} --steps {given.steps} --prior {given.prior:g}",
        list(seeds),
    )
    result = (
        result.with_rows(rows)
        .with_claims(*claims(mean, sum(effective) / len(effective)))
        .with_sentence(
            f"With weights by evidence, {given.members} networks count as {sum(effective) / len(effective):.2f} on "
            "average: one network has nearly all the weight."
            if sum(effective) / len(effective) < 1.1
            else f"With weights by evidence, {given.members} networks count as {sum(effective) / len(effective):.2f}."
        )
        .with_notes(
            "Changed after a smoke run: priors were first tuned by the evidence, and are now those of the training.",
            f"{given.members} networks on {given.train} images, with hidden layers "
            + "; ".join("-".join(map(str, hidden)) for hidden in SHAPES[: given.members])
            + f". Prior precision {given.prior:g} in training and in the posterior, Kronecker posteriors, linearized "
            "predictions.",
            "Random member: the mean score of all members. Average of networks: the mean of the networks' own "
            "probabilities, without posteriors. ± is the standard deviation over seeds.",
        )
    )
    data = {
        "weights": weights,
        "losses": losses,
        "scores": [{n: s for n, (s, _, _) in zip(SETS, r)} for r in zip(*runs.values())],
    }
    result.with_data(**data).finish(given.out, lambda: figure(weights, losses))


if __name__ == "__main__":
    parser = Experiment(
        __doc__,
        smoke={"train": 100, "test": 100, "members": 2, "steps": 20},
        quick={"train": 500, "test": 1000, "members": 4, "steps": 400},
        seeds=3,
    )
    parser.add_argument("--train", type=int, default=1000, help="training images")
    parser.add_argument("--test", type=int, default=5000, help="test images")
    parser.add_argument("--members", type=int, default=len(SHAPES), help="networks, at most eight")
    parser.add_argument("--steps", type=int, default=1500, help="of Adam, with 100 images each")
    parser.add_argument("--prior", type=float, default=1.0, help="precision that the networks are trained with")
    main(parser.parse_args())
