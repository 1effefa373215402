"""Tables, pages, data and verdicts of experiments."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from experiments._arguments import Experiment
from experiments._gallery import verdicts_told
from experiments._results import Claim, Result, answered, gathered, spread, verdict
from experiments._study import study

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


def test_a_question_of_our_own_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claim = answered("Is KF best?", "KF 2.50, diagonal 2.61.", "lower is better.", True, False)
    made = Result("ours", "Ours", "", "python -m experiments.ours").with_rows([{"NLL": 2.5}]).with_claims(claim)
    page = made.page()
    assert "A question of our own. Made by" in page
    assert "**Is KF best?**\n\nRule: lower is better.\n\nKF 2.50, diagonal 2.61. **In part.**\n" in page
    made.finish(tmp_path)
    assert "in part: Is KF best? Rule: lower is better. KF" in capsys.readouterr().out
    assert verdicts_told(json.loads((tmp_path / "ours.json").read_text(encoding="utf-8"))) == "Answers (in part: 1)"


def test_without_a_folder_it_only_prints(capsys: pytest.CaptureFixture[str]) -> None:
    result().finish(None)
    assert "holds: “KF is best.”" in capsys.readouterr().out


def test_verdicts_spreads_and_bad_numbers(tmp_path: Path) -> None:
    assert [verdict(True), verdict(True, False), verdict(False, False)] == ["holds", "holds in part", "does not hold"]
    assert verdict() == "does not hold"  # nothing was compared
    assert spread([1.0]) == "1"
    assert spread([1.0, 3.0]) == "2 ± 1.4"
    assert spread([-2.95] * 3) == "-2.95 ± 0"
    with pytest.raises(BadData, match="a verdict is one of"):
        Claim("a", "b", "c", "maybe", "d")
    with pytest.raises(BadData, match="finite"):
        result().with_data(y=float("nan")).finish(tmp_path)


def test_scores_of_several_seeds() -> None:
    each, mean = gathered([{"kron": {"NLL": 1.0}}, {"kron": {"NLL": 2.0}}])
    assert each == {"kron": {"NLL": [1.0, 2.0]}}
    assert mean == {"kron": {"NLL": 1.5}}


def test_a_study_averages_judges_and_writes(tmp_path: Path) -> None:
    parser = Experiment("What it does.", smoke={}, quick={}, seeds=2)
    parser.add_argument("--size", type=int, default=10)
    given = parser.parse_args(["--out", str(tmp_path), "--first", "3"])

    def run(seed: int, given: argparse.Namespace) -> dict[str, dict[str, float]]:
        return {"a": {"NLL": float(seed), "wide": 1e5}, "b": {"wide": given.size}}

    judged = []
    study(
        "lowrank",
        {"paper": ""},
        "A study",
        run,
        lambda mean: [judged.append(mean) or answered("?", "x", "y", True)],
        given,
    )
    assert judged == [{"a": {"NLL": 3.5, "wide": 1e5}, "b": {"wide": 10.0}}]
    page = (tmp_path / "lowrank.md").read_text(encoding="utf-8")
    assert "| a | 3.5 ± 0.71 | 1e+05 ± 0 |" in page
    assert "--seeds 2 --first 3 --size 10`, seeds 3, 4." in page
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md", ".png", ".svg"]


def test_options_of_the_experiments() -> None:
    parser = Experiment("What it does.", smoke={"size": 1}, quick={"size": 2, "seeds": 3})
    parser.add_argument("--size", type=int, default=10)
    assert parser.parse_args([]).size == 10
    assert parser.parse_args(["--smoke"]).size == 1
    given = parser.parse_args(["--quick", "--out", "here"])
    assert (given.size, given.seeds, given.out) == (2, 3, Path("here"))
    assert parser.parse_args(["--quick", "--size", "7"]).size == 7
    assert given.command.endswith(" --seeds 3 --size 2")
    parser.add_argument("--methods", nargs="+", default=["random", "last layer"])
    command = parser.parse_args([]).command
    assert command.startswith("python -m experiments.")
    assert command.endswith(" --methods random 'last layer'")
