"""The operations, by name: `fit-kron`, `predict-kron`, `probs-ekfac`, `sweep-diag`, …

A name is made of an action, a structure and a variant. Without a variant nothing is dropped from the curvature (except
from EKFAC's basis, which is the default one), and Kronecker factors are of the *expand* kind, like the peers'.
Variants:

- `mc` is a Monte Carlo Fisher;
- `1e-3` leaves out a thousandth of the curvature;
- `default` is what `fit` does without options;
- `reduce` sums gradients over positions;
- `basis` drops nothing from EKFAC's basis;
- `jvp` draws probabilities by forward-mode products.
"""

from dataclasses import dataclass

ACTIONS = {
    "fit": "fit",
    "predict": "linearized predict, marginal covariance",
    "probs": "linearized predict, probabilities",
    "distilled": "distilled predict, probabilities and epistemic",
    "ensemble": "ensemble of 10, probabilities",
    "samples": "100 weight samples",
    "evidence": "evidence with a new prior",
    "sweep": "evidence at 100 priors",
}
STRUCTURES = ("diag", "kron", "ekfac", "full")
VARIANTS = {
    "": "",
    "mc": "Monte Carlo",
    "1e-3": "tolerance 1e-3",
    "default": "default settings",
    "reduce": "reduce",
    "basis": "exact basis",
    "jvp": "16 draws by JVP",
}
PRIOR = 1.0
PRIORS = tuple(10 ** (-2 + 4 * k / 99) for k in range(100))
SAMPLES = 100


@dataclass(frozen=True)
class Operation:
    """An action on a posterior of one structure."""

    action: str
    structure: str
    variant: str = ""

    @property
    def name(self) -> str:
        return "-".join(part for part in (self.action, self.structure, self.variant) if part)

    @property
    def title(self) -> str:
        """Describe the operation in words, for the table."""
        what = ACTIONS[self.action]
        return f"{what}, {self.structure}" + (f" ({VARIANTS[self.variant]})" if self.variant else "")

    @property
    def of_new(self) -> bool:
        """Whether its cost depends on the inputs to predict, not on the data of the fit."""
        return self.action in ("predict", "probs", "distilled", "ensemble")


def operation(name: str) -> Operation:
    """Return the operation with this name."""
    action, _, rest = name.partition("-")
    structure, _, variant = rest.partition("-")
    if action not in ACTIONS or structure not in STRUCTURES or variant not in VARIANTS:
        raise ValueError(
            f"{name!r} is no operation: write ACTION-STRUCTURE[-VARIANT] with an action of {', '.join(ACTIONS)}, a "
            f"structure of {', '.join(STRUCTURES)} and a variant of {', '.join(v for v in VARIANTS if v)}"
        )
    return Operation(action, structure, variant)
