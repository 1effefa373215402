"""Likelihoods: what the outputs of a network mean for the targets."""

from lapwing.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian
from lapwing.likelihoods.labels import Bernoulli, BradleyTerry, Categorical
from lapwing.likelihoods.likelihood import Likelihood, likelihood_from_spec, resolve_likelihood, stored_likelihood
from lapwing.likelihoods.poisson import Poisson

__all__ = [
    "Bernoulli", "BradleyTerry", "Categorical", "Gaussian", "HeteroscedasticGaussian", "Likelihood", "Poisson",
    "likelihood_from_spec", "resolve_likelihood", "stored_likelihood",
]  # fmt: skip
