"""The pretrained ResNet-20 on CIFAR-10: tuned on one half of test images, judged on the other half and on SVHN.

    python -m experiments.resnet20_ood --images 10000 --outside 2000 --splits 5

The posterior (EKFAC over all weights) is fitted to the first 2,000 training images with n_data=50000. One pass over the
first --images test images, in a fixed random order, and over --outside images of SVHN keeps what every setting needs,
500 images at a time in --cache, so that an interrupted run goes on. Then, for each of --splits random halves: choose on
one half, by the default rule and by others, and print accuracy, NLL, ECE on the other half and the AUROC of the
entropy against SVHN, as means over splits with their standard deviation, also of the difference to temperature scaling
on the same halves; last the AUROC of novelty, which nothing chooses. Needs LAPWING_DATA.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch
from experiments._arguments import Experiment
from safetensors.torch import load_file, save_file
from torch import Tensor

import lapwing
from experiments import _datasets as datasets
from experiments import _networks as networks
from lapwing import metrics
from lapwing.evidence import Candidates, Groups, Setting, Trials, collect, linked, nodes_for, search, widest
from lapwing.evidence.candidates import fit_logits
from lapwing.evidence.heldout import GramSweep, Nodes
from lapwing.predictive import GaussianFunction, predict_targets
from lapwing.predictive.linearized import FLOOR, information_gain

ABOUT = {"paper": "", "minutes": None, "page": "tuning.md"}

CHUNK = 500
REACH = ([1e-5, 1e6], [0.01, 1e5])  # precisions and temperatures that the kept pass can serve
LEARN = ("prior", "temperature", "logit_temperature")


def fitted(structure: str, size: int, path: Path) -> lapwing.Laplace:
    model = networks.pretrained_resnet(20)
    if path.exists():
        return lapwing.load(path, model)
    data = datasets.images("cifar10", "train")[:size]
    batches = list(zip(networks.standardize(data.inputs).split(100), data.targets.split(100)))
    la = lapwing.fit(model, batches, "classification", structure=structure, n_data=50_000)
    path.parent.mkdir(parents=True, exist_ok=True)
    la.save(path)
    return la


def kept(la: lapwing.Laplace, data: datasets.Dataset, path: Path) -> GramSweep:
    """What one pass over these images keeps, from the cache where it is there."""
    nodes = nodes_for(la.belief, torch.tensor(REACH[0]).double(), REACH[1])
    options = {"likelihood": la.likelihood, "power": 1, "tempers_prior": False, "score": linked(samples=128)}
    if path.exists():
        found = load_file(path)
        nodes = Nodes(found["shifts"], found["spectrum"])
        return GramSweep(found["f"], found["y"], nodes, grams=found["g"], **options)  # type: ignore[arg-type]
    begin = time.perf_counter()
    groups = Groups.scalar(la.params.size)
    batches = la._predictive.held_out(list(zip(data.inputs.split(100), data.targets.split(100))))
    sweep = collect(la.belief, groups, batches, nodes, score=linked(samples=128), memory=8 * 1024**3)
    kept = {"f": sweep.f, "y": sweep.y, "g": sweep.grams, "shifts": nodes.shifts, "spectrum": nodes.spectrum}
    save_file({name: value.contiguous() for name, value in kept.items()}, path)
    print(f"{path.stem}: {len(sweep.f)} images in {time.perf_counter() - begin:.0f} s", flush=True)
    return sweep


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

    begin = time.perf_counter()
    default = search(validation, of(LEARN, LEARN[1:]), rule=widest())
    print(f"the default took {time.perf_counter() - begin:.0f} s; {default.messages[0]}", flush=True)
    free = search(validation, of(LEARN), rule=rule)
    first = seen[0]
    ranked = [first.settings[k] for k in first.scores.argsort().tolist()]
    scaled, plain = (first.settings[k] for k in (first.home - 1, first.home))
    found = {"MAP": plain, "temperature scaling": scaled, "the default": default.setting}
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


def main() -> None:
    parser = Experiment(__doc__, smoke={"fit": 20, "images": 20, "outside": 10, "splits": 1})
    parser.add_argument("--structure", default="ekfac")
    parser.add_argument("--fit", type=int, default=2_000, help="training images of the fit")
    parser.add_argument("--images", type=int, default=2_000, help="CIFAR-10 test images, half of them to tune on")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first of these, a multiple of 500")
    parser.add_argument("--outside", type=int, default=1_000, help="SVHN images")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=Path(".cache/experiments"))
    options = parser.parse_args()
    stem = f"resnet20-{options.structure}-{options.fit}"
    la = fitted(options.structure, options.fit, options.cache / f"{stem}.lapwing")
    order = torch.randperm(10_000, generator=torch.Generator().manual_seed(0))
    cifar, svhn = datasets.images("cifar10", "test")[order], datasets.images("svhn", "test")
    passes = {}
    for name, data, first, count in (
        ("cifar", cifar, options.skip, options.images),
        ("svhn", svhn, 0, options.outside),
    ):
        path = lambda k, name=name: options.cache / f"{stem}-{name}{k}.safetensors"  # noqa: E731
        passes[name] = joined(
            [kept(la, standardized(data[k : min(k + CHUNK, count)]), path(k)) for k in range(first, count, CHUNK)]
        )
    everything, outside = passes["cifar"], passes["svhn"]
    results: dict[str, list[dict[str, float]]] = {}
    for seed in range(options.splits):
        halves = torch.randperm(len(everything.f), generator=torch.Generator().manual_seed(seed)).chunk(2)
        validation, test = (part_of(everything, half) for half in halves)
        for name, setting in choices(validation).items():
            results.setdefault(name, []).append(row(setting, test, outside))
            print(f"split {seed}  {name:22s} {setting}", flush=True)
    report(results)
    area = metrics.auroc(novelty(la, everything), novelty(la, outside))
    print(f"AUROC of novelty on all {len(everything.f)} images: {area:.3f}")


def report(results: dict[str, list[dict[str, float]]]) -> None:
    for name, rows in results.items():
        columns = {key: torch.tensor([each[key] for each in rows]) for key in rows[0]}
        figures = "  ".join(f"{key} {v.mean():.4f} ± {v.std(correction=0):.4f}" for key, v in columns.items())
        rival = {key: torch.tensor([each[key] for each in results["temperature scaling"]]) for key in rows[0]}
        gaps = "  ".join(
            f"{key} {(columns[key] - rival[key]).mean():+.4f} ± {(columns[key] - rival[key]).std(correction=0):.4f}"
            for key in ("NLL", "AUROC")
        )
        print(f"{name:22s} {figures}\n{'':22s}   less temperature scaling: {gaps}")


if __name__ == "__main__":
    main()
