"""`lapwing.lightning.LaplaceCallback` inside Lightning's trainers, against a fit by hand."""

import abc
import copy
import importlib
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

import lapwing
from lapwing.lightning import LaplaceCallback, load_posterior, once_each

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:You have overridden .* in `LightningModule` but have passed"),
    pytest.mark.filterwarnings("ignore:.*isinstance\\(treespec, LeafSpec\\):"),
]

X = torch.randn(37, 2, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
HELD_OUT = torch.randn(24, 2, generator=torch.Generator().manual_seed(1))
LABELS = (HELD_OUT[:, 0] > 0).long() + (HELD_OUT[:, 1] > 0).long()
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def loader(x: Tensor = X, y: Tensor = Y, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(x, y), **{"batch_size": 8} | options)


def classifier(package: Any = None) -> Any:
    """A Lightning module whose validation loss is lowest after the first epoch."""
    base = (package or importlib.import_module("lightning.pytorch")).LightningModule

    class Classifier(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("loss", float(self.current_epoch))

        def predict_step(self, batch: Any, index: int) -> str:
            return "the module's own"

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.02)

    torch.manual_seed(0)
    return Classifier()


def trained(
    folder: Path, callback: Any, module: Any = None, package: Any = None, data: Any = None, **options: Any
) -> tuple[Any, Any]:
    package = package or importlib.import_module("lightning.pytorch")
    module = module or classifier(package)
    keeper = package.callbacks.ModelCheckpoint(dirpath=folder, monitor="loss")
    callbacks = [callback, *([] if options.get("enable_checkpointing") is False else [keeper])]
    trainer = package.Trainer(max_epochs=3, callbacks=callbacks, **QUIET, **options)
    torch.manual_seed(1)
    trainer.fit(module, *(data or (loader(shuffle=True, drop_last=True), loader(HELD_OUT, LABELS))))
    return trainer, module


def by_hand(
    module: nn.Module, state: dict[str, Tensor], x: Tensor = X, y: Tensor = Y, **options: Any
) -> lapwing.Laplace:
    own = copy.deepcopy(module)
    own.load_state_dict(state)
    return lapwing.fit(own, (x, y), "classification", structure="kron", progress=False, **options)


def same(la: lapwing.Laplace, other: lapwing.Laplace, tolerance: float = 1e-5) -> None:
    assert la.n_data == other.n_data
    torch.testing.assert_close(la.posterior.variance, other.posterior.variance, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        la.predict(HELD_OUT).probs, other.predict(HELD_OUT).probs, rtol=tolerance, atol=tolerance
    )


# --- the fit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_the_fit_is_at_the_best_weights_and_travels_in_the_checkpoint(name: str, tmp_path: Path) -> None:
    package = importlib.import_module(name)
    callback = LaplaceCallback("classification", structure="kron", tune=False, progress=False)
    trainer, module = trained(tmp_path, callback, package=package)
    best = trainer.checkpoint_callback.best_model_path
    checkpoint = torch.load(best, weights_only=True)  # tensors and plain values only
    assert checkpoint["epoch"] == 0
    assert not torch.equal(checkpoint["state_dict"]["net.0.weight"], module.net[0].weight)  # which is the final one
    wanted = by_hand(module, checkpoint["state_dict"])
    assert callback.la is not None
    assert callback.la.n_data == 37  # although the loader drops the last five
    same(callback.la, wanted)

    fresh = LaplaceCallback("classification")
    again = package.Trainer(callbacks=[fresh], **QUIET)
    found = again.predict(classifier(package), loader(HELD_OUT, LABELS), ckpt_path=best)
    probs = torch.cat([each.probs for each in found])
    torch.testing.assert_close(probs, wanted.predict(HELD_OUT).probs, rtol=1e-5, atol=1e-5)
    assert fresh.la is not None
    same(fresh.la, wanted)
    loaded = classifier(package)
    loaded.load_state_dict(checkpoint["state_dict"])
    same(load_posterior(best, loaded), wanted)


def test_the_module_keeps_its_final_weights(tmp_path: Path) -> None:
    callback = LaplaceCallback("classification", structure="kron", progress=False)
    _, module = trained(tmp_path / "with", callback)
    _, plain = trained(tmp_path / "without", importlib.import_module("lightning.pytorch").Callback())
    for name, value in plain.state_dict().items():
        assert torch.equal(value, module.state_dict()[name])
    assert module.training == plain.training
    assert all(p.requires_grad for p in module.parameters())


def test_it_is_tuned_on_the_validation_data(tmp_path: Path) -> None:
    callback = LaplaceCallback("classification", structure="kron", progress=False)
    trainer, module = trained(tmp_path, callback)
    state = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)["state_dict"]
    wanted = by_hand(module, state).tune((HELD_OUT, LABELS))
    assert callback.la is not None
    assert callback.la.tuning is not None
    same(callback.la, wanted, 1e-4)
    options = {"grid": {"prior": [3.0]}, "learn": "prior"}
    fixed = LaplaceCallback("classification", structure="kron", progress=False, tune=options)
    trained(tmp_path / "fixed", fixed)
    assert fixed.la is not None
    assert float(fixed.la.posterior.precision.smallest_eigenvalue()) >= 3.0 * (1 - 1e-5)


def test_a_later_checkpoint_keeps_the_best_weights_beside_the_final_ones(tmp_path: Path) -> None:
    callback = LaplaceCallback("classification", structure="kron", progress=False)
    trainer, module = trained(tmp_path, callback)
    path = tmp_path / "later.ckpt"
    trainer.save_checkpoint(path)
    stored = torch.load(path, weights_only=True)
    assert torch.equal(stored["state_dict"]["net.0.weight"], module.net[0].weight)
    assert callback.la is not None
    wanted = callback.la.predict(HELD_OUT).probs
    other = classifier()
    other.load_state_dict(stored["state_dict"])
    assert torch.equal(load_posterior(path, other).predict(HELD_OUT).probs, wanted)
    fresh = LaplaceCallback("classification")
    package = importlib.import_module("lightning.pytorch")
    found = package.Trainer(callbacks=[fresh], **QUIET).predict(other, loader(HELD_OUT, LABELS), ckpt_path=path)
    torch.testing.assert_close(torch.cat([each.probs for each in found]), wanted)
    assert torch.equal(other.net[0].weight, module.net[0].weight)


def test_without_checkpoints_the_fit_is_at_the_final_weights(tmp_path: Path) -> None:
    callback = LaplaceCallback("classification", structure="kron", tune=False, progress=False)
    trainer, module = trained(tmp_path, callback, enable_checkpointing=False)
    assert callback.la is not None
    assert callback.la.module is module
    same(callback.la, by_hand(module, module.state_dict()))
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    assert [*torch.load(tmp_path / "own.ckpt", weights_only=True)["callbacks"]["LaplaceCallback"]] == ["posterior"]


def test_a_submodule_may_be_the_network(tmp_path: Path) -> None:
    package = importlib.import_module("lightning.pytorch")

    class Wrapper(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = classifier().net

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("loss", float(self.current_epoch))

        predict_step = type(classifier()).predict_step  # Lightning wants this or forward
        configure_optimizers = type(classifier()).configure_optimizers

    callback = LaplaceCallback("classification", structure="kron", tune=False, progress=False, network="model")
    trainer, module = trained(tmp_path, callback, Wrapper())
    checkpoint = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    state = {name.removeprefix("model."): value for name, value in checkpoint["state_dict"].items()}
    assert callback.la is not None
    assert callback.la.params.names[0] == "0.weight"
    same(callback.la, by_hand(module.model, state))
    assert trainer.predict(module, loader(HELD_OUT, LABELS))[0].probs.shape == (8, 3)
    with pytest.raises(lapwing.BadData, match="Wrapper has no forward method of its own"):
        trained(tmp_path / "again", LaplaceCallback("classification"), Wrapper())


# --- data ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3, 10, 37])
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"drop_last": True}])
def test_a_padding_sampler_counts_nothing_twice(n: int, options: dict[str, bool]) -> None:
    data = TensorDataset(torch.arange(n))
    seen, read = [], 0
    for rank in range(4):
        sampler: DistributedSampler = DistributedSampler(data, 4, rank, **options)
        found = [batch[0] for batch in once_each(DataLoader(data, batch_size=2, sampler=sampler, drop_last=True))]
        seen += torch.cat(found).tolist() if found else []
        read += len(sampler)
    assert len(seen) == len(set(seen))
    assert len(seen) == (n if not options.get("drop_last") else read)


def test_loaders_are_read_whole_and_in_order() -> None:
    data = TensorDataset(torch.arange(10))
    for sampler in (None, RandomSampler(data)):
        order = {"shuffle": True} if sampler is None else {"sampler": sampler}
        read = once_each(DataLoader(data, batch_size=4, drop_last=True, **order))
        assert torch.cat([batch[0] for batch in read]).tolist() == list(range(10))
    own = DataLoader(data, batch_size=4, sampler=WeightedRandomSampler([1.0] * 10, 20))
    assert once_each(own) is own


def hooked(stage: str, own: bool) -> tuple[Any, Any]:
    """A module and a data module, one of which doubles and shifts batches of a stage after their transfer."""
    package = importlib.import_module("lightning.pytorch")

    def change(self: Any, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        noise = 0.1 * torch.randn(x.shape) if stage == "training" else torch.zeros_like(x)
        return (2 * x + 1 + noise, y) if stage == "always" or getattr(self.trainer, stage) else batch

    kinds = {"on_after_batch_transfer": change}

    class Data(package.LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return loader(shuffle=True)

        def val_dataloader(self) -> DataLoader:
            return loader(HELD_OUT, LABELS)

        def predict_dataloader(self) -> list[DataLoader]:
            return [loader(HELD_OUT, LABELS), loader(X, Y)]

    module, data = classifier(), Data()
    changed = module if own else data
    changed.__class__ = type("Hooked", (type(changed),), kinds)
    return module, data


@pytest.mark.parametrize("own", [True, False])
def test_batches_pass_through_the_hooks(own: bool, tmp_path: Path) -> None:
    module, data = hooked("always", own)
    callback = LaplaceCallback("classification", structure="kron", progress=False)
    package = importlib.import_module("lightning.pytorch")
    trainer = package.Trainer(max_epochs=1, callbacks=[callback], enable_checkpointing=False, **QUIET)
    trainer.fit(module, datamodule=data)
    plain = classifier()
    wanted = by_hand(plain, module.state_dict(), 2 * X + 1).tune((2 * HELD_OUT + 1, LABELS))
    assert callback.la is not None
    same(callback.la, wanted, 1e-4)


def test_augmentations_are_the_same_in_every_pass(tmp_path: Path) -> None:
    module, data = hooked("training", True)
    callback = LaplaceCallback("classification", structure="ekfac", progress=False)
    package = importlib.import_module("lightning.pytorch")
    trainer = package.Trainer(max_epochs=1, callbacks=[callback], enable_checkpointing=False, **QUIET)
    trainer.fit(module, datamodule=data)
    assert callback.la is not None
    before = torch.get_rng_state()
    first, second = (torch.cat([x for x, _ in callback.la.options.data]) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, second)
    assert 0.05 < float((first - 2 * X - 1).std()) < 0.2  # augmented
    plain = classifier()
    plain.load_state_dict(module.state_dict())
    by_pass = lapwing.fit(plain, (first, Y), "classification", structure="ekfac", progress=False)
    same(callback.la, by_pass.tune((HELD_OUT, LABELS)), 1e-4)  # validation data are not augmented


def test_limits_of_the_trainer_limit_the_fit(tmp_path: Path) -> None:
    callback = LaplaceCallback("classification", structure="diag", tune=False, progress=False)
    trained(tmp_path, callback, limit_train_batches=2)
    assert callback.la is not None
    assert callback.la.n_data == 16
    quick = LaplaceCallback("classification", structure="diag", progress=False)
    package = importlib.import_module("lightning.pytorch")
    trainer = package.Trainer(fast_dev_run=True, callbacks=[quick], **QUIET)
    trainer.fit(classifier(), loader(), loader(HELD_OUT, LABELS))
    assert quick.la is not None
    assert quick.la.n_data == 8


@pytest.mark.parametrize("few", [loader(X[:5], Y[:5]), (X[:5], Y[:5]), [(X[:3], Y[:3]), (X[3:5], Y[3:5])]])
def test_other_data_may_be_fitted(few: Any, tmp_path: Path) -> None:
    callback = LaplaceCallback("classification", structure="diag", tune=False, progress=False, data=few)
    trained(tmp_path, callback)
    assert callback.la is not None
    assert callback.la.n_data == 5


# --- prediction ---------------------------------------------------------------------------------------------------


def test_predictions_come_from_the_posterior_batch_by_batch(tmp_path: Path) -> None:
    callback = LaplaceCallback("classification", structure="kron", progress=False, predict={"link": "probit"})
    trainer, module = trained(tmp_path, callback)
    found = trainer.predict(module, loader(HELD_OUT, LABELS, batch_size=10))
    assert [len(each) for each in found] == [10, 10, 4]
    assert callback.la is not None
    wanted = callback.la.predict(HELD_OUT, link="probit").probs
    torch.testing.assert_close(torch.cat([each.probs for each in found]), wanted)
    assert "predict_step" not in vars(module)
    assert module.predict_step(None, 0) == "the module's own"
    unlabeled = trainer.predict(module, DataLoader(HELD_OUT, batch_size=24))
    torch.testing.assert_close(unlabeled[0].probs, wanted)
    with pytest.raises(lapwing.LapwingError):
        trainer.predict(module, DataLoader(torch.full((2, 2), torch.nan), batch_size=2))
    assert module.predict_step(None, 0) == "the module's own"
    callback.predict = None
    assert trainer.predict(module, loader(HELD_OUT, LABELS, batch_size=24)) == ["the module's own"]


def test_without_a_posterior_there_are_no_predictions(tmp_path: Path) -> None:
    package = importlib.import_module("lightning.pytorch")
    trainer = package.Trainer(callbacks=[LaplaceCallback("classification")], **QUIET)
    with pytest.raises(lapwing.UnsupportedOperation, match="train first, or pass the ckpt_path"):
        trainer.predict(classifier(), loader(HELD_OUT, LABELS))
    package.Trainer(max_epochs=1, **QUIET, enable_checkpointing=False)
    trainer, _ = trained(tmp_path, importlib.import_module("lightning.pytorch").Callback())
    with pytest.raises(lapwing.BadData, match="holds no posterior"):
        load_posterior(trainer.checkpoint_callback.best_model_path, classifier())


def test_training_again_drops_the_posterior_of_the_old_weights(tmp_path: Path) -> None:
    callback = LaplaceCallback("classification", structure="diag", progress=False)
    trainer, module = trained(tmp_path, callback)
    first = callback.la
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, loader(), loader(HELD_OUT, LABELS), ckpt_path=trainer.checkpoint_callback.best_model_path)
    assert callback.la is not first
    assert callback.la is not None


def test_regression_of_float64(tmp_path: Path) -> None:
    package = importlib.import_module("lightning.pytorch")

    class Regression(type(classifier())):  # type: ignore[misc]
        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.mse_loss(self(batch[0]), batch[1])

    data = (loader(X, X @ torch.ones(2, 3)), loader(HELD_OUT, HELD_OUT @ torch.ones(2, 3)))
    callback = LaplaceCallback("regression", structure="full", progress=False)
    trainer = package.Trainer(
        max_epochs=1, callbacks=[callback], enable_checkpointing=False, precision="64-true", **QUIET
    )
    module = Regression()
    trainer.fit(module, *data)
    found = trainer.predict(module, data[1])
    assert found[0].variance.shape == (8, 3)
    assert found[0].variance.dtype == torch.float64


class Coin(lapwing.Likelihood):
    """A likelihood of the user's own, which files do not hold."""

    def conditional(self, f: Tensor) -> torch.distributions.Distribution:
        return torch.distributions.Independent(torch.distributions.Bernoulli(logits=f), 1)


def test_a_likelihood_of_ones_own_is_restored(tmp_path: Path) -> None:
    package = importlib.import_module("lightning.pytorch")
    data = (loader(X, torch.stack([Y == k for k in range(3)], 1).float()), loader(HELD_OUT, LABELS))
    callback = LaplaceCallback(Coin(), structure="diag", tune=False, progress=False)
    trainer = package.Trainer(max_epochs=1, callbacks=[callback], enable_checkpointing=False, **QUIET)
    module = type("Coins", (type(classifier()),), {"training_step": lambda self, batch, index: self(batch[0]).sum()})()
    trainer.fit(module, *data)
    trainer.save_checkpoint(tmp_path / "coin.ckpt")
    fresh = package.Trainer(callbacks=[LaplaceCallback(Coin())], **QUIET)
    found = fresh.predict(module, loader(HELD_OUT, LABELS, batch_size=24), ckpt_path=tmp_path / "coin.ckpt")
    assert callback.la is not None
    torch.testing.assert_close(found[0].mean, callback.la.predict(HELD_OUT).mean)
    again = load_posterior(tmp_path / "coin.ckpt", module, likelihood=Coin())
    torch.testing.assert_close(again.predict(HELD_OUT).mean, found[0].mean)


# --- what is refused, and the rest ----------------------------------------------------------------------------------


def test_what_is_wrong_is_said_before_the_training() -> None:
    with pytest.raises(TypeError, match="fit has no option 'strukture'"):
        LaplaceCallback("classification", strukture="kron")
    with pytest.raises(lapwing.LapwingError, match="structure"):
        LaplaceCallback("classification", structure="krn")
    with pytest.raises(lapwing.LapwingError, match="likelihood"):
        LaplaceCallback("classify")
    with pytest.raises(TypeError, match=r"la\.predict has no option 'lnk'"):
        LaplaceCallback("classification", predict={"lnk": "mc"})


def test_several_training_loaders_are_refused(tmp_path: Path) -> None:
    package = importlib.import_module("lightning.pytorch")

    class Several(type(classifier())):  # type: ignore[misc]
        def training_step(self, batch: Any, index: int) -> Tensor:
            return super().training_step(batch["a"], index)

    callback = LaplaceCallback("classification", tune=False, progress=False)
    trainer = package.Trainer(max_epochs=1, callbacks=[callback], enable_checkpointing=False, **QUIET)
    with pytest.raises(lapwing.BadData, match="there are 2 training loaders"):
        trainer.fit(Several(), {"a": loader(), "b": loader()})


def test_a_trained_module_can_be_fitted_by_hand(tmp_path: Path) -> None:
    """The trainer that a module knows leads to loaders, loops and profilers; none of that is copied."""
    _, module = trained(tmp_path, importlib.import_module("lightning.pytorch").Callback())
    assert module.trainer is not None
    la = lapwing.fit(module, loader(), "classification", structure="kron", progress=False)
    same(la, by_hand(classifier(), module.state_dict()))


def test_a_copy_of_an_abstract_class_with_a_finalizer_is_released() -> None:
    dropped = []

    class Holder(abc.ABC):  # noqa: B024
        def __init__(self, module: nn.Module) -> None:
            self.module = module

        def __del__(self) -> None:
            dropped.append(self)

    net = nn.Linear(2, 3)
    net.holder = Holder(net)  # type: ignore[assignment]
    lapwing.fit(net, (X, Y), "classification", progress=False)
    assert not dropped


def test_without_lightning_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "lapwing.lightning")
    with pytest.raises(ImportError, match=r"lapwing-torch\[lightning\]"):
        importlib.import_module("lapwing.lightning")


@pytest.mark.slow
def test_two_processes_fit_what_one_does(tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import torch, warnings
        warnings.simplefilter("ignore")
        from tests.lightning.test_lightning_callback import *
        import lightning.pytorch as package
        if __name__ == "__main__":
            callback = LaplaceCallback("classification", structure="kron", tune=False, progress=False)
            keeper = package.callbacks.ModelCheckpoint(dirpath={str(tmp_path)!r}, filename="best", monitor="loss")
            options = {{**QUIET, "devices": 2, "strategy": "ddp"}}
            trainer = package.Trainer(max_epochs=2, callbacks=[callback, keeper], **options)
            trainer.fit(classifier(), loader(shuffle=True), loader(HELD_OUT, LABELS))
            assert callback.la.n_data == 37, callback.la.n_data
        """
    )
    script = tmp_path / "train.py"
    script.write_text(program, encoding="utf-8")
    root = Path(__file__).parent.parent.parent
    environment = {**__import__("os").environ, "PYTHONPATH": f"{Path(lapwing.__file__).parent.parent}:{root}"}
    subprocess.run([sys.executable, str(script)], check=True, env=environment, timeout=300)
    state = torch.load(tmp_path / "best.ckpt", weights_only=True)["state_dict"]
    module = classifier()
    module.load_state_dict(state)
    same(load_posterior(tmp_path / "best.ckpt", module), by_hand(classifier(), state))
