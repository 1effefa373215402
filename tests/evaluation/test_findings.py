"""What a report says in words is what its numbers are."""

import re
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.evaluation.columns import difference_words
from lapwing.evaluation.examples import Viewer
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian
from lapwing.predictive import SampledFunction, predict_targets


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Sure:
    """A classifier whose logits are those of the truth times `scale`, but for a few errors that it doubts."""

    def __init__(self, scale: float) -> None:
        self.scale, self.likelihood = scale, Categorical()

    def predict(self, x: Tensor):
        f = self.scale * x[:, :3]
        return predict_targets(SampledFunction(None, f[None]), self.likelihood)


def data(n: int = 400, errors: int = 20) -> tuple[Tensor, Tensor]:
    y = torch.randint(3, (n,))
    x = 3 * nn.functional.one_hot(y, 3).float() + 0.2 * torch.randn(n, 3)
    x[:errors] = 0.3 * nn.functional.one_hot((y[:errors] + 1) % 3, 3)  # wrong, and nearly undecided
    return x, y


def test_a_better_model_is_called_better_with_the_size_of_the_gain() -> None:
    x, y = data()
    report = lapwing.evaluate({"dull": Sure(0.5), "sharp": Sure(2.0)}, (x, y), ood={"far": 0.1 * x})
    said = report.findings()
    before, after = report.row("dull")["nll"], report.row("sharp")["nll"]
    assert said[0].startswith(f"sharp lowers the NLL from {before:.4f} to {after:.4f}, by {before - after:.2f}"[:-1])
    assert said[0].endswith("which is better than dull.")
    assert said[1] == "The accuracy of sharp is that of dull, 95.00 %."
    assert any("separates far from the test items with AUROC" in line for line in said)
    assert said[-1] == (
        "Abstaining on the 5 % least certain answers of sharp removes 100 % of its errors (from 20 of 400 to 0 of 380)."
    )
    worse = lapwing.evaluate({"sharp": Sure(2.0), "dull": Sure(0.5)}, (x, y)).findings()
    assert worse[0].endswith("which is worse than sharp.")


def test_equal_models_are_called_equal() -> None:
    x, y = data()
    report = lapwing.evaluate({"a": Sure(1.0), "b": Sure(1.0)}, (x, y))
    assert report.findings()[0] == f"The NLL of b is that of a, {report.row('a')['nll']:.4f}."
    close = lapwing.evaluate({"a": Sure(1.0), "b": Sure(1.001)}, (x + torch.randn_like(x), y))
    value, low, high = close.difference("b", "nll")
    assert ("no measurable difference" in close.findings()[0]) == (low <= 0 <= high)
    assert abs(value) < 0.01


def test_intervals_of_numbers_are_judged_by_their_coverage() -> None:
    model, x = nn.Linear(2, 1), torch.randn(2000, 2)
    y = model(x).detach() + 0.5 * torch.randn(2000, 1)
    for noise, words in ((0.5, "as promised"), (0.2, "it is overconfident"), (2.0, "more than promised")):
        said = lapwing.evaluate({"net": model}, (x, y), likelihood=Gaussian(noise)).findings()
        assert words in said[1]
        assert re.match(r"The 95 % intervals of net hold [\d.]+ % \([\d.]+ to [\d.]+ %\) of the targets", said[1])


def test_differences_are_written_with_the_digits_that_are_known() -> None:
    assert difference_words("nll", 0.01234, 0.0101, 0.0145) == "0.0123 (0.0101 to 0.0145)"
    assert difference_words("accuracy", -0.02, -0.05, 0.01, sign=True) == "−2.0 (−5.0 to 1.0) points"
    assert difference_words("nll", 0.5, 0.4, 0.6, sign=True) == "+0.50 (0.40 to 0.60)"
    assert difference_words("nll", 3000.0, 1000.0, 5000.0) == "3000 (1000 to 5000)"


def test_classes_and_features_have_names() -> None:
    pandas = pytest.importorskip("pandas")
    x, y = data(40, 2)
    frame = pandas.DataFrame(x.numpy(), columns=["height", "width", "depth"])
    report = lapwing.evaluate({"net": Sure(1.0)}, (frame, y), classes=["ant", "bee", "fly"])
    worst = report.results["net"].examples["wrong"][0]
    assert worst.text.startswith("height ")
    assert {worst.truth, worst.answer} <= {"ant", "bee", "fly"}
    assert worst.wrong
    assert worst.caption == f"{worst.truth} → {worst.answer}\n{worst.certainty}"


def test_names_of_classes_come_from_the_data_set() -> None:
    class Named(torch.utils.data.TensorDataset):
        classes = ("ant", "bee", "fly")

    loader = torch.utils.data.DataLoader(Named(*data(40, 2)), batch_size=7)
    report = lapwing.evaluate({"net": Sure(1.0)}, loader)
    assert report.results["net"].examples["uncertain"][0].answer in Named.classes
    assert report.data["test data"] == "40 items of Named"


def test_inputs_are_described_as_the_user_says() -> None:
    x, y = data(10, 1)
    report = lapwing.evaluate({"net": Sure(1.0)}, (x, y), describe=lambda one: f"a row of {one.shape[1]}")
    assert report.results["net"].examples["uncertain"][0].text == "a row of 3"
    picture = lapwing.evaluate({"net": Sure(1.0)}, (x, y), describe=lambda one: one.reshape(1, 1, 3))
    assert picture.results["net"].examples["uncertain"][0].picture.shape == (1, 1, 3)


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (torch.tensor([[1.5]]), "x 1.5"),
        (torch.arange(10.0)[None], "x0 0, x1 1, x2 2, x3 3, x4 4, x5 5, x6 6, x7 7, … (10 numbers)"),
        ({"input_ids": torch.arange(3)[None], "attention_mask": torch.ones(1, 3)}, "0 1 2"),
        ((torch.tensor([[1.0]]), torch.tensor([[2.0]])), "x0 1, x1 2"),
    ],
)
def test_inputs_without_a_description(one, text: str) -> None:
    assert Viewer().seen(one) == (None, text)


def test_words_for_labels() -> None:
    f = torch.tensor([[2.0, -3.0], [-1.0, -1.0]])
    p = predict_targets(SampledFunction(None, f[None]), Bernoulli())
    y = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    assert p.described(0, y, ["cat", "dog"])["truth"] == "cat, dog"
    assert p.described(0, y, ["cat", "dog"])["answer"] == "cat"
    assert p.described(1, y)["answer"] == "none"


def test_a_model_that_rules_out_the_truth_is_named_with_its_infinite_loss() -> None:
    x, y = data(40, errors=4)
    x[:4] = 1.5e38 * (2 * nn.functional.one_hot((y[:4] + 1) % 3, 3) - 1)  # the truth is beyond float32 from the answer
    said = lapwing.evaluate({"dull": Sure(1e-38), "certain": Sure(2.0)}, (x, y)).findings()
    assert re.fullmatch(r"The NLL of certain is inf, that of dull [\d.]+\.", said[0])


def test_one_item_says_nothing_about_others() -> None:
    x, y = data(1, errors=0)
    said = lapwing.evaluate({"dull": Sure(0.5), "sharp": Sure(2.0)}, (x, y)).findings()
    assert said[0].startswith("sharp changes the NLL from ")
    assert said[0].endswith("compared with dull; one item says nothing about others.")


def test_classes_have_the_names_of_the_networks_configuration() -> None:
    class Named(nn.Linear):
        class config:
            id2label: ClassVar = {0: "cat", 1: "dog", 2: "owl"}

    model, (x, y) = Named(3, 3), data(30)
    report = lapwing.evaluate({"MAP": model}, (x, y), likelihood="classification")
    shown = report.results["MAP"].examples["uncertain"]
    assert {example.truth for example in shown} <= {"cat", "dog", "owl"}
