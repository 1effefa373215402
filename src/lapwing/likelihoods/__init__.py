"""What the outputs of a network mean: one family a file."""

from lapwing.likelihoods.bernoulli import Bernoulli
from lapwing.likelihoods.bradley_terry import BradleyTerry
from lapwing.likelihoods.categorical import Categorical
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.likelihoods.heteroscedastic import HeteroscedasticGaussian
from lapwing.likelihoods.likelihood import Likelihood
from lapwing.likelihoods.poisson import Poisson
from lapwing.likelihoods.registry import likelihood_from_spec, resolve_likelihood

__all__ = [
    "Bernoulli",
    "BradleyTerry",
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Poisson",
    "likelihood_from_spec",
    "resolve_likelihood",
]
