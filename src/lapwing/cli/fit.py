"""`lapwing fit` and `lapwing tune`: give a trained network a posterior, choose its prior, and write it to a file."""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from lapwing.cli import command
from lapwing.cli.command import Command
from lapwing.curvature import GGN, Factor, Structure
from lapwing.errors import BadData, LapwingError
from lapwing.fitting import fit
from lapwing.laplace import Laplace
from lapwing.likelihoods import Gaussian, Likelihood, resolve_likelihood
from lapwing.storage import named, require_writable

LEARNED = ("prior", "temperature", "logit_temperature", "noise", "dispersion")


def _fit_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    command.add_model(parser)
    add("data", metavar="DATA", help=f"the training data: {command.DATA}")
    _add_output(parser)
    command.add_fit(parser, required=True)
    kinds, factors = sorted(named(Structure)), sorted(["auto", *named(Factor)])
    add("--structure", choices=kinds, default="auto", help="form of the curvature (default: %(default)s)")
    add("--factor", choices=factors, default="ggn", help="how the curvature is computed (default: %(default)s)")
    add("--tolerance", type=float, metavar="SHARE", help="share of the GGN to leave out; 1e-3 is several times faster")
    add("--prior", type=float, default=1.0, metavar="TAU", help="prior precision of the weights (default: %(default)s)")
    add("--temperature", type=float, default=1.0, metavar="T", help="power of the likelihood (default: %(default)s)")
    add("--noise", type=float, metavar="SD", help="standard deviation of the noise in regression (default: estimated)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--tune", metavar="DATA", help="held-out data, on which prior and temperatures are chosen")
    how.add_argument(
        "--tune-evidence", action="store_true", help="choose prior and noise by the evidence, without held-out data"
    )
    _add_tuning(parser)
    add("--checkpoint", metavar="DIR", help="folder from which an interrupted fit resumes")
    add("--seed", type=command.seed, default=0, help="seed of all random draws (default: %(default)s)")
    command.add_reading(parser)


def _fit(options: argparse.Namespace) -> command.Answer:
    command.require_other(options)
    _require_free(options.out, options.force)
    family = _likelihood_of(options)
    model = command.model_of(options)
    reading = command.reading_of(options)
    data = reading.read(options.data, model, family)
    held_out = None if options.tune is None else reading.read(options.tune, model, family)
    begin = time.perf_counter()
    la = fit(
        model,
        data,
        family,
        structure=options.structure,
        factor=_factor_of(options),
        select=command.selection_of(options),
        prior=options.prior,
        temperature=options.temperature,
        n_data=options.n_data,
        generator=torch.Generator(next(model.parameters()).device).manual_seed(options.seed),
        memory=options.memory,
        checkpoint=options.checkpoint,
    )
    seconds = {"fit": time.perf_counter() - begin}
    spent = f"fitted in {seconds['fit']:.1f} s"
    la.save(options.out)
    if held_out is not None or options.tune_evidence:
        begin = time.perf_counter()
        la = _tuned(la, held_out, options)
        seconds["tune"] = time.perf_counter() - begin
        spent += f", tuned in {seconds['tune']:.1f} s"
        la.save(options.out)
    print(f"{la.summary()}\n{spent}; written to {options.out}")
    return {"out": options.out, "seconds": seconds, **_described(la)}


def _tuned(la: Laplace, held_out: Any, options: argparse.Namespace) -> Laplace:
    try:
        return la.tune(held_out, learn=options.learn, prior=options.tune_prior)
    except LapwingError as error:
        words = str(error).rstrip(".")
        raise LapwingError(f"{words}. The fit itself is done: {options.out} contains the untuned posterior") from error


def _tune_options(parser: argparse.ArgumentParser) -> None:
    command.add_model(parser)
    command.add_posterior(parser)
    parser.add_argument(
        "data", metavar="DATA", nargs="?", help=f"held-out data: {command.DATA}; without it, the evidence decides"
    )
    _add_output(parser)
    _add_tuning(parser)
    command.add_reading(parser)


def _tune(options: argparse.Namespace) -> command.Answer:
    command.require_other(options, but="posterior")  # --force may replace it, since the curvature is the same
    _require_free(options.out, options.force)
    model = command.model_of(options)
    la = command.posterior_of(options, model)
    reading = command.reading_of(options)
    data = None if options.data is None else reading.read(options.data, model, la.likelihood)
    begin = time.perf_counter()
    la = la.tune(data, learn=options.learn, prior=options.tune_prior)
    spent = time.perf_counter() - begin
    la.save(options.out)
    print(f"{la.summary()}\ntuned in {spent:.1f} s; written to {options.out}")
    return {"out": options.out, "seconds": {"tune": spent}, **_described(la)}


def _add_output(parser: argparse.ArgumentParser) -> None:
    """Add --out for a posterior, and --force."""
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="file to write, such as model.lapwing")
    add("--force", action="store_true", help="replace FILE if it exists")


def _add_tuning(parser: argparse.ArgumentParser) -> None:
    """Add the options of tuning."""
    add = parser.add_argument
    add(
        "--learn",
        type=_learned,
        metavar="NAMES",
        help=f"what to choose, with commas: {', '.join(LEARNED)} (default: what applies)",
    )
    add(
        "--tune-prior",
        choices=("scalar", "layerwise", "parameterwise"),
        default="scalar",
        help="one prior precision for all weights, per layer or per weight (default: %(default)s)",
    )


def _likelihood_of(options: argparse.Namespace) -> Likelihood:
    if options.noise is None:
        return resolve_likelihood(options.likelihood)
    if options.likelihood != "regression":
        raise BadData(f"--noise is for --likelihood regression, not for {options.likelihood}")
    return Gaussian(noise=options.noise)


def _factor_of(options: argparse.Namespace) -> str | Factor:
    if options.tolerance is None:
        return str(options.factor)
    if options.factor != "ggn":
        raise BadData(f"--tolerance is for --factor ggn, not for {options.factor}")
    return GGN(tolerance=options.tolerance)


def _require_free(path: Path, force: bool) -> None:
    """Refuse to replace a posterior without --force, since it may have taken hours."""
    if path.is_dir():
        raise BadData(f"--out {path} is a folder; name a file such as {path / 'model.lapwing'}")
    if path.exists() and not force:
        raise BadData(f"{path} exists: choose another --out, or say --force to replace it")
    require_writable(path.parent)


def _described(la: Laplace) -> dict[str, Any]:
    """Return the settings of a posterior by name, and the lines of its summary."""
    noise = getattr(la.likelihood, "noise", None)
    return {
        "model": type(la.module).__name__,
        "weights": la.params.size,
        "likelihood": str(la.likelihood),
        **({} if noise is None else {"noise": noise}),
        "structure": la.curvature.structure.name,
        "factor": type(la.curvature.factor).__name__,
        "n_data": la.curvature.n_data,
        "prior": str(la.prior),
        "temperature": float(la.temperature.T),
        "logit_temperature": la.logit_temperature,
        "tuned": la.tuned,
        "notes": [*la.curvature.notes, *(la.tuning.messages if la.tuning else ())],
        "summary": la.summary().split("\n"),
    }


def _learned(text: str) -> tuple[str, ...]:
    """Read names of what tuning chooses."""
    found = command.names(text)
    if not found or not set(found) <= set(LEARNED):
        raise argparse.ArgumentTypeError(f"{text!r} is not one or several of {', '.join(LEARNED)}")
    return found


FIT = Command(
    "fit",
    "give a trained network a posterior and write it to a file",
    "Give a trained network a posterior over its weights, and write it to a file that predict, report and "
    "lapwing.load read together with the network. Tune it on held-out data: the untuned prior is often far too wide.",
    "lapwing fit net.py:model train.npz --weights net.pt --likelihood classification --tune val.npz --out net.lapwing",
    _fit_options,
    _fit,
)
TUNE = Command(
    "tune",
    "choose prior, temperatures and noise of a fitted posterior",
    "Choose prior, temperatures and noise of a fitted posterior on held-out data, without fitting again.",
    "lapwing tune net.py:model net.lapwing val.npz --weights net.pt --out tuned.lapwing",
    _tune_options,
    _tune,
)
