"""A door to Lightning: a callback that gives a network its posterior at the end of training."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lapwing.curvature import resolve_structure
from lapwing.errors import BadData, UnsupportedOperation
from lapwing.fitting import fit, load_bytes
from lapwing.laplace import Laplace
from lapwing.likelihoods import Likelihood, resolve_likelihood
from lapwing.model.calls import outside_inference
from lapwing.saving import bytes_of
from lapwing.storage import is_registered, under

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its import is not silent
        try:
            from lightning.pytorch import Callback
        except ImportError:
            from pytorch_lightning import Callback  # type: ignore[assignment]
except ImportError as error:
    raise ImportError("lapwing.lightning needs Lightning: pip install 'lapwing-torch[lightning]'") from error

__all__ = ["LaplaceCallback", "load_posterior"]

SEED = 2021  # of augmentations, which are the same in every pass over the data


class LaplaceCallback(Callback):
    """Fit a posterior when training ends, store it in the checkpoint, and predict with it in `trainer.predict`.

    The fit is at the weights of the best checkpoint, if a `ModelCheckpoint` has one, and else at the final weights. The
    module keeps its final weights in any case: where these differ, the posterior has a copy of the network at the best
    ones. `callback.la` is the posterior. It is written into the best checkpoint, and into every one that is saved
    later, as tensors and plain values; `trainer.predict(..., ckpt_path=...)` and `trainer.fit(..., ckpt_path=...)`
    restore it, and so does `lapwing.lightning.load_posterior`.

    - `tune`: whether the posterior is tuned on the validation loader, if there is one (the first, if there are
      several), or options of `la.tune` for that.
    - `predict`: options of `la.predict` for `trainer.predict`, which then returns one `Prediction` per batch whatever
      `predict_step` says. None leaves `predict_step` as it is.
    - `network`: the name of the submodule that is the network, if the module's own `forward` is not.
    - `data`: batches to fit, in place of the training loader.
    - Anything else goes to `lapwing.fit`.

    The fit reads every item of the training loader once, in order, without the duplicates by which a distributed
    sampler fills up its last batches, through the batch hooks of the module or data module (`on_after_batch_transfer`)
    as in training: augmentations there take part, with the same random numbers in every pass. `limit_train_batches` and
    `fast_dev_run` limit the fit too.

    Examples:
        >>> callback = LaplaceCallback("classification", structure="kron")  # doctest: +SKIP
        >>> trainer = Trainer(callbacks=[callback, ModelCheckpoint(monitor="val_loss")])  # doctest: +SKIP
        >>> trainer.fit(module, datamodule=data)  # doctest: +SKIP
        >>> trainer.predict(module, loader)[0].probs  # doctest: +SKIP
    """

    def __init__(
        self,
        likelihood: str | Likelihood,
        *,
        tune: bool | Mapping[str, Any] = True,
        predict: Mapping[str, Any] | None = {},
        network: str | None = None,
        data: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.likelihood = resolve_likelihood(likelihood)  # wrong options are refused before the training
        resolve_structure(options.get("structure", "auto"))
        _require_known(options, fit, "fit")
        _require_known(tune if isinstance(tune, Mapping) else {}, Laplace.tune, "la.tune")
        _require_known(predict or {}, Laplace.predict, "la.predict")
        self.tune, self.predict, self.network, self.data, self.options = tune, predict, network, data, options
        self._la: Laplace | None = None
        self._stored: Mapping[str, Any] | None = None  # what a checkpoint held, until the module is known
        self._module: nn.Module | None = None

    @property
    def la(self) -> Laplace | None:
        """The posterior; None before the end of training."""
        if self._la is None and self._stored is not None and self._module is not None:
            network = _network(self._module, self.network)
            self._la, self._stored = _restored(self._stored, network, self.likelihood), None
        return self._la

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        _network(pl_module, self.network)
        self._module = pl_module

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._la = self._stored = None  # they belong to other weights

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        best = _best_path(trainer)
        checkpoint = None if best is None else _read(trainer, best)
        network = _network(pl_module, self.network)
        if checkpoint is not None:
            prefix = "" if self.network is None else f"{self.network}."
            network = _at(network, under(prefix, checkpoint["state_dict"]))
        if self.data is None:
            loader = _only(trainer.train_dataloader, "training")
            data = Hooked(once_each(loader), trainer, pl_module, "training", _limit(trainer, loader))
        else:
            given = [self.data] if isinstance(self.data, tuple) else self.data  # one batch (X, y), or batches
            data = Hooked(once_each(given), trainer, pl_module, "training")
        la = fit(network, data, self.likelihood, **self.options)
        self._la = self._tuned(la, trainer, pl_module)
        if checkpoint is not None:
            checkpoint.setdefault("callbacks", {})[self.state_key] = {"posterior": _bytes(self._la)}
            trainer.strategy.save_checkpoint(checkpoint, best)
            trainer.strategy.barrier("lapwing")

    def _tuned(self, la: Laplace, trainer: Any, pl_module: Any) -> Laplace:
        """Return the posterior, tuned on the validation data if that is wanted and possible."""
        limits = trainer.num_val_batches
        limit = (limits[0] if limits else 0) if isinstance(limits, list) else limits
        if self.tune is False or not limit:
            return la
        if trainer.world_size > 1:
            warnings.warn(
                "the posterior is not tuned: several processes cannot tune on held-out data. Load the checkpoint in "
                "one process (lapwing.lightning.load_posterior) and call la.tune(data), or pass tune=False",
                stacklevel=2,
            )
            return la
        loader = _first(trainer.val_dataloaders)
        data = Hooked(once_each(loader), trainer, pl_module, "validating", None if limit == float("inf") else limit)
        return la.tune(data, **(self.tune if isinstance(self.tune, Mapping) else {}))

    def state_dict(self) -> dict[str, Any]:
        """Return the file of the posterior as bytes, with its weights if the module has others."""
        la = self._la
        if la is None:
            return dict(self._stored or {})
        own = self._module is not None and la.module is _network(self._module, self.network)
        state: dict[str, Any] = {"posterior": _bytes(la)}
        if not own:
            state["weights"] = {name: value.detach().cpu() for name, value in la.module.state_dict().items()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self._la, self._stored = None, state_dict

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        if self.predict is None:
            return
        self._module = pl_module
        if self.la is None and trainer.ckpt_path:  # versions that restore callbacks for training only
            self._stored = _read(trainer, trainer.ckpt_path).get("callbacks", {}).get(self.state_key)
        la = self.la
        if la is None:
            raise UnsupportedOperation(
                "there is no posterior to predict with: train first, or pass the ckpt_path of a checkpoint that has "
                "one. LaplaceCallback(..., predict=None) leaves predictions to the module."
            )
        if la.params.device != pl_module.device:
            la.module.to(pl_module.device)  # it is the module itself, which is there already, or a copy of our own
            la = self._la = la.to(pl_module.device)
        options = dict(self.predict)

        def predict_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            (inputs,) = la.batches([batch]).unlabeled()
            return la.predict(inputs, **options)

        pl_module.predict_step = predict_step  # until the end of trainer.predict

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        vars(pl_module).pop("predict_step", None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        vars(pl_module).pop("predict_step", None)


def load_posterior(
    path: str | Path, module: nn.Module, *, network: str | None = None, likelihood: Likelihood | None = None
) -> Laplace:
    """Read the posterior from a checkpoint file, for the module with the weights of that checkpoint.

    `network` is the name that the callback had, `likelihood` is needed for one of your own that is not registered.

    Examples:
        >>> module = Classifier.load_from_checkpoint("best.ckpt")  # doctest: +SKIP
        >>> la = lapwing.lightning.load_posterior("best.ckpt", module)  # doctest: +SKIP
    """
    states = torch.load(path, map_location="cpu", weights_only=True).get("callbacks", {})
    found = [state for state in states.values() if isinstance(state, dict) and "posterior" in state]
    if not found:
        raise BadData(
            f"{Path(path).name!r} holds no posterior: it was saved before the end of a training with LaplaceCallback"
        )
    return _restored(found[0], _network(module, network), likelihood)


@dataclass(frozen=True, eq=False)
class Hooked:
    """The batches of a loader after the batch hooks of a module, the same in every pass.

    `stage` is "training" or "validating": what the trainer says that it is doing, since augmentations may ask.
    """

    loader: Any
    trainer: Any
    module: Any
    stage: str
    limit: int | None = None

    def __len__(self) -> int:
        return len(self.loader) if self.limit is None else min(self.limit, len(self.loader))

    def __iter__(self) -> Iterator[Any]:
        state = torch.Generator().manual_seed(SEED).get_state()
        batches: Iterator[Any] | None = None
        while True:
            with torch.random.fork_rng(devices=[d for d in [self.module.device] if d.type == "cuda"]):
                torch.set_rng_state(state)
                batches = islice(iter(self.loader), self.limit) if batches is None else batches
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                batch = self._after_hooks(batch)
                state = torch.get_rng_state()
            yield batch

    def _after_hooks(self, batch: Any) -> Any:
        trainer = self.trainer
        with _stage(trainer, self.stage), torch.no_grad():
            batch = trainer.precision_plugin.convert_input(batch)
            batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
            return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


@contextmanager
def _stage(trainer: Any, stage: str) -> Iterator[None]:
    before = trainer.state.stage
    setattr(trainer, stage, True)
    try:
        yield
    finally:
        trainer.state.stage = before


def once_each(loader: Any) -> Any:
    """Return a loader that reads every item of this process once: in order, nothing dropped, no duplicates.

    A distributed sampler fills up the last batches with items that other processes have. Loaders with a sampler of the
    user's own are read as they are.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return loader
    sampler: Any = loader.sampler
    size = len(loader.dataset)  # type: ignore[arg-type]
    plain = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == size
    if isinstance(sampler, DistributedSampler):
        places = range(sampler.rank, len(sampler.dataset), sampler.num_replicas)  # type: ignore[arg-type]
        own = list(sampler)[: len(places)]  # what comes after these fills up the last round
    elif plain or isinstance(sampler, SequentialSampler):
        own = list(range(size))
    else:
        return loader
    if type(loader) is not DataLoader:
        if not isinstance(sampler, DistributedSampler):
            return loader
        raise UnsupportedOperation(
            f"the training loader is a {type(loader).__name__} with a distributed sampler, which repeats items. Pass "
            "LaplaceCallback(..., data=loader) with this process's share of the data."
        )
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=own,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
    )


def _limit(trainer: Any, loader: Any) -> int | None:
    """Return how many batches the trainer reads at most; None if there is no limit."""
    try:
        whole: float = len(loader)
    except TypeError:
        whole = float("inf")
    return trainer.num_training_batches if trainer.num_training_batches < whole else None


def _only(loaders: Any, kind: str) -> Any:
    """Return the only loader; refuse none or several."""
    if isinstance(loaders, list | tuple) and len(loaders) == 1:
        return loaders[0]
    if loaders is None or isinstance(loaders, list | tuple | dict):
        count = "no" if not loaders else f"{len(loaders)}"
        raise BadData(f"there are {count} {kind} loaders; LaplaceCallback(..., data=loader) says what to fit")
    return loaders


def _first(loaders: Any) -> Any:
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    if isinstance(loaders, list | tuple):
        return loaders[0] if loaders else None
    return loaders


def _network(module: nn.Module, name: str | None) -> nn.Module:
    """Return the network inside a Lightning module."""
    if name is not None:
        return module.get_submodule(name)
    forward: Any = type(module).forward
    inherited = forward.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
    if forward is nn.Module.forward or inherited:
        raise BadData(
            f"{type(module).__name__} has no forward method of its own: define one that returns the outputs, or name "
            "the submodule that is the network: LaplaceCallback(..., network='model')"
        )
    return module


def _at(network: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Return the network itself if it has this state, else a copy with it."""
    now = network.state_dict()
    if now.keys() == state.keys() and all(torch.equal(now[name].cpu(), state[name].cpu()) for name in now):
        return network
    made = copy.deepcopy(network)
    made.load_state_dict(state)
    return made


def _best_path(trainer: Any) -> str | None:
    """Return the file of the best checkpoint of the first callback that has one."""
    paths = (getattr(each, "best_model_path", "") for each in trainer.checkpoint_callbacks)
    return next((path for path in paths if path), None)


def _read(trainer: Any, path: str) -> dict[str, Any]:
    """Read a checkpoint of this training."""
    reader = trainer.strategy.load_checkpoint
    trusted = {"weights_only": False} if "weights_only" in inspect.signature(reader).parameters else {}
    found: dict[str, Any] = reader(path, **trusted)
    return found


def _bytes(la: Laplace) -> Tensor:
    """Return the file of a posterior as a tensor of bytes."""
    return torch.frombuffer(bytearray(bytes_of(la)), dtype=torch.uint8)


@outside_inference
def _restored(state: Mapping[str, Any], network: nn.Module, likelihood: Likelihood | None) -> Laplace:
    """Return the posterior of a checkpoint for a network; a likelihood is used only if files cannot hold it."""
    if "weights" in state:
        network = _at(network, state["weights"])
    own = likelihood is not None and not is_registered(type(likelihood))
    return load_bytes(state["posterior"].cpu().numpy().tobytes(), network, likelihood if own else None)


def _require_known(options: Mapping[str, Any], function: Any, name: str) -> None:
    """Refuse options that a function does not have, before the training."""
    allowed = [
        key for key in inspect.signature(function).parameters if key not in ("self", "model", "data", "x", "likelihood")
    ]
    if unknown := [key for key in options if key not in allowed]:
        raise TypeError(f"{name} has no option {unknown[0]!r}; it has {', '.join(allowed)}")
