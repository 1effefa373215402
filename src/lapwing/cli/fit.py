"""`lapwing fit` and `lapwing tune`: give a trained network a posterior, choose its prior, and write it to a file."""

import argparse
import time
from typing import Any

import torch

from lapwing.cli import command
from lapwing.cli.command import Command
from lapwing.errors import LapwingError
from lapwing.fitting import fit
from lapwing.laplace import Laplace


def _fit_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    command.add_model(parser)
    add("data", metavar="DATA", help=f"the training data: {command.DATA}")
    command.add_output(parser)
    command.add_fit(parser, required=True)
    command.add_factor(parser)
    add("--prior", type=float, default=1.0, metavar="TAU", help="prior precision of the weights (default: %(default)s)")
    add("--temperature", type=float, default=1.0, metavar="T", help="power of the likelihood (default: %(default)s)")
    add("--noise", type=float, metavar="SD", help="standard deviation of the noise in regression (default: estimated)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--tune", metavar="DATA", help="held-out data, on which prior and temperatures are chosen")
    how.add_argument(
        "--tune-evidence", action="store_true", help="choose prior and noise by the evidence, without held-out data"
    )
    command.add_tuning(parser)
    add("--checkpoint", metavar="DIR", help="folder from which an interrupted fit goes on")
    add("--seed", type=command.seed, default=0, help="seed of all random draws (default: %(default)s)")
    command.add_reading(parser)


def _fit(options: argparse.Namespace) -> command.Answer:
    command.require_other(options)
    command.require_free(options.out, options.force)
    family = command.likelihood_of(options)
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
        factor=command.factor_of(options),
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
    return {"out": options.out, "seconds": seconds, **command.described(la)}


def _tuned(la: Laplace, held_out: Any, options: argparse.Namespace) -> Laplace:
    try:
        return command.tuned(la, held_out, options)
    except LapwingError as error:
        words = str(error).rstrip(".")
        raise LapwingError(f"{words}. The fit itself is done: {options.out} holds it, untuned") from error


def _tune_options(parser: argparse.ArgumentParser) -> None:
    command.add_model(parser)
    command.add_posterior(parser)
    parser.add_argument(
        "data", metavar="DATA", nargs="?", help=f"held-out data: {command.DATA}; without it, the evidence decides"
    )
    command.add_output(parser)
    command.add_tuning(parser)
    command.add_reading(parser)


def _tune(options: argparse.Namespace) -> command.Answer:
    command.require_other(options, but="posterior")  # --force may replace it, since the curvature is the same
    command.require_free(options.out, options.force)
    model = command.model_of(options)
    la = command.posterior_of(options, model)
    reading = command.reading_of(options)
    data = None if options.data is None else reading.read(options.data, model, la.likelihood)
    begin = time.perf_counter()
    la = command.tuned(la, data, options)
    spent = time.perf_counter() - begin
    la.save(options.out)
    print(f"{la.summary()}\ntuned in {spent:.1f} s; written to {options.out}")
    return {"out": options.out, "seconds": {"tune": spent}, **command.described(la)}


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
