"""`lapwing doctor`: examine a network without a fit: its operations, and the structures that fit into memory."""

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lapwing.cli import command
from lapwing.cli.command import Command
from lapwing.cli.data import Rows, require_readable, suited
from lapwing.cli.models import some
from lapwing.curvature import GGN, Auto, MatrixFree, Problem, Structure, available_memory, pose, resolve_structure
from lapwing.curvature.curvature import in_words
from lapwing.curvature.kron import kept_as
from lapwing.errors import BadData, LapwingError, TooLarge, UnsupportedOperation
from lapwing.likelihoods import Likelihood, resolve_likelihood
from lapwing.model import Batches, Network, Params, last_layer, select_names
from lapwing.model.calls import call, output_tensor
from lapwing.model.copies import borrowed
from lapwing.storage import named

ASSUMED = 10_000  # samples, where there are no data
SAMPLES = 8
SIDES = (32, 28, 64, 224, 96, 8)  # of images, the most usual first
TOKENS = 16
PATIENCE = 3600.0  # seconds: a fit that may take longer is recommended for the last layer alone


def _options(parser: argparse.ArgumentParser) -> None:
    command.add_model(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--data", metavar="DATA", help=f"some data for the network: {command.DATA}")
    which.add_argument(
        "--input", type=shape, metavar="SHAPE", help="shape of one input, such as 1,28,28 (default: a guess)"
    )
    command.add_fit(parser, required=False)
    parser.add_argument("--verbose", action="store_true", help="print every operation on its own line")
    command.add_reading(parser)


def _run(options: argparse.Namespace) -> command.Answer:
    model = command.model_of(options)
    found: dict[str, Any] = {}

    def tell(title: str, lines: list[str]) -> None:
        for k, line in enumerate(lines):
            print(f"{title if not k else '':8} {line}".rstrip())
        found[title] = lines

    tell("model", _model_lines(model))
    data, likelihood, words = _examined(options, model)
    tell("data", [words])
    problem = _posed(options, model, data, resolve_likelihood(likelihood))
    tell("outputs", _output_lines(problem, f"{likelihood}{'' if options.likelihood else ' (a guess: --likelihood)'}"))
    tell("tape", _tape_lines(problem, options.verbose))
    prices = _prices(problem)
    tell("memory", _structure_lines(problem, prices))
    seconds = _gradient_of_a_batch(problem)
    tell("time", _time_lines(problem, seconds))
    tell("auto", [Auto().chosen(problem)[1]])
    choice = chosen(options, problem, likelihood, seconds)
    tell("choice", [f"{name:11} {value}, because {why}" for name, (value, why) in choice.items()])
    tell("next", [_next(options, choice)])
    return {
        "settings": {name: {"value": value, "because": why} for name, (value, why) in choice.items()},
        "weights": problem.network.params.size,
        "outputs": problem.outputs,
        "memory": problem.memory,
        "structures": {name: {"bytes": needed, "obstacle": why} for name, (needed, _, why) in prices.items()},
        "gradient_seconds": seconds,
        "next": _next(options, choice),
        "text": found,
    }


def _model_lines(model: nn.Module) -> list[str]:
    """Describe the network: size, frozen weights, training mode, and norms that have seen no data."""
    params = list(model.parameters())
    total, frozen = sum(p.numel() for p in params), sum(p.numel() for p in params if not p.requires_grad)
    dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in params}))
    lines = [f"{type(model).__name__}, {total:,} weights in {len(params)} tensors, {dtypes} on {params[0].device}"]
    if frozen:
        lines.append(f"{frozen:,} of them are frozen (requires_grad=False) and get no posterior")
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    if any(m.running_mean is None for m in norms):
        lines.append("warning: a batch norm without running statistics mixes the samples of a batch")
    if any(m.running_mean is not None and not m.running_mean.any() for m in norms):
        lines.append("warning: a batch norm has seen no data yet. Are these the trained weights? (--weights FILE)")
    active = [m for m in model.modules() if m.training and isinstance(m, _BatchNorm | _DropoutNd)]
    if active:
        lines.append(
            "it is in training mode; Lapwing uses it in eval mode: no dropout, stored statistics in batch norm"
        )
    return lines


def _examined(options: argparse.Namespace, model: nn.Module) -> tuple[Any, str, str]:
    """Return data for the network, the name of their likelihood, and where they come from."""
    if options.data is not None:
        data = command.reading_of(options).read(options.data, model)
        batch = next(iter(Batches(data, model, _device(model))))
        likelihood = options.likelihood or _guessed(_outputs(model, batch.inputs), batch.targets)
        data = suited(data, model, resolve_likelihood(likelihood)) if isinstance(data, Rows) else data
        return data, likelihood, options.data
    x = made_up(model, options.input)
    f = _outputs(model, x)
    likelihood = options.likelihood or _guessed(f)
    family = resolve_likelihood(likelihood)
    y = family.sample_target(family.outputs(f), torch.Generator(f.device).manual_seed(0))
    n = int(options.n_data or ASSUMED)
    words = f"made up: {n:,} inputs of shape {tuple(x.shape[1:])} {str(x.dtype).removeprefix('torch.')}"
    guess = ", a guess from the first layer" if options.input is None else ""
    return Repeated((x, y), -(-n // SAMPLES)), likelihood, f"{words}{guess} (set --data, --input or --n-data)"


def _guessed(f: Tensor, y: Any = None) -> str:
    """Guess classification if there are several outputs and (if known) one target."""
    several = f.ndim > 1 and f.shape[-1] > 1
    return "classification" if several and (not isinstance(y, Tensor) or y.ndim < f.ndim) else "regression"


def _outputs(model: nn.Module, inputs: Any) -> Tensor:
    with borrowed(model) as own, torch.no_grad():
        return output_tensor(call(own, inputs))


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _posed(options: argparse.Namespace, model: nn.Module, data: Any, family: Likelihood) -> Problem:
    """Pose the problem that a fit would solve, with all its checks."""
    batches = Batches(data, model, _device(model))
    select = command.selection_of(options)
    names = last_layer(model, next(iter(batches)).inputs) if select == "last_layer" else select_names(model, select)
    network = Network(model, Params.of(model, names), family.outputs)
    return pose(network, batches, family, None, memory=options.memory or available_memory())


def _output_lines(problem: Problem, likelihood: str) -> list[str]:
    lines = [f"{problem.outputs:,} per sample, taken as {likelihood}"]
    if not problem.factor.exact:
        lines.append(f"too many for the exact GGN (up to {GGN().limit:,}): fit with --factor auto")
    return lines


def _tape_lines(problem: Problem, verbose: bool) -> list[str]:
    """List the operations with weights, how their Jacobians are computed, and the blocks that result."""
    plan = problem.plan
    seen: dict[tuple[str, str], list[str]] = {}
    for k, step in enumerate(plan.steps):
        name = getattr(step.func, "__name__", str(step.func))
        key = (name, f"{step.method}{' ' + str(k) if verbose else ''}")
        seen.setdefault(key, []).append(" + ".join(n for n in problem.network.params.names if n in step.names))
    how = {"rule": "by its rule", "generic": "no rule: replayed sample by sample", "loop": "a loop over samples (slow)"}
    lines = [
        f"{name:12} {f'{len(uses)} ×':>5}  {how[key.partition(' ')[0]]}: {some(uses)}"
        for (name, key), uses in seen.items()
    ]
    kinds = Counter(kept_as(block) for block in plan.blocks if block.kind != "unused")
    kept = ", ".join(f"{count} {'Kronecker' if kind == 'kron' else kind}" for kind, count in kinds.items())
    lines.append(
        f"blocks in kron and ekfac: {kept}; checked against autograd on {min(problem.batch, plan.distinct)} samples"
    )
    unused = [name for block in plan.blocks if block.kind == "unused" for name in block.names]
    if unused:
        lines.append(f"warning: {some(unused)} do not reach the outputs, so the data say nothing about them")
    return [*lines, *(f"note: {note}" for note in plan.notes)]


def _prices(problem: Problem) -> dict[str, tuple[int | None, Structure, str]]:
    """Return the bytes that each structure needs, as `fit` estimates them, and why it cannot be used, if so."""
    found = []
    for name in named(Structure).keys() - {"auto"}:
        with suppress(UnsupportedOperation):  # a structure that needs arguments has no price of its own
            structure = resolve_structure(name)
            found.append((structure.needed(problem), name, structure))
    found.sort(key=lambda item: (item[0] is None, item[0], item[1]))
    return {name: (needed, each, _obstacle(problem, each, needed)) for needed, name, each in found}


def _structure_lines(problem: Problem, prices: Mapping[str, tuple[int | None, Structure, str]]) -> list[str]:
    """List the memory of each structure, the smallest first."""
    picked = type(Auto().chosen(problem)[0])
    lines = [f"estimates for the curvature and its decomposition; the budget is {in_words(problem.memory)}"]
    for name, (needed, structure, obstacle) in prices.items():
        reads = "reads the data for every product" if structure.reads_data else f"reads the data {structure.passes()} ×"
        size = "?" if needed is None else in_words(needed)
        mark = " ← auto" if type(structure) is picked else ""
        lines.append(f"{name:12} {size:>9}  {reads}{obstacle}{mark}")
    return lines


def _obstacle(problem: Problem, structure: Structure, needed: int | None) -> str:
    if needed is not None and needed > problem.memory:
        return ", too large"
    try:
        structure.require(problem)
    except TooLarge:
        return ", too large"
    except LapwingError as error:
        return f", refused: {error}"
    return ""


def _gradient_of_a_batch(problem: Problem) -> float:
    """Time a gradient of one batch, in seconds."""
    batch, taken = next(iter(problem.batches)), []
    for _ in range(2):
        begin = time.perf_counter()
        problem.products.vjp(batch.inputs, lambda f: torch.ones_like(f)[None])
        taken.append(time.perf_counter() - begin)
    return min(taken)


def _time_lines(problem: Problem, seconds: float) -> list[str]:
    """Say how long a gradient takes, and how many gradients a fit takes."""
    length = problem.batches.length
    whole = f", about {_seconds(seconds * length)} for all data in such batches" if length else ""
    width = problem.factor.width(problem.outputs)
    return [
        f"a gradient of {problem.batch} samples takes {_seconds(seconds)}{whole}; an estimate from one batch",
        f"backward passes for each reading of the data: up to {width:,}, one per output direction of the "
        f"{type(problem.factor).__name__}; fewer where the network is confident or small",
        MatrixFree().cost(problem),
    ]


def _seconds(count: float) -> str:
    return f"{count:,.0f} s" if count >= 10 else f"{count:.2g} s"


def chosen(
    options: argparse.Namespace, problem: Problem, likelihood: str, seconds: float
) -> dict[str, tuple[str, str]]:
    """Choose the settings of a fit: {option: (value, why)}."""
    structure, why = Auto().chosen(problem)
    value, _, reason = why.partition(" (")[0].partition(", because ")
    found = {"likelihood": (likelihood, _why_likelihood(options, problem))}
    found["select"] = _selected(options, problem, structure, seconds)
    if found["select"][0] == "last_layer" and command.selection_of(options) == "all":
        found["structure"] = ("auto", "the last layer is small, and the fit then picks among all structures")
    else:
        found["structure"] = (value, reason or "of the selection")
    width = f"{problem.outputs:,} outputs per sample"
    if problem.factor.exact:
        found["factor"] = ("ggn", f"{width} are few enough for the exact one (up to {GGN().limit:,})")
    else:
        found["factor"] = ("auto", f"{width} are too many for the exact GGN (up to {GGN().limit:,})")
    found["tune"] = (
        "held-out data",
        "an untuned prior is often far too wide: --tune takes a few hundred items that were not trained on, "
        "--tune-evidence needs none",
    )
    return found


def _why_likelihood(options: argparse.Namespace, problem: Problem) -> str:
    if options.likelihood:
        return "you said so"
    several = problem.outputs > 1
    return f"there are {problem.outputs:,} outputs per sample" if several else "there is one output per sample"


def _selected(options: argparse.Namespace, problem: Problem, structure: Structure, seconds: float) -> tuple[str, str]:
    """Choose between all weights and the last layer by the memory and the time that all would take."""
    asked = command.selection_of(options)
    if asked != "all":
        return (asked if isinstance(asked, str) else ",".join(asked)), "you said so"
    if structure.reads_data or structure.name == "diag":
        return "last_layer", (
            f"the Kronecker factors of all {problem.network.params.size:,} weights exceed {in_words(problem.memory)}"
        )
    passes = structure.passes() * problem.factor.width(problem.outputs)
    whole = seconds * (problem.batches.length or 1) * passes
    if whole > PATIENCE:
        return "last_layer", f"a fit of all weights takes up to {_seconds(whole)} ({passes:,} gradients of the data)"
    return "all", f"a fit takes at most about {_seconds(whole)} ({passes:,} gradients of the data)"


def _next(options: argparse.Namespace, choice: Mapping[str, tuple[str, str]]) -> str:
    weights = f" --weights {options.weights}" if options.weights else ""
    extra = "" if choice["select"][0] == "all" else f" --select {choice['select'][0]}"
    extra += "" if choice["factor"][0] == "ggn" else f" --factor {choice['factor'][0]}"
    settings = f"--likelihood {options.likelihood or 'LIKELIHOOD'}{extra} --tune HELD_OUT --out model.lapwing"
    return f"lapwing fit {options.model} {options.data or 'DATA'}{weights} {settings}"


def shape(text: str) -> tuple[int, ...]:
    """Read positive whole numbers separated by commas."""
    return tuple(command.positive(part) for part in text.split(","))


@dataclass(frozen=True, eq=False)
class Repeated:
    """Data made of one batch that is repeated, for estimates that only need the number of items."""

    batch: Any
    times: int

    def __len__(self) -> int:
        return self.times

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.times):
            yield self.batch


def made_up(model: nn.Module, shape: tuple[int, ...] | None) -> Tensor:
    """Make random inputs of this shape, or of the first guess that the network accepts."""
    if shape is not None:
        x = _normal(model, shape)
        require_readable([x], model, "--input")
        return x
    for x in _guesses(model):
        try:
            require_readable([x], model, "a guess")
            return x
        except LapwingError:
            continue
    raise BadData(
        "the shape of an input cannot be guessed from the first layer: pass --input 3,32,32 (without the batch), "
        "or --data if inputs are not one tensor of numbers"
    )


def _guesses(model: nn.Module) -> Iterator[Tensor]:
    """Yield inputs that the first layer with weights would accept."""
    layers = (m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Embedding))
    first = next(layers, None)
    if isinstance(first, nn.Linear):
        yield _normal(model, (first.in_features,))
        yield _normal(model, (TOKENS, first.in_features))
    elif isinstance(first, nn.Conv1d | nn.Conv2d):
        for side in SIDES:
            yield _normal(model, (first.in_channels, *(side,) * len(first.kernel_size)))
    elif isinstance(first, nn.Embedding):
        ids = torch.randint(first.num_embeddings, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(0))
        yield ids.to(first.weight.device)


def _normal(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    parameter = next(model.parameters())
    x = torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(0))
    return x.to(parameter.device, parameter.dtype)


COMMAND = Command(
    "doctor",
    "examine a network: its operations, which structures fit into memory, what they cost",
    "Examine a network without a fit: print its operations with weights and how their Jacobians are computed, which "
    "structures fit into memory and what they cost, and the recommended settings with reasons.",
    "lapwing doctor net.py:model --weights net.pt --input 1,28,28",
    _options,
    _run,
)
