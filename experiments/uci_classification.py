"""UCI classification: tuned linearized predictive against the MAP network, on five splits of five tables.

    python -m experiments.uci_classification [--sets australian ...] [--splits 5] [--steps 1000]

Each table is split 70/15/15. The MAP network (one hidden layer of 50 tanh units) is trained with each of seven prior
precisions; the one with the lowest validation NLL is kept. Its posterior is fitted and tuned on the same validation
part: the prior alone, as in the published rows, and prior and temperature together (`la.tune(val)`). Printed is the
mean NLL on the test part with its standard error over splits, of the MAP, of its temperature scaling, of the posterior
at the prior of training, and of the two tuned ones; and the mean difference of these to the MAP with the error of the
paired difference. Needs LAPWING_DATA.
"""

import time

import torch
from experiments._arguments import Experiment
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing
from experiments import _datasets as datasets

ABOUT = {"paper": "002, Part II: linearized predictive", "minutes": None, "page": "training.md"}

SETS = ("australian", "breast_cancer", "digits", "ionosphere", "vehicle")
PRECISIONS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
Part = tuple[Tensor, Tensor]


def parts(name: str, split: int) -> tuple[Part, Part, Part, int]:
    table = datasets.uci_classification(name)
    generator = torch.Generator().manual_seed(split)
    size = len(table)
    train, val, test = table.split(size * 70 // 100, size * 15 // 100, generator=generator)
    mean, deviation = train.inputs.mean(0), train.inputs.std(0)
    deviation = torch.where(deviation > 0, deviation, torch.ones_like(deviation))
    found = [((d.inputs - mean) / deviation, d.targets) for d in (train, val, test)]
    return found[0], found[1], found[2], int(table.targets.max()) + 1


def fitted(data: Part, classes: int, tau: float, steps: int, seed: int) -> nn.Module:
    """The mode of the log joint under prior precision tau, by full-batch Adam."""
    torch.manual_seed(seed)
    x, y = data
    model = nn.Sequential(nn.Linear(x.shape[1], 50), nn.Tanh(), nn.Linear(50, classes)).double()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, 1e-5)
    for _ in range(steps):
        optimizer.zero_grad()
        penalty = 0.5 * tau * sum(p.square().sum() for p in model.parameters())
        (F.cross_entropy(model(x), y) + penalty / len(y)).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def nll(model: nn.Module, data: Part) -> float:
    with torch.no_grad():
        return F.cross_entropy(model(data[0]), data[1]).item()


def predictive(la: lapwing.Laplace, data: Part) -> float:
    found = la.predict_loader(list(zip(data[0].split(128), data[1].split(128), strict=True)))
    return -torch.cat([p.log_prob(y) for p, y in zip(found, data[1].split(128), strict=True)]).mean().item()


def run(name: str, split: int, steps: int, structure: str) -> list[float]:
    train, val, test, classes = parts(name, split)
    models = {tau: fitted(train, classes, tau, steps, split) for tau in PRECISIONS}
    tau = min(models, key=lambda t: nll(models[t], val))
    model = models[tau]
    la = lapwing.fit(model, train, "classification", structure=structure, prior=tau, progress=False)
    scaled = lapwing.TemperatureScaled.fit(model, val, "classification")
    with torch.no_grad():
        temperature = F.cross_entropy(scaled(test[0]), test[1]).item()
    alone, both = la.tune(val, learn="prior"), la.tune(val)
    return [nll(model, test), temperature, *(predictive(each, test) for each in (la, alone, both))]


if __name__ == "__main__":
    parser = Experiment(__doc__, smoke={"sets": ["australian"], "splits": 2, "steps": 20})
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--structure", default="auto")
    given = parser.parse_args()
    heads = ("MAP", "temperature", "untuned", "prior", "prior and T", "prior − MAP", "both − MAP")
    print(f"{'NLL on test data':16s}" + "".join(f"{h:>17s}" for h in heads) + "   CPU s a split")
    for name in given.sets:
        start = time.process_time()
        values = torch.tensor([run(name, k, given.steps, given.structure) for k in range(given.splits)])
        root = len(values) ** 0.5
        cells = [f"{m:.3f} ± {s:.3f}" for m, s in zip(values.mean(0), values.std(0) / root, strict=True)]
        for k in (3, 4):
            paired = values[:, k] - values[:, 0]
            cells.append(f"{paired.mean():+.4f} ± {paired.std() / root:.4f}")
        seconds = (time.process_time() - start) / given.splits
        print(f"{name:16s}" + "".join(f"{c:>17s}" for c in cells) + f"   {seconds:.0f}", flush=True)
