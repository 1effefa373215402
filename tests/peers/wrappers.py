"""torch-uncertainty's LaplaceApprox and lightning-uq-box's Laplace models on Lapwing in the place of laplace-torch.

Run it by hand, in an environment of its own, as neither package can be installed next to a current torch:

    python3.11 -m venv .venv-wrappers
    .venv-wrappers/bin/python -m pip install -c constraints.txt -e '.[lightning]'
    .venv-wrappers/bin/python -m pip install --no-deps torch-uncertainty==0.13.0 lightning-uq-box==0.2.0
    .venv-wrappers/bin/python tests/peers/wrappers.py

What is missing besides `laplace` (torchvision has no build for this torch) is replaced by empty stand-ins, which are
listed; an import for which that does not suffice is reported.
"""

import importlib
import importlib.util
import sys
import tempfile
import traceback
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lapwing.compat import laplace_torch

STOOD_IN: set[str] = set()


class Nothing(ModuleType):
    """A module in which every name is a class that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(self, name, made)
        return made


class StandIns:
    """Finds a stand-in for modules of packages that are not installed."""

    def __init__(self, packages: set[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] not in self.packages:
            return None
        STOOD_IN.add(name)
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = Nothing(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def imported(name: str) -> Any:
    """Import a module; packages that it misses get stand-ins, one after the other."""
    finder = next(f for f in sys.meta_path if isinstance(f, StandIns))
    for _ in range(40):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as missing:
            package = str(missing.name).split(".")[0]
            if package in finder.packages or importlib.util.find_spec(package) is not None:
                raise
            finder.packages.add(package)
            for known in [k for k in sys.modules if k.split(".")[0] == name.split(".")[0]]:
                del sys.modules[known]
    raise ImportError(f"{name} misses too many packages")


def problem(likelihood: str) -> tuple[nn.Module, DataLoader, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(120, 4)
    y = x[:, :1].sin() + 0.1 * torch.randn(120, 1) if likelihood == "regression" else (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1 if likelihood == "regression" else 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss = nn.functional.mse_loss if likelihood == "regression" else nn.functional.cross_entropy
    for _ in range(100):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model, DataLoader(TensorDataset(x, y), batch_size=40), torch.randn(7, 4)


def torch_uncertainty() -> None:
    module = imported("torch_uncertainty.post_processing.laplace")
    model, loader, new = problem("classification")
    for subset in ("last_layer", "all"):
        for structure in ("kron", "diag", "full"):
            wrapped = module.LaplaceApprox("classification", model, weight_subset=subset, hessian_struct=structure)
            wrapped.fit(loader)
            probs = wrapped(new)
            direct = laplace_torch.Laplace(model, "classification", subset, structure)
            direct.fit(loader)
            direct.optimize_prior_precision(method="marglik")
            assert torch.allclose(probs, direct(new))
            assert torch.allclose(probs.sum(-1), torch.ones(7))
            print(f"torch-uncertainty LaplaceApprox {subset} {structure}: probabilities {tuple(probs.shape)}")


def lightning_uq_box() -> None:
    module = imported("lightning_uq_box.uq_methods.laplace_model")
    lightning = importlib.import_module("lightning")
    for likelihood, kind in (("regression", "LaplaceRegression"), ("classification", "LaplaceClassification")):
        for subset in ("last_layer", "all"):
            model, loader, new = problem(likelihood)

            class Data(lightning.LightningDataModule):
                def __init__(self, loader: DataLoader) -> None:
                    super().__init__()
                    self.loader = loader

                def train_dataloader(self) -> DataLoader:
                    return self.loader

                def test_dataloader(self) -> DataLoader:
                    x, y = self.loader.dataset.tensors
                    pairs = [{"input": a, "target": b} for a, b in zip(x, y, strict=True)]
                    return DataLoader(pairs, batch_size=40)

                def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
                    return batch

            la = laplace_torch.Laplace(model, likelihood, subset, "kron")
            wrapped = getattr(module, kind)(la)
            with tempfile.TemporaryDirectory() as folder:
                trainer = lightning.Trainer(
                    accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                    enable_model_summary=False, default_root_dir=folder,
                )  # fmt: skip
                metrics = trainer.test(wrapped, datamodule=Data(loader), verbose=False)
            found = wrapped.predict_step(new)
            expected = wrapped.laplace_model(new)
            expected = expected[0].squeeze() if isinstance(expected, tuple) else expected
            assert torch.allclose(found["pred"], expected)
            shown = {name: round(value, 4) for name, value in metrics[0].items()}
            print(f"lightning-uq-box {kind} {subset}: {shown}")


def main() -> int:
    sys.meta_path.append(StandIns(set()))  # type: ignore[arg-type]
    laplace_torch.install()
    failed = 0
    for exercise in (torch_uncertainty, lightning_uq_box):
        try:
            exercise()
        except Exception:
            failed += 1
            print(f"{exercise.__name__} failed:")
            traceback.print_exc()
    print("stand-ins:", ", ".join(sorted({name.split(".")[0] for name in STOOD_IN})) or "none")
    return failed


if __name__ == "__main__":
    sys.exit(main())
