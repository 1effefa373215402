"""doctor → fit → tune → predict → report, as a user runs them: numbers, files, exit codes."""

import csv
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lapwing
from lapwing.cli import main as cli
from lapwing.cli.data import require_order

NET = """
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset, WeightedRandomSampler
)

model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 3))
tokens = nn.Sequential(nn.Linear(4, 3))
generator = torch.Generator().manual_seed(5)
X, Y = torch.randn(30, 4, generator=generator), torch.randint(3, (30,), generator=generator)
pair = (X, Y)
inputs = X
dataset = TensorDataset(X, Y)
loader = DataLoader(dataset, 7)
shuffled = DataLoader(dataset, 7, shuffle=True)
weighted = DataLoader(dataset, 7, sampler=WeightedRandomSampler(torch.ones(30), 30))
some = DataLoader(dataset, 7, sampler=SubsetRandomSampler(range(30)))
shuffled_batches = DataLoader(dataset, batch_sampler=BatchSampler(RandomSampler(dataset), 7, False))
two_batches = [X[:15], X[15:]]
empty = nn.Flatten()

def broken():
    class Broken:
        def __iter__(self):
            yield X[:5], Y[:5]
            raise RuntimeError("the disk is gone")
    return Broken()
batches = [(X[:10], Y[:10]), (X[10:], Y[10:])]
once = iter(batches)
sequences = (torch.randn(6, 5, 4, generator=generator), torch.randint(3, (6, 5), generator=generator))

def make():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 3))

def make_pair():
    return pair

def sized(width):
    return nn.Linear(width, 3)
"""


LINE = """
from torch import nn

class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1).double()

    def forward(self, x):
        return self.linear(x)[:, 0]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: net.py, weights of a trained classifier, data in three files; it is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "net.py").write_text(NET)
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(3, 4, generator=generator)
    labels = torch.randint(3, (400,), generator=generator)
    x = centers[labels] + 0.8 * torch.randn(400, 4, generator=generator)
    for name, part in {"train": slice(0, 120), "val": slice(120, 240), "test": slice(240, 400)}.items():
        np.savez(tmp_path / f"{name}.npz", x=x[part].double().numpy(), y=labels[part].numpy())
    torch.save(trained(x[:120], labels[:120]).state_dict(), tmp_path / "net.pt")
    return tmp_path


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(6, 3))


def trained(x: Tensor, y: Tensor) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = network()
        optimizer = torch.optim.Adam(found.parameters(), 0.02)
        for _ in range(100):
            optimizer.zero_grad()
            F.cross_entropy(found(x), y).backward()
            optimizer.step()
    return found


def model() -> torch.nn.Module:
    found = network()
    found.load_state_dict(torch.load("net.pt", weights_only=True))
    return found


def data(name: str) -> tuple[Tensor, Tensor]:
    with np.load(f"{name}.npz") as arrays:
        return torch.from_numpy(arrays["x"]).float(), torch.from_numpy(arrays["y"])


def lap(*words: object) -> int:
    return cli.main([str(word) for word in words])


def fit(*words: str, out: str = "net.lapwing") -> int:
    return lap("fit", "net.py:make", "train.npz", "--weights", "net.pt", "--likelihood", "classification",
               "--out", out, *words)  # fmt: skip


def predict(*words: str, data: str = "test.npz", posterior: str = "net.lapwing") -> int:
    return lap("predict", "net.py:make", posterior, data, "--weights", "net.pt", *words)


def table(path: str) -> dict[str, Tensor]:
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {name: torch.tensor([float(row[name]) for row in rows]) for name in rows[0]}


# --- numbers ------------------------------------------------------------------------------------------------------


def test_fit_and_predict_are_the_library(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--structure", "kron", "--prior", "2.5", "--select", "3.*", "--temperature", "0.5") == 0
    printed = capsys.readouterr().out
    direct = lapwing.fit(
        model(), data("train"), "classification", structure="kron", prior=2.5, select="3.*", temperature=0.5
    )
    assert printed.startswith(direct.summary())
    assert "written to net.lapwing" in printed
    p = direct.predict(data("test")[0])
    assert predict("--out", "p.npz", "--novelty", "--batch-size", "50") == 0
    with np.load("p.npz") as written:
        assert set(written.files) == {"label", "confidence", "entropy", "epistemic", "probs", "novelty"}
        for name in written.files:
            torch.testing.assert_close(torch.from_numpy(written[name]), getattr(p, name), rtol=1e-4, atol=1e-6)
    assert predict("--out", "p.safetensors") == 0
    torch.testing.assert_close(load_file("p.safetensors")["probs"], p.probs, rtol=1e-4, atol=1e-6)
    assert predict("--out", "p.csv") == 0
    columns = table("p.csv")
    assert list(columns) == ["label", "confidence", "entropy", "epistemic", "probs_0", "probs_1", "probs_2"]
    torch.testing.assert_close(columns["probs_1"], p.probs[:, 1], rtol=1e-4, atol=1e-6)
    assert capsys.readouterr().out.count("160 predictions in") == 3


def test_bayesian_linear_regression_in_closed_form(folder: Path) -> None:
    """A linear model with known noise: y* ~ N(x*ᵀm, σ² + x*ᵀ(AᵀA/σ² + τI)⁻¹x*), from numpy alone."""
    rng, noise, tau = np.random.default_rng(0), 0.3, 2.0
    features = rng.normal(size=(40, 3))
    y = features @ [1.0, -2.0, 0.5] + noise * rng.normal(size=40)
    design = np.c_[features, np.ones(40)]
    precision = design.T @ design / noise**2 + tau * np.eye(4)
    mode = np.linalg.solve(precision, design.T @ y / noise**2)
    torch.save(
        {"state_dict": {"linear.weight": torch.tensor(mode[None, :3]), "linear.bias": torch.tensor(mode[3:])}}, "l.pt"
    )
    (folder / "line.py").write_text(LINE)
    np.savetxt("line.csv", np.c_[features[:, :1], y, features[:, 1:]], "%.17g", ",", header="a,price,b,c", comments="")
    np.savetxt("new.csv", features[:7] * 3, "%.17g", ",", header="a,b,c", comments="")
    common = ("--weights", "l.pt", "--target", "price")
    settings = ("--likelihood", "regression", "--noise", noise, "--prior", tau)
    assert lap("fit", "line.py:Line", "line.csv", *common, *settings, "--out", "line.lapwing") == 0
    written = ("--out", "new-p.csv", "--level", "0.9")
    assert lap("predict", "line.py:Line", "line.lapwing", "new.csv", *common, *written) == 0
    found = table("new-p.csv")
    at = np.c_[features[:7] * 3, np.ones(7)]
    epistemic = np.einsum("ni,ij,nj->n", at, np.linalg.inv(precision), at)
    stddev = np.sqrt(epistemic + noise**2)
    expected = {
        "mean": at @ mode,
        "stddev": stddev,
        "epistemic": epistemic,
        "aleatoric": np.full(7, noise**2),
        "lower": at @ mode - 1.6448536269514722 * stddev,
        "upper": at @ mode + 1.6448536269514722 * stddev,
    }
    assert list(found) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].numpy(), values, rtol=1e-5, atol=1e-6)


def test_tune_in_one_go_or_two(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--structure", "full", "--tune", "val.npz", out="one.lapwing") == 0
    assert fit("--structure", "full", out="raw.lapwing") == 0
    tune = ("--weights", "net.pt", "--out", "two.lapwing")
    assert lap("tune", "net.py:make", "raw.lapwing", "val.npz", *tune) == 0
    direct = lapwing.fit(model(), data("train"), "classification", structure="full").tune(data("val"))
    for name in ("one", "two"):
        stored = lapwing.load(f"{name}.lapwing", model())
        assert stored.prior.precision == pytest.approx(direct.prior.precision, rel=1e-3)
        assert stored.logit_temperature == pytest.approx(direct.logit_temperature, rel=1e-3)
    assert capsys.readouterr().out.count("tuned by validation") == 2


def test_tune_by_the_evidence(folder: Path) -> None:
    """There are more data than weights, so that the library has nothing to warn of."""
    assert fit("--structure", "full", "--tune-evidence", "--tune-prior", "layerwise", out="one.lapwing") == 0
    assert fit("--structure", "full", out="raw.lapwing") == 0
    assert lap("tune", "net.py:make", "raw.lapwing", "--weights", "net.pt", "--tune-prior", "layerwise", "--out",
               "two.lapwing") == 0  # fmt: skip
    direct = lapwing.fit(model(), data("train"), "classification", structure="full").tune(prior="layerwise")
    for name in ("one", "two"):
        stored = lapwing.load(f"{name}.lapwing", model())
        assert float(stored.log_evidence()) == pytest.approx(float(direct.log_evidence()), rel=1e-5)


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("few.npz", x=data("train")[0][:20].numpy(), y=data("train")[1][:20].numpy())
    assert lap("fit", "net.py:make", "few.npz", "--weights", "net.pt", "--likelihood", "classification", "--structure",
               "full", "--tune-evidence", "--out", "few.lapwing") == 0  # fmt: skip
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lapwing:")]
    assert len(lines) == 1
    assert lines[0].startswith("lapwing: warning: tuning by the evidence")


def test_report_scores_the_network_as_torch_does(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit() == 0
    np.savez("noise.npz", x=5 * np.random.default_rng(0).normal(size=(50, 4)))
    assert lap("report", "net.py:make", "net.lapwing", "test.npz", "--weights", "net.pt", "--ood", "noise=noise.npz",
               "--out", "r/report.html") == 0  # fmt: skip
    printed = capsys.readouterr().out
    row = re.search(r"^MAP +([\d.]+) % +([\d.]+)", printed, re.MULTILINE)
    x, y = data("test")
    with torch.no_grad():
        f = model().eval()(x)
    assert row is not None
    assert float(row[1]) == pytest.approx(100 * float((f.argmax(1) == y).float().mean()), abs=0.006)
    assert float(row[2]) == pytest.approx(F.cross_entropy(f, y).item(), abs=6e-5)
    assert "AUROC noise" in printed
    page = (folder / "r" / "report.html").read_text(encoding="utf-8")
    assert "Laplace" in page
    assert "Sequential, 51 weights" in page


def test_the_seed_decides_the_draws_of_a_sampled_factor(folder: Path) -> None:
    evidence = []
    for k, seed in enumerate(("1", "1", "2")):
        assert fit("--structure", "diag", "--factor", "mc", "--seed", seed, out=f"{k}.lapwing") == 0
        evidence.append(float(lapwing.load(f"{k}.lapwing", model()).log_evidence()))
    assert evidence[0] == evidence[1] != evidence[2]


def test_options_reach_the_fit(folder: Path) -> None:
    assert (
        fit("--structure", "kron", "--tolerance", "1e-2", "--n-data", "1000", "--memory", "1GB", "--checkpoint", "c")
        == 0
    )
    la = lapwing.load("net.lapwing", model())
    assert la.curvature.factor.tolerance == 1e-2
    assert la.n_data == 1000
    assert la.options.memory == 10**9


def test_a_matrix_free_posterior_reads_its_data_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--structure", "matrixfree") == 0
    assert predict("--out", "p.npz") == 1
    assert "--train DATA" in capsys.readouterr().err
    assert predict("--out", "p.npz", "--train", "train.npz") == 0
    x, y = data("train")
    np.savetxt("train.csv", np.c_[x, y], "%.9g", ",", header="a,b,c,d,y", comments="")
    assert predict("--out", "q.npz", "--train", "train.csv") == 0
    exact = lapwing.fit(model(), (x, y), "classification", structure="full").predict(data("test")[0]).probs
    with np.load("p.npz") as written:
        torch.testing.assert_close(torch.from_numpy(written["probs"]), exact, rtol=2e-3, atol=2e-4)


# --- what is read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["pair", "dataset", "loader", "batches", "make_pair", "inputs"])
def test_data_of_ones_own_code(folder: Path, source: str) -> None:
    assert fit("--structure", "diag") == 0
    assert predict("--out", "p.csv", data=f"net.py:{source}") == 0
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(5))
    expected = lapwing.load("net.lapwing", model()).predict(x).probs[:, 0]
    torch.testing.assert_close(table("p.csv")["probs_0"], expected, rtol=1e-4, atol=1e-6)


def test_the_users_module_stays_as_it_is(folder: Path) -> None:
    arguments = ("--likelihood", "classification", "--out")
    assert lap("doctor", "net.py:model") == 0
    live = sys.modules[f"net@{folder}"].model
    live[0].eval()
    before = {name: value.clone() for name, value in live.state_dict().items()}
    assert lap("fit", "net.py:model", "train.npz", *arguments, "a.lapwing") == 0
    assert lap("predict", "net.py:model", "a.lapwing", "test.npz", "--out", "p.csv") == 0
    assert all(torch.equal(value, before[name]) for name, value in live.state_dict().items())
    assert [m.training for m in live.modules()] == [True, False, True, True, True]
    assert all(p.requires_grad and p.grad is None for p in live.parameters())


def test_predictions_of_sequences_are_arrays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    likelihood = ("--likelihood", "classification", "--structure", "diag")
    assert lap("fit", "net.py:tokens", "net.py:sequences", *likelihood, "--out", "t.lapwing") == 0
    assert lap("predict", "net.py:tokens", "t.lapwing", "net.py:sequences", "--out", "t.csv") == 1
    assert "which does not fit a table: write to .npz" in capsys.readouterr().err
    assert not list(folder.glob("*t.csv*")) + list(folder.glob(".t.csv*"))
    assert lap("predict", "net.py:tokens", "t.lapwing", "net.py:sequences", "--out", "t.npz") == 0
    with np.load("t.npz") as written:
        assert written["probs"].shape == (6, 5, 3)


def run(*words: str, at: Path) -> subprocess.CompletedProcess[str]:
    """As the `lapwing` script runs: the current folder is not importable of itself (-P)."""
    source = Path(lapwing.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    return subprocess.run(
        [sys.executable, "-P", "-m", "lapwing", *words], capture_output=True, text=True, cwd=at, env=environment
    )


@pytest.mark.slow
def test_a_user_in_a_shell(folder: Path) -> None:
    weights = ("--weights", "net.pt")
    for words in (
        ("fit", "net:make", "train.npz", *weights, "--likelihood", "classification", "--out", "net.lapwing"),
        ("predict", "net:make", "net.lapwing", "test.npz", *weights, "--out", "p.csv"),
    ):
        done = run(*words, at=folder)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
    direct = lapwing.fit(model(), data("train"), "classification").predict(data("test")[0])
    torch.testing.assert_close(table("p.csv")["confidence"], direct.confidence, rtol=1e-4, atol=1e-6)
    wrong = run("fit", "net:nothing", "train.npz", "--likelihood", "classification", "--out", "x", at=folder)
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert len(wrong.stderr.strip().splitlines()) == 1
    assert "has no 'nothing'; it has" in wrong.stderr


# --- what is wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prior", "0"], "must be positive"),
        (["--temperature", "-1"], "temperature must be at least 0"),
        (["--noise", "0.1"], "--noise is for --likelihood regression"),
        (["--factor", "mc", "--tolerance", "0.1"], "--tolerance is for --factor ggn"),
        (["--select", "body.*"], "matches no parameter"),
        (["--memory", "1KB", "--structure", "full"], "the budget is"),
        (["--device", "mars"], "moving the model to mars failed"),
        (["--tune", "nowhere.npz"], "there is no data file 'nowhere.npz'"),
        (["--checkpoint", "net.pt"], "is a file"),
    ],
)
def test_a_fit_that_cannot_be(folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(*words) == 1
    said = capsys.readouterr().err.strip()
    assert message in said
    assert said.startswith("lapwing: ")
    assert "\n" not in said
    assert not (folder / "net.lapwing").exists()


def test_a_fit_is_not_lost_when_tuning_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--structure", "diag", "--tune-evidence", "--learn", "temperature") == 1
    said = capsys.readouterr().err
    assert "the evidence cannot choose a temperature" in said
    assert "net.lapwing contains the untuned posterior" in said
    assert predict("--out", "p.csv") == 0


def test_a_posterior_is_replaced_only_by_force(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--structure", "diag") == 0
    before = (folder / "net.lapwing").read_bytes()
    assert fit("--structure", "kron") == 1
    assert "say --force" in capsys.readouterr().err
    assert lap("tune", "net.py:make", "net.lapwing", "val.npz", "--weights", "net.pt", "--out", "net.lapwing") == 1
    assert (folder / "net.lapwing").read_bytes() == before
    assert fit("--structure", "kron", "--force") == 0
    assert lapwing.load("net.lapwing", model()).curvature.structure.name == "kron"
    assert fit("--force", out=".") == 1
    assert "is a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "test.npz"], "is also an input"),
        (["--out", "net.lapwing"], "is also an input"),
        (["--out", "."], "is a folder"),
        (["--out", "p.txt"], "predictions are written as .csv, .npz, .safetensors"),
    ],
)
def test_predictions_never_replace_an_input(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit("--structure", "diag") == 0
    assert predict(*words) == 1
    assert message in capsys.readouterr().err


def test_posteriors_that_do_not_belong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict("--out", "p.csv", posterior="nothing.lapwing") == 1
    assert "there is no file 'nothing.lapwing'" in capsys.readouterr().err
    assert predict("--out", "p.csv", posterior="test.npz") == 1
    assert "not a Lapwing file" in capsys.readouterr().err
    assert fit("--structure", "diag") == 0
    assert lap("predict", "net.py:make", "net.lapwing", "test.npz", "--out", "p.csv") == 1
    assert "(--weights FILE)" in capsys.readouterr().err
    assert lap("predict", "net.py:tokens", "net.lapwing", "test.npz", "--out", "p.csv") == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert lap("report", "net.py:make", "net.lapwing", "test.npz", "--weights", "net.pt", "--ood", "a=val.npz", "--ood",
               "a=test.npz") == 1  # fmt: skip
    assert "the same name" in capsys.readouterr().err


def test_shuffled_data_are_refused_where_the_order_counts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lap("fit", "net.py:model", "net.py:shuffled", "--likelihood", "classification", "--out", "s.lapwing") == 0
    for name in ("shuffled", "weighted", "some", "shuffled_batches"):
        assert lap("predict", "net.py:model", "s.lapwing", f"net.py:{name}", "--out", "p.csv") == 1
        assert "shuffle=False" in capsys.readouterr().err


def test_two_batches_of_inputs_are_two(folder: Path) -> None:
    assert lap("fit", "net.py:model", "net.py:pair", "--likelihood", "classification", "--out", "s.lapwing") == 0
    for name in ("two_batches", "inputs", "loader"):
        assert lap("predict", "net.py:model", "s.lapwing", f"net.py:{name}", "--out", f"{name}.csv") == 0
    two, inputs, loader = (
        np.loadtxt(f"{name}.csv", delimiter=",", skiprows=1) for name in ("two_batches", "inputs", "loader")
    )
    assert len(two) == 30
    np.testing.assert_allclose(two, inputs, rtol=1e-5)  # batches of other sizes round differently
    np.testing.assert_allclose(two, loader, rtol=1e-5)


@pytest.mark.parametrize("name", ["net.py", "net.pt", "train.npz", "val.npz"])
def test_no_force_replaces_an_input(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path(name).read_bytes()
    assert fit("--structure", "diag", "--tune", "val.npz", "--force", out=name) == 1
    assert "is also an input" in capsys.readouterr().err
    assert Path(name).read_bytes() == before


def test_a_posterior_may_be_tuned_in_its_place(folder: Path) -> None:
    assert fit("--structure", "diag") == 0
    words = ("tune", "net.py:make", "net.lapwing", "val.npz", "--weights", "net.pt", "--out", "net.lapwing", "--force")
    assert lap(*words) == 0
    assert "tuned by validation" in lapwing.load("net.lapwing", model()).summary()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("net.py", "is also an input"),
        ("test.npz", "is also an input"),
        ("val.npz", "is also an input"),
        ("other.csv", "a report is an HTML page"),
    ],
)
def test_reports_replace_nothing_else(folder: Path, out: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.csv").write_text("a,y\n")
    assert fit("--structure", "diag") == 0
    before = Path(out).read_bytes()
    assert lap("report", "net.py:make", "net.lapwing", "test.npz", "--weights", "net.pt", "--ood", "other=val.npz",
               "--out", out) == 1  # fmt: skip
    assert message in capsys.readouterr().err
    assert Path(out).read_bytes() == before


def test_what_nobody_foresaw_is_one_line_too(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("fit", "net.py:model", "net.py:broken", "--likelihood", "classification", "--out", "b.lapwing")
    assert lap(*words) == 1
    said = capsys.readouterr().err.strip()
    assert "RuntimeError: the disk is gone" in said
    assert "\n" not in said
    monkeypatch.setenv("LAPWING_DEBUG", "1")
    with pytest.raises(RuntimeError, match="the disk is gone"):
        lap(*words)
    assert lap("fit", "net.py:empty", "net.py:pair", "--likelihood", "classification", "--out", "b.lapwing") == 1
    assert "no parameters" in capsys.readouterr().err


COMMANDS = ["doctor", "fit", "tune", "predict", "report", "reproduce"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_parses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        lap(name, "--help")
    assert caught.value.code == 0
    example = re.search(r"^example: lapwing (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert example is not None
    cli.parser().parse_args(example[1].replace(" --help", "").split())


@pytest.mark.parametrize(
    "words",
    [
        ["fit", "net.py:model", "train.npz", "--out", "x"],  # no likelihood
        ["fit", "net.py:model", "train.npz", "--likelihood", "classification"],  # no --out
        ["fit", "m", "d", "--likelihood", "regression", "--out", "x", "--tune", "v", "--tune-evidence"],
        ["fit", "m", "d", "--likelihood", "regression", "--out", "x", "--learn", "weights"],
        ["fit", "m", "d", "--likelihood", "regression", "--out", "x", "--memory", "much"],
        ["fit", "m", "d", "--likelihood", "regression", "--out", "x", "--memory", "0GB"],
        ["fit", "m", "d", "--likelihood", "regression", "--out", "x", "--memory", "inf"],
        ["fit", "m", "d", "--likelihood", "regression", "--out", "x", "--n-data", "-3"],
        ["fit", "m", "d", "--likelihood", "regression", "--out", "x", "--seed", "99999999999999999999"],
        ["doctor", "m", "--n-data", "-3"],
        ["predict", "m", "p", "d", "--out", "x.csv", "--level", "95"],
        ["predict", "m", "p", "d", "--out", "x.csv", "--target", "a", "--no-target"],
        ["predict", "m", "p", "d", "--out", "x.csv", "--batch-size", "0"],
        ["report", "m", "p", "d", "--ood", "noise.npz"],
        ["doctor"],
        ["doctor", "m", "--input", "a,b"],
        ["doctor", "m", "--input", "3", "--data", "d"],
    ],
)
def test_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        lap(*words)
    assert caught.value.code == 2
    assert f"usage: lapwing {words[0]}" in capsys.readouterr().err


def test_data_in_order_are_told_from_shuffled_ones() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Tensor]:
            yield torch.zeros(4)

    single = TensorDataset(torch.randn(3, 4))
    require_order(DataLoader(Stream()), "data.py:stream")
    require_order(DataLoader(single, batch_size=None), "data.py:single")
    with pytest.raises(lapwing.BadData, match="predictions are written in the order of the data"):
        require_order(DataLoader(single, batch_size=None, shuffle=True), "data.py:single")


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lapwing.cli.doctor.command.model_of", interrupted)
    assert cli.main(["doctor", "net.py:model"]) == 130
    assert capsys.readouterr().err == "lapwing: interrupted\n"
