"""From the best of a grid on to a minimum of the held-out loss between its points."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lapwing.evidence.scoring import held_near
from lapwing.evidence.sweep import Sweep
from lapwing.evidence.tuning import Setting

SUBSET = 1000  # data that a first guess of the logit temperature looks at
EDGE = 1e-3  # of its range that a start outside or at the end is moved inside: the sigmoid never reaches an end
TOLERANCE = 1e-5  # nats an item that are not worth a step
STEP = 0.2  # of log s, between the points of a parabola


def descend(
    sweep: Sweep,
    setting: Setting,
    box: Mapping[str, tuple[float, float]],
    learned: Sequence[str],
    steps: int,
    near: float = 1.0,
) -> tuple[Setting, int]:
    """L-BFGS on the total NLL in the logarithms of what is learned, each inside its range by a sigmoid.

    A logit temperature that is learned is held `near` that in force (`held_near`).
    """
    phi = sweep.likelihood.dispersion.item() if setting.dispersion is None else setting.dispersion
    start = {
        "prior": setting.precision.double(),
        "temperature": torch.tensor(setting.temperature, dtype=torch.float64),
        "noise": torch.tensor(phi, dtype=torch.float64),
        "logit_temperature": torch.tensor(setting.logit_temperature, dtype=torch.float64),
    }
    wide = {name: (math.log(low), math.log(high)) for name, (low, high) in box.items() if name in learned}
    places = {name: (start[name].log() - low) / (high - low) for name, (low, high) in wide.items()}
    moving = {name: torch.logit(place, eps=EDGE) for name, place in places.items()}
    moving = {name: z.requires_grad_() for name, z in moving.items()}
    tolerance = max(1e-3, TOLERANCE * len(sweep.f))  # of the total, as the gradient is
    optimizer = torch.optim.LBFGS(
        list(moving.values()),
        max_iter=steps,
        max_eval=2 * steps,
        tolerance_grad=tolerance,
        tolerance_change=tolerance,
        line_search_fn="strong_wolfe",
    )

    def values() -> list[Tensor]:
        inside = {name: (low + (high - low) * moving[name].sigmoid()).exp() for name, (low, high) in wide.items()}
        return list({**start, **inside}.values())

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            tau, T, dispersion, logits = values()
            coefficients = sweep.coefficients(tau, T, dispersion)
            leaf = coefficients.detach().requires_grad_()
            noise = dispersion.detach().requires_grad_("noise" in moving)
            divisor = logits.detach().requires_grad_("logit_temperature" in moving)
            total = torch.zeros((), dtype=torch.float64)
            for losses in sweep.parts(leaf, noise, (T / dispersion**sweep.power).item(), divisor):
                part = losses.sum()
                part.backward()
                total += part.detach().cpu()
            if "logit_temperature" in moving:
                held = held_near(divisor, near)
                held.backward()
                total += held.detach()
            pulled = [(coefficients, leaf.grad), (dispersion, noise.grad), (logits, divisor.grad)]
            roots = [(value, grad) for value, grad in pulled if grad is not None and value.requires_grad]
            torch.autograd.backward([value for value, _ in roots], [grad for _, grad in roots])
        return total

    optimizer.step(closure)
    count = int(optimizer.state[next(iter(moving.values()))].get("n_iter", 0))
    tau, T, dispersion, logits = (value.detach() for value in values())
    found = dispersion.item() if "noise" in moving else setting.dispersion
    return Setting(tau, T.item(), found, logit_temperature=logits.item()), count


def fit_logits(sweep: Sweep, setting: Setting, bar: float = math.inf, near: float | None = None) -> Setting:
    """The setting with a better logit temperature, the lowest point of a parabola through three losses.

    As it is where its loss reaches `bar`: no logit temperature mends that. Held `near` one by `held_near`.
    """

    def loss(point: float) -> float:
        found = sweep.nll(replace(setting, logit_temperature=math.exp(point)))
        return found if near is None else found + held_near(torch.tensor(math.exp(point)), near).item() / len(sweep.f)

    u = math.log(setting.logit_temperature)
    here = loss(u)
    if not here < bar:
        return setting
    below, above = (loss(point) for point in (u - STEP, u + STEP))
    bend = below - 2 * here + above
    move = STEP / 2 * (below - above) / bend if bend > 0 else math.copysign(2 * STEP, below - above)
    return replace(setting, logit_temperature=math.exp(u + min(max(move, -3 * STEP), 3 * STEP)))


def wider(setting: Setting, settings: Iterable[Setting]) -> Setting | None:
    """Half-way, in log τ and log s, to the next wider of the settings with the same temperature and noise, if any."""
    key = (setting.temperature, setting.dispersion, False)
    alike = [each for each in settings if (each.temperature, each.dispersion, each.deterministic) == key]
    beyond = [each for each in alike if each.narrow < (1 - EDGE) * setting.narrow]
    if not beyond:
        return None
    next_one = max(beyond, key=lambda each: each.narrow)
    divisor = math.sqrt(setting.logit_temperature * next_one.logit_temperature)
    return replace(setting, precision=(setting.precision * next_one.precision).sqrt(), logit_temperature=divisor)
