"""The pretrained ResNet-20 on CIFAR-10: tuned on one half of test images, judged on the other half and on SVHN.

    python -m experiments.resnet20_ood --images 10000 --outside 2000 --seeds 5 [--out DIR] [--cache DIR]

The posterior (EKFAC over all weights) is fitted to the first 2,000 training images with n_data=50000. One pass over the
first --images test images, in a fixed random order, and over --outside images of SVHN keeps what every setting needs,
500 images at a time in --cache, so that an interrupted run goes on. Then, for a random half per seed: choose on one
half, by the default rule and by others. The table has accuracy, NLL, ECE on the other half and the AUROC of the entropy
against SVHN, also less those of temperature scaling on the same halves; last the AUROC of novelty, which nothing
chooses. Needs LAPWING_DATA.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from experiments._arguments import Experiment
from experiments._cache import tensors_once
from experiments._results import Claim, Scores, answered
from experiments._study import study, told
from torch import Tensor

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing import metrics
from lapwing.evidence import Candidates, Groups, Setting, Trials, collect, linked, nodes_for, search, widest
from lapwing.evidence.heldout import GramSweep, Nodes
from lapwing.evidence.search import fit_logits
from lapwing.predictive import GaussianFunction, predict_targets
from lapwing.predictive.novelty import FLOOR, information_gain

ABOUT = {"paper": "", "minutes": 4.4, "quick": 0.6, "page": "tuning.md"}

CHUNK = 500
REACH = ([1e-5, 1e6], [0.01, 1e5])  # precisions and temperatures that the kept pass can serve
SCALING, DEFAULT = "temperature scaling", "the default"
LEARN = ("prior", "temperature", "logit_temperature")


def fitted(structure: str, size: int) -> lapwing.Laplace:
    data = datasets.images("cifar10", "train")[:size]
    batches = list(zip(networks.standardize(data.inputs).split(100), data.targets.split(100)))
    model = networks.pretrained_resnet(20)
    return lapwing.fit(model, batches, "classification", structure=structure, n_data=50_000, progress=False)


def kept(la: lapwing.Laplace, data: datasets.Dataset, folder: Path | None, key: object) -> GramSweep:
    """What one pass over these images keeps, from the cache where it is there under this key."""

    def compute() -> dict[str, Tensor]:
        nodes = nodes_for(la.belief, torch.tensor(REACH[0]).double(), REACH[1])
        groups = Groups.scalar(la.params.size)
        batches = la._predictive.held_out(list(zip(data.inputs.split(100), data.targets.split(100))))
        sweep = collect(la.belief, groups, batches, nodes, score=linked(samples=128), memory=8 * 1024**3)
        return {"f": sweep.f, "y": sweep.y, "g": sweep.grams, "shifts": nodes.shifts, "spectrum": nodes.spectrum}

    found = tensors_once(folder, "pass", key, compute)
    nodes = Nodes(found["shifts"], found["spectrum"])
    options = {"likelihood": la.likelihood, "power": 1, "tempers_prior": False, "score": linked(samples=128)}
    return GramSweep(found["f"], found["y"], nodes, grams=found["g"], **options)  # type: ignore[arg-type]


def standardized(data: datasets.Dataset) -> datasets.Dataset:
    return replace(data, inputs=networks.standardize(data.inputs))


def joined(parts: list[GramSweep]) -> GramSweep:
    return replace(
        parts[0],
        f=torch.cat([part.f for part in parts]),
        y=torch.cat([part.y for part in parts]),
        grams=torch.cat([part.grams for part in parts], 2),
    )


def part_of(sweep: GramSweep, index: Tensor) -> GramSweep:
    return replace(sweep, f=sweep.f[index], y=sweep.y[index], grams=sweep.grams[:, :, index])


def probabilities(sweep: GramSweep, setting: Setting) -> Tensor:
    s = setting.logit_temperature
    if setting.deterministic:
        return (sweep.f / s).softmax(-1)
    T, phi = torch.tensor([setting.temperature, 1.0]).double()
    coefficients = sweep.coefficients(setting.precision.double(), T, phi)
    found = []
    for start in range(0, len(sweep.f), 250):
        stop = min(start + 250, len(sweep.f))
        function = GaussianFunction(sweep.f[start:stop], sweep.covariance(coefficients, start, stop), contrasts=True)
        found.append(predict_targets(function.scaled(1 / s), sweep.likelihood, samples=512).probs)
    return torch.cat(found)


def novelty(la: lapwing.Laplace, sweep: GramSweep) -> Tensor:
    """The score of `Prediction.novelty`, from the kept pass."""
    floor = FLOOR * la.curvature.matrix.trace().double() / la.params.size
    coefficients = sweep.nodes.coefficients(floor[None])
    return information_gain(sweep.f, sweep.covariance(coefficients), sweep.likelihood).double()


def choices(validation: GramSweep) -> dict[str, Setting]:
    """What each rule chooses: the default as `la.tune(val)` does, others with T free."""
    one = torch.ones(1, dtype=torch.float64)
    seen: list[Trials] = []

    def rule(trials: Trials) -> int:
        seen.append(trials)
        return widest()(trials)

    def of(learn: tuple[str, ...], optional: tuple[str, ...] = (), **grid: list[float]) -> Candidates:
        return Candidates.of(learn, grid, Setting(one), validation.likelihood, optional=optional)

    default = search(validation, of(LEARN, LEARN[1:]), rule=widest())
    free = search(validation, of(LEARN), rule=rule)
    first = seen[0]
    ranked = [first.settings[k] for k in first.scores.argsort().tolist()]
    scaled, plain = (first.settings[k] for k in (first.home - 1, first.home))
    found = {"MAP": plain, SCALING: scaled, DEFAULT: default.setting}
    found |= {"widest, T free": free.setting, "lowest, T free": ranked[0]}
    fixed = {tau: of(("prior", "logit_temperature"), prior=[tau]) for tau in (1e3, 10**3.5, 1e4)}
    for tau, candidates in fixed.items():
        tried = candidates.settings(validation, first.baselines, candidates.near(validation))
        found[f"T = 1, prior {tau:.0f}"] = fit_logits(validation, tried[:1])[0]
    return found


def row(setting: Setting, test: GramSweep, outside: GramSweep) -> dict[str, float]:
    probs, others = probabilities(test, setting), probabilities(outside, setting)
    areas = metrics.auroc(metrics.entropy(probs), metrics.entropy(others))
    return {
        "accuracy": metrics.accuracy(probs, test.y).item(),
        "NLL": metrics.nll(probs, test.y).item(),
        "ECE": metrics.ece(probs, test.y).item(),
        "AUROC": areas.item(),
    }


@cache
def passes(structure: str, fit: int, images: int, skip: int, outside: int, folder: Path | None) -> tuple:
    """The posterior, and what the passes over CIFAR-10 and SVHN keep."""
    la = fitted(structure, fit)
    order = torch.randperm(10_000, generator=torch.Generator().manual_seed(0))
    cifar, svhn = datasets.images("cifar10", "test")[order], datasets.images("svhn", "test")
    parts = []
    for name, data, first, count in (("cifar", cifar, skip, images), ("svhn", svhn, 0, outside)):
        chunks = [(k, min(k + CHUNK, count)) for k in range(first, count, CHUNK)]
        key = lambda chunk, name=name: ["resnet20", structure, fit, name, *chunk]  # noqa: E731
        parts.append(joined([kept(la, standardized(data[a:b]), folder, key((a, b))) for a, b in chunks]))
    return la, *parts


def run(seed: int, given: argparse.Namespace) -> Scores:
    """Scores by rule; a seed is a random half to tune on."""
    sizes = (given.structure, given.fit, given.images, given.skip, given.outside, given.cache)
    la, everything, outside = passes(*sizes)
    halves = torch.randperm(len(everything.f), generator=torch.Generator().manual_seed(seed)).chunk(2)
    validation, test = (part_of(everything, half) for half in halves)
    rows = {name: row(setting, test, outside) for name, setting in choices(validation).items()}
    for cells in rows.values():
        cells |= {f"{key} − scaling": cells[key] - rows[SCALING][key] for key in ("NLL", "AUROC")}
    area = metrics.auroc(novelty(la, part_of(everything, halves[1])), novelty(la, outside))
    return rows | {"novelty": {"AUROC": float(area)}}


def judge(mean: Scores) -> list[Claim]:
    nll, area = (mean[DEFAULT][f"{key} − scaling"] for key in ("NLL", "AUROC"))
    return [
        answered(
            "Is the default better than temperature scaling on the same images?",
            f"NLL of the default less that of temperature scaling: {nll:+.4f}; AUROC against SVHN: {area:+.4f}. AUROC "
            f"of each: {told({name: cells['AUROC'] for name, cells in mean.items()})}.",
            "two parts: the mean NLL on the other half is not higher, and the mean AUROC of the entropy against SVHN "
            "is higher.",
            nll <= 0,
            area > 0,
        )
    ]


if __name__ == "__main__":
    parser = Experiment(
        __doc__,
        smoke={"fit": 10, "images": 10, "outside": 6},
        quick={"fit": 100, "images": 100, "outside": 50},
        seeds=5,
    )
    parser.add_argument("--structure", default="ekfac")
    parser.add_argument("--fit", type=int, default=2_000, help="training images of the fit")
    parser.add_argument("--images", type=int, default=2_000, help="CIFAR-10 test images, half of them to tune on")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first of these, a multiple of 500")
    parser.add_argument("--outside", type=int, default=1_000, help="SVHN images")
    title = "ResNet-20, tuned on one half of test images"
    notes = [
        "A seed is a random half of the same images, on the same posterior: the spread over seeds is not that over "
        "other images or networks."
    ]
    study("resnet20_ood", ABOUT, title, run, judge, parser.parse_args(), notes=notes)
