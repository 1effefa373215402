"""From a distribution over outputs to the prediction of targets that follows from it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliLaw
from torch.distributions import Categorical as CategoricalLaw

from lapwing.likelihoods import Likelihood
from lapwing.predictive.classes import ClassPrediction, LabelPrediction
from lapwing.predictive.function import FunctionDistribution
from lapwing.predictive.links import choose_link, inner_law
from lapwing.predictive.prediction import Prediction
from lapwing.predictive.values import ValuePrediction


def predict_targets(
    function: FunctionDistribution,
    likelihood: Likelihood,
    *,
    link: str = "auto",
    samples: int | None = None,
    novelty: Tensor | Callable[[], Tensor] | None = None,
    scalar: bool = False,
    shifted: bool = False,
    generator: torch.Generator | None = None,
) -> Prediction:
    """Return the prediction that follows from a distribution of f: of classes, labels or numbers, as p(y | f) is.

    `link="auto"` takes what is exact or nearly so (closed form, quadrature in one dimension), else Monte Carlo in
    output space. `scalar`: the network returned (B,). `shifted`: position t predicts the label at t + 1.
    """
    law = None if likelihood.softmax else inner_law(likelihood, function.mean)
    leaf: type[Prediction] = ValuePrediction
    if likelihood.softmax or isinstance(law, CategoricalLaw):
        leaf = ClassPrediction
    elif isinstance(law, BernoulliLaw):
        leaf = LabelPrediction
    seed = None
    if generator is not None:
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    return leaf(
        function,
        likelihood,
        link=choose_link(link, function, likelihood),
        samples=samples,
        seed=seed,
        score=novelty,
        scalar=scalar,
        shifted=shifted,
    )
