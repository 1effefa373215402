"""The operations, by name: `fit-kron`, `predict-kron`, `probs-ekfac`, `sweep-diag`, …

A name is an action, a structure and the curvature's estimator: `fit-kron-mc` is a Monte Carlo Fisher, `fit-diag-1e-3`
keeps the curvature to a thousandth, `fit-kron-default` is what `fit` does by itself, `fit-kron-reduce` sums gradients
over positions, `fit-ekfac-basis` drops nothing in its basis either, `probs-kron-jvp` draws probabilities by
forward-mode products; without a suffix nothing is dropped (of EKFAC's moments; its basis is the default) and Kronecker
factors are of the *expand* kind, as the peers'.
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
    "1e-3": "kept to 1e-3",
    "default": "as by default",
    "reduce": "reduce",
    "basis": "nothing dropped in its basis either",
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
        """In words, for the table."""
        what = ACTIONS[self.action]
        return f"{what}, {self.structure}" + (f" ({VARIANTS[self.variant]})" if self.variant else "")

    @property
    def of_new(self) -> bool:
        """Whether it is about the inputs to predict, not about the data of the fit."""
        return self.action in ("predict", "probs", "distilled", "ensemble")


def operation(name: str) -> Operation:
    """The operation with this name."""
    action, _, rest = name.partition("-")
    structure, _, variant = rest.partition("-")
    if action not in ACTIONS or structure not in STRUCTURES or variant not in VARIANTS:
        raise ValueError(
            f"{name!r} is no operation: write ACTION-STRUCTURE[-VARIANT] with an action of {', '.join(ACTIONS)}, a "
            f"structure of {', '.join(STRUCTURES)} and a variant of {', '.join(v for v in VARIANTS if v)}"
        )
    return Operation(action, structure, variant)
