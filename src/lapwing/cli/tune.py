"""`lapwing tune`: choose prior, temperatures and noise of a fitted posterior, without the training data."""

import argparse
import time

from lapwing.cli import command
from lapwing.cli.command import Command


def _options(parser: argparse.ArgumentParser) -> None:
    command.add_model(parser)
    command.add_posterior(parser)
    parser.add_argument(
        "data", metavar="DATA", nargs="?", help=f"held-out data: {command.DATA}; without it, the evidence decides"
    )
    command.add_output(parser)
    command.add_tuning(parser)
    command.add_reading(parser)


def _run(options: argparse.Namespace) -> command.Answer:
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


COMMAND = Command(
    "tune",
    "choose prior, temperatures and noise of a fitted posterior",
    "Choose prior, temperatures and noise of a fitted posterior on held-out data, without fitting again.",
    "lapwing tune net.py:model net.lapwing val.npz --weights net.pt --out tuned.lapwing",
    _options,
    _run,
)
