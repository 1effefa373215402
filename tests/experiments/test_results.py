"""Tables, pages, data and verdicts of experiments."""

import json
from pathlib import Path

import pytest
import torch
from experiments._arguments import Experiment
from experiments._results import Claim, Result, gathered, spread, verdict

from lapwing.errors import BadData


def result() -> Result:
    claim = Claim("KF is best.", "Fig. 1", "KF 2.50, diagonal 2.61.", verdict(2.50 < 2.61), "lower is better.")
    made = Result("toy", "Toy", "001, Fig. 1", "python -m experiments.toy", seeds=(0, 1))
    rows = [{"method": "kron", "NLL": 2.5}, {"method": "diag", "NLL": 2.61, "draws": 50}]
    return made.with_rows(rows).with_claims(claim).with_notes("Only two seeds.").with_data(x=torch.arange(3.0))


def test_everything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Picture:
        def savefig(self, path: Path, **_: object) -> None:
            path.write_text("picture", encoding="utf-8")

    result().finish(tmp_path / "deep" / "folder", Picture)
    folder = tmp_path / "deep" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == ["toy.json", "toy.md", "toy.png", "toy.svg"]
    data = json.loads((folder / "toy.json").read_text(encoding="utf-8"))
    assert data["data"]["x"] == [0.0, 1.0, 2.0]
    assert data["claims"][0]["verdict"] == "holds"
    page = (folder / "toy.md").read_text(encoding="utf-8")
    assert "> KF is best." in page
    assert "\n\nRule: lower is better.\n\nKF 2.50, diagonal 2.61. **Holds.**\n" in page  # the rule before the numbers
    assert Result.read(folder / "toy.json").page() == page
    assert "| kron | 2.5 |  |" in page
    assert "| diag | 2.61 | 50 |" in page
    assert "seeds 0, 1" in page
    assert "![Toy](toy.png)" in page
    said = capsys.readouterr().out
    assert "method   NLL  draws" in said


def test_without_a_folder_it_only_prints(capsys: pytest.CaptureFixture[str]) -> None:
    result().finish(None)
    assert "holds: “KF is best.”" in capsys.readouterr().out


def test_verdicts_spreads_and_bad_numbers(tmp_path: Path) -> None:
    assert [verdict(True), verdict(True, False), verdict(False, False)] == ["holds", "holds in part", "does not hold"]
    assert spread([1.0]) == "1"
    assert spread([1.0, 3.0]) == "2 ± 1.4"
    with pytest.raises(BadData, match="a verdict is one of"):
        Claim("a", "b", "c", "maybe", "d")
    with pytest.raises(BadData, match="finite"):
        result().with_data(y=float("nan")).finish(tmp_path)


def test_scores_of_several_seeds() -> None:
    each, mean = gathered([{"kron": {"NLL": 1.0}}, {"kron": {"NLL": 2.0}}])
    assert each == {"kron": {"NLL": [1.0, 2.0]}}
    assert mean == {"kron": {"NLL": 1.5}}


def test_options_of_the_experiments_of_papers() -> None:
    parser = Experiment("What it does.", smoke={"size": 1}, quick={"size": 2, "seeds": 3})
    parser.add_argument("--size", type=int, default=10)
    assert parser.parse_args([]).size == 10
    assert parser.parse_args(["--smoke"]).size == 1
    given = parser.parse_args(["--quick", "--out", "here"])
    assert (given.size, given.seeds, given.out) == (2, 3, Path("here"))
    assert parser.parse_args(["--quick", "--size", "7"]).size == 7
