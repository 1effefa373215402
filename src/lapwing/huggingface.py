"""A door to Transformers and PEFT: a callback for `Trainer`, and posteriors that live in an adapter's folder.

trainer = Trainer(model, args, train_dataset=data, callbacks=[callback := LaplaceCallback("classification")])
trainer.train()
callback.la.predict(batch).probs

model.save_pretrained("adapter")
lapwing.huggingface.save(callback.la, "adapter")
la = lapwing.huggingface.load("adapter", PeftModel.from_pretrained(base, "adapter"))
"""

from __future__ import annotations

import hashlib
import inspect
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lapwing.curvature import resolve_structure
from lapwing.errors import BadData, UnsupportedModel, UnsupportedOperation
from lapwing.fitting import fit
from lapwing.fitting import load as load_posterior
from lapwing.laplace import Laplace
from lapwing.likelihoods import Likelihood, resolve_likelihood
from lapwing.model.copies import borrowed
from lapwing.model.params import active_adapters, adapter_names, adapter_tensors, without_wrappers
from lapwing.model.stored import fingerprint
from lapwing.model.watch import tensor_bytes, written
from lapwing.storage import read_file, write_file

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("lapwing.huggingface needs Transformers: pip install 'lapwing-torch[huggingface]'") from error

__all__ = ["LaplaceCallback", "generate", "load", "save"]

FILE = "posterior.lapwing"
"""The file that `save` writes into an adapter's folder."""


class LaplaceCallback(TrainerCallback):
    """Fit a posterior when `Trainer.train` ends, after the best model was loaded (`load_best_model_at_end=True`).

    `callback.la` is the posterior, over the parameters that were trained. `tune` says whether it is tuned on the data
    that the trainer evaluated on (a trainer that never evaluates prepares none: set `eval_strategy`), or holds
    options of `la.tune`, held-out `data` among them. `data` are batches to fit in place of the trainer's own. Anything
    else goes to `lapwing.fit`.

    Examples:
        >>> callback = LaplaceCallback("classification", structure="kron", factor="mc")  # doctest: +SKIP
        >>> data = {"train_dataset": train, "eval_dataset": val}  # doctest: +SKIP
        >>> trainer = Trainer(model, arguments, callbacks=[callback], **data)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
        >>> callback.la.predict(batch).probs  # doctest: +SKIP
    """

    def __init__(
        self, likelihood: str | Likelihood, *, tune: bool | Mapping[str, Any] = True, data: Any = None, **options: Any
    ) -> None:
        self.likelihood = resolve_likelihood(likelihood)  # wrong options are refused before the training
        resolve_structure(options.get("structure", "auto"))
        known = set(inspect.signature(fit).parameters) - {"model", "data", "likelihood"}
        unknown = sorted(set(options) - known)
        if unknown:
            raise BadData(f"{unknown[0]!r} is no option of lapwing.fit, which takes {', '.join(sorted(known))}")
        self.tune, self.data, self.options = tune, data, options
        self._la: Laplace | None = None

    @property
    def la(self) -> Laplace:
        """The posterior, once the training has ended."""
        if self._la is None:
            raise UnsupportedOperation("the posterior is fitted when Trainer.train() ends, which it has not yet")
        return self._la

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Fit the model that the trainer holds now."""
        if getattr(args, "world_size", 1) > 1 and self.data is None:
            raise UnsupportedOperation(
                "with several processes a trainer repeats data to give all of them equally many batches, which would "
                "count twice: pass LaplaceCallback(..., data=) the shard of this process, without repetitions"
            )
        data = given.get("train_dataloader") if self.data is None else self.data
        if data is None:
            raise BadData("the trainer has no training data: pass LaplaceCallback(..., data=batches)")
        la = fit(given["model"], data, self.likelihood, **self.options)
        choices = {"data": given.get("eval_dataloader"), **(self.tune if isinstance(self.tune, Mapping) else {})}
        if self.tune is not False and choices["data"] is not None:
            la = la.tune(**choices)
        self._la = la


def generate(
    la: Laplace,
    inputs: Mapping[str, Any] | Tensor,
    *,
    samples: int = 4,
    generator: torch.Generator | None = None,
    **options: Any,
) -> list[Any]:
    """Generate with each of `samples` networks whose weights are drawn from the posterior: one result per network.

    `inputs` (a dict, or the token ids alone) and `options` are what the model's own `generate` takes. If the results
    agree, the posterior is sure of the text; `la.predict(...).epistemic` says the same for each token. The networks
    have the weights of `la.ensemble(samples)`, drawn with `generator`; `do_sample=True` draws tokens with torch's
    global generator.

    Examples:
        >>> inputs = tokenizer("Once", return_tensors="pt")  # doctest: +SKIP
        >>> for ids in lapwing.huggingface.generate(la, inputs, max_new_tokens=20):  # doctest: +SKIP
        ...     print(tokenizer.decode(ids[0]))
    """
    if not callable(getattr(la.module, "generate", None)):
        raise UnsupportedModel(f"{type(la.module).__name__} has no method generate(): it is no language model")
    given = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    members = la.ensemble(samples, generator)
    found = []
    with borrowed(la.module) as own, torch.no_grad():
        speaker = _Speaker(own)
        for weights in members:
            named = {f"model.{name}": value for name, value in weights.items()}
            found.append(functional_call(speaker, named, (), {**given, **options}))
    return found


class _Speaker(nn.Module):
    """A model whose forward pass generates, so that it can be called with other weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **arguments: Any) -> Any:
        return self.model.generate(**arguments)  # type: ignore[operator]


def save(la: Laplace, folder: str | Path) -> Path:
    """Write the posterior over a PEFT adapter into the adapter's folder, and return the file.

    Its parameters are named as in the adapter's own file, without the adapter's name, so that `load` finds them under
    whatever name the adapter is loaded. The file belongs to this adapter on this base model: hashes of both are kept.

    Examples:
        >>> model.save_pretrained("adapter")  # doctest: +SKIP
        >>> lapwing.huggingface.save(la, "adapter")  # doctest: +SKIP
    """
    tensors_of = adapter_tensors(la.module)
    adapters = sorted({tensors_of[name][0] for name in la.params.names if name in tensors_of})
    if len(adapters) != 1:
        told = f"it is over {' and '.join(map(repr, adapters))}" if adapters else "no selected weight is in one"
        raise UnsupportedModel(f"expected a posterior over one PEFT adapter, but {told}. Use la.save(path) instead")
    (adapter,) = adapters
    folder = Path(folder)
    if not folder.is_dir():
        raise BadData(f"there is no folder {str(folder)!r}: save the adapter first, model.save_pretrained(folder)")
    tensors, header = la.stored()
    header = _renamed(header, {name: plain for name, (owner, plain) in tensors_of.items() if owner == adapter})
    header["adapter"] = _hashes(la.module, adapter)
    write_file(folder / FILE, tensors, header)
    return folder / FILE


def load(folder: str | Path, model: nn.Module, *, adapter: str | None = None, **options: Any) -> Laplace:
    """Read the posterior in an adapter's folder, for a model that holds this adapter, under any name, beside others.

    `adapter` is its name in the model, by default the active one. Other adapters do not count. `options` are those of
    `lapwing.load`.

    Examples:
        >>> model = PeftModel.from_pretrained(base, "adapter", adapter_name="mine")  # doctest: +SKIP
        >>> la = lapwing.huggingface.load("adapter", model)  # doctest: +SKIP
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise BadData(f"there is no {FILE!r} in {str(folder)!r}: lapwing.huggingface.save(la, folder) writes it")
    tensors, header = read_file(path)
    if "adapter" not in header:
        raise BadData(f"{str(path)!r} is not a posterior over an adapter: read it with lapwing.load(path, model)")
    if adapter is None:
        active = sorted(active_adapters(model))
        if len(active) != 1:
            raise UnsupportedModel(f"expected one active adapter, got {active} of {sorted(adapter_names(model))}")
        (adapter,) = active
    names = {plain: name for name, (owner, plain) in adapter_tensors(model).items() if owner == adapter}
    if not names:
        raise UnsupportedModel(f"the model has no adapter {adapter!r}; its adapters are {sorted(adapter_names(model))}")
    if adapter not in active_adapters(model):
        raise UnsupportedModel(f"adapter {adapter!r} is not active: model.set_adapter({adapter!r}) first")
    missing = [
        name for name in header["parameters"] if name not in names and name not in dict(model.named_parameters())
    ]
    if missing:
        raise UnsupportedModel(f"the posterior has a parameter {missing[0]!r}, which adapter {adapter!r} lacks")
    for what, digest in _hashes(model, adapter).items():
        if digest != header["adapter"].get(what):
            told = f"adapter {adapter!r} has" if what == "adapter" else "the base model has"
            raise UnsupportedModel(
                f"{told} other weights or another dtype than the posterior in {str(folder)!r} was fitted with. Load "
                "the same weights, or fit again."
            )
    header = _renamed({key: value for key, value in header.items() if key != "adapter"}, names)
    header["written"] = written(model)
    header["fingerprint"] = fingerprint(model, header["written"])
    with tempfile.TemporaryDirectory() as place:
        write_file(Path(place) / FILE, tensors, header)
        return load_posterior(Path(place) / FILE, model, **options)


def _renamed(tree: Any, names: Mapping[str, str]) -> Any:
    """Replace names of parameters in all texts and keys of a header."""
    if isinstance(tree, dict):
        return {_renamed(key, names): _renamed(value, names) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_renamed(value, names) for value in tree]
    if isinstance(tree, str) and tree not in names:
        for old, new in names.items():
            tree = tree.replace(old, new) if old in tree else tree
        return tree
    return names.get(tree, tree) if isinstance(tree, str) else tree


def _hashes(model: nn.Module, adapter: str) -> dict[str, str]:
    """Return hashes of the tensors and scalings of one adapter, and of the tensors outside of all adapters."""
    owned = adapter_tensors(model)
    parts: dict[str, list[tuple[str, Any]]] = {"adapter": [], "base": []}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        owner, plain = owned.get(name, (None, without_wrappers(name)))
        if owner in (None, adapter):
            parts["base" if owner is None else "adapter"].append((plain, tensor))
    found = {}
    for what, tensors in parts.items():
        digest = hashlib.sha256()
        for plain, tensor in sorted(tensors, key=lambda pair: pair[0]):
            digest.update(f"{plain}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
            digest.update(tensor_bytes(tensor))
        found[what] = digest
    for path, part in model.named_modules():
        scaling = getattr(part, "scaling", None)
        if isinstance(scaling, dict) and adapter in scaling:
            found["adapter"].update(f"{without_wrappers(path)}|{float(scaling[adapter])!r}".encode())
    return {what: digest.hexdigest() for what, digest in found.items()}
