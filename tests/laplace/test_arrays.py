"""Arrays and frames where tensors are expected, and numbers of another precision than the network's."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapwing

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(20) % 3


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


def fit(data: Any, model: nn.Module | None = None, **options: Any) -> lapwing.Laplace:
    return lapwing.fit(model or net(), data, "classification", structure="full", **options)


def frame(x: Tensor) -> Any:
    pandas: Any = pytest.importorskip("pandas")
    return pandas.DataFrame(x.numpy(), columns=[f"feature {k}" for k in range(x.shape[1])])


def series(y: Tensor) -> Any:
    return pytest.importorskip("pandas").Series(y.numpy())


def fixed(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


class Table:
    """Numbers with names, which NumPy can read."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.values.numpy()


FORMS: dict[str, Any] = {
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "arrays that cannot be written": lambda: (fixed(X.numpy().copy()), fixed(Y.numpy().copy())),
    "arrays in a list": lambda: [X.numpy(), Y.numpy()],
    "tables": lambda: (Table(X), Table(Y)),
    "frames": lambda: (frame(X), series(Y)),
    "batches of arrays": lambda: [(X[:8].numpy(), Y[:8].numpy()), (X[8:].numpy(), Y[8:].numpy())],
    "tensors and lists": lambda: [(X, Y.tolist())],
    "float64 tensors": lambda: (X, Y),
    "arrays read backward": lambda: (X.numpy()[::-1].copy()[::-1], Y.numpy()[::-1].copy()[::-1]),
    "arrays of the other byte order": lambda: (X.numpy().astype(">f8"), Y.numpy().astype(">i8")),
    "arrays in the order of Fortran": lambda: (np.asfortranarray(X.numpy()), Y.numpy().astype(np.int32)),
    "objects that are numbers": lambda: (X.numpy().astype(object), Y.numpy()),
    "frames with other labels": lambda: (frame(X).iloc[::-1].iloc[::-1], series(Y).set_axis(range(20, 0, -1))),
    "float16 array": lambda: (X.half().numpy(), Y.numpy()),
}


@pytest.mark.parametrize("form", FORMS)
def test_as_tensors_of_the_dtype_of_the_network(form: str) -> None:
    data, x = FORMS[form](), X.half().float() if "16" in form else X.float()
    la, truth = fit(data), fit((x, Y))
    torch.testing.assert_close(la.curvature.dense(), truth.curvature.dense())
    torch.testing.assert_close(la.log_evidence(), truth.log_evidence())
    inputs = data[0] if not isinstance(data[0], tuple) else data[0][0]
    torch.testing.assert_close(la.predict(inputs).probs, truth.predict(x[: len(inputs)]).probs)
    tuned = la.tune(data, grid={"prior": [0.1, 1.0]}, learn="prior")
    assert tuned.tuning is not None
    assert tuned.tuning.score == pytest.approx(
        truth.tune((x, Y), grid={"prior": [0.1, 1.0]}, learn="prior").tuning.score  # type: ignore[union-attr]
    )
    torch.testing.assert_close(la.update(data).curvature.dense(), 2 * truth.curvature.dense())
    rows = {"MAP": la.module, "Laplace": la}
    report = lapwing.evaluate(rows, data, ood={"far": X.numpy() + 5}, likelihood="classification").to_dict()
    known = lapwing.evaluate({"MAP": la.module, "Laplace": truth}, (x, Y), likelihood="classification").to_dict()
    for name in rows:
        assert report["models"][name]["nll"] == pytest.approx(known["models"][name]["nll"])
    assert len(list(la.predict_loader([X.numpy(), X.numpy()]))) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_less_precise_inputs_for_a_network_in_double(dtype: torch.dtype) -> None:
    la = fit((X.to(dtype), Y), net(torch.float64))
    torch.testing.assert_close(
        la.curvature.dense(), fit((X.to(dtype).double(), Y), net(torch.float64)).curvature.dense()
    )
    x = X.to(dtype).requires_grad_()
    (slope,) = torch.autograd.grad(la.predict(x, differentiable=True).probs[:, 0].sum(), x)
    assert slope.dtype == dtype


def test_integers_stay_integers() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 3))
    ids = torch.arange(40).reshape(20, 2) % 7
    la = fit((ids.numpy(), Y.numpy()), model)
    torch.testing.assert_close(la.predict(ids.int().numpy()).probs, fit((ids, Y), model).predict(ids).probs)


def test_networks_that_take_other_precisions_get_them() -> None:
    """Seconds since 1970 in float64, of which the network itself takes the small part."""

    class Clock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(3, 3)

        def forward(self, t: Tensor) -> Tensor:
            return self.head((t - 1.7e9).float())

    model = Clock()
    la = fit((X + 1.7e9, Y), model)
    truth = fit((X.float(), Y), model.head)
    torch.testing.assert_close(la.curvature.dense(), truth.curvature.dense(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(la.predict(X + 1.7e9).probs, truth.predict(X.float()).probs, rtol=1e-4, atol=1e-4)


def test_arrays_without_numbers() -> None:
    with pytest.raises(lapwing.BadData, match="a ndarray of dtype <U1 holds no plain numbers"):
        fit((X.numpy(), np.array(["a", "b"] * 10)))
    with pytest.raises(lapwing.BadData, match="dtype object holds no plain numbers"):
        fit((np.array([["a", 1.0]] * 20, dtype=object), Y.numpy()))
    with pytest.raises(lapwing.BadData, match="X has 20 samples, y has 3"):
        fit((X.numpy(), Y[:3].numpy()))
