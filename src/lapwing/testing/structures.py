"""The laws of a structure: its curvature against brute force, and all that a posterior with it must be able to do."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import torch
from torch import Tensor, nn

from lapwing.curvature import Structure, resolve_structure
from lapwing.evidence import compare
from lapwing.fitting import fit, load
from lapwing.laplace import Laplace
from lapwing.linalg import Layout

Data = tuple[Tensor, Tensor]


class StructureLaws:
    """Test case of a structure: name it, and say where its matrix differs from the exact one.

    Without `expected`, the curvature is compared with the exact one only where `structure.bound` is "exact". The
    attributes below say what the structure can do.

    Examples:
        >>> from lapwing.testing import StructureLaws
        >>> class TestDiag(StructureLaws):
        ...     structure = lapwing.Diag()
        ...     def expected(self, ggn, layout):  # the exact curvature (P, P), and where its blocks are
        ...         return torch.diag(ggn.diagonal())
    """

    structure: ClassVar[Structure]
    updates: ClassVar[bool] = True  # `la.update(data)` gives the fit on all data
    tolerance: ClassVar[float] = 1e-6  # relative to the largest entry

    def expected(self, ggn: Tensor, layout: Layout) -> Tensor | None:
        """Return the curvature that the structure should find, (P, P); None where that is not known."""
        return ggn if self.structure.bound == "exact" else None

    def networks(self) -> Iterator[tuple[nn.Module, Data]]:
        """Yield small classifiers in float64, and their data."""
        generator = torch.Generator().manual_seed(0)
        classes = torch.randint(3, (20,), generator=generator)
        for net, shape in (
            (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), (3,)),
            (
                nn.Sequential(
                    nn.Conv1d(2, 3, 3), nn.LayerNorm(4), nn.ReLU(), nn.Conv1d(3, 3, 2), nn.Flatten(), nn.Linear(9, 3)
                ),
                (2, 6),
            ),
        ):
            with torch.no_grad():
                for p in net.parameters():
                    p.copy_(0.6 * torch.randn(p.shape, generator=generator) + float(p.ndim == 1))
            yield net.double().eval(), (torch.randn(20, *shape, generator=generator).double(), classes)

    def fitted(self, net: nn.Module, data: Data, **options: object) -> Laplace:
        """A posterior with this structure."""
        given = {"structure": self.structure, "progress": False, "prior": 0.7, **options}
        return fit(net, data, "classification", **given)  # type: ignore[arg-type]

    def test_the_curvature_is_what_is_expected(self) -> None:
        for net, data in self.networks():
            la = self.fitted(net, data)
            dense = la.curvature.dense()
            self._close(dense, dense.mT, "symmetric")
            smallest = torch.linalg.eigvalsh(dense).min()
            assert smallest > -self.tolerance * dense.abs().max(), f"it has an eigenvalue of {smallest:.3g}"
            want = self.expected(exact_curvature(net, data[0]), la.curvature.layout)
            if want is not None:
                self._close(dense, want, "the curvature")

    def test_the_evidence_is_on_its_side_of_the_exact_one(self) -> None:
        bound = self.structure.bound
        for net, data in self.networks():
            mine = float(self.fitted(net, data).log_evidence())
            exact = float(fit(net, data, "classification", structure="full", prior=0.7, progress=False).log_evidence())
            slack = self.tolerance * abs(exact)
            assert bound not in ("lower", "exact") or mine <= exact + slack, (mine, exact)
            assert bound not in ("upper", "exact") or mine >= exact - slack, (mine, exact)

    def test_batches_do_not_matter(self) -> None:
        for net, (x, y) in self.networks():
            whole = self.fitted(net, (x, y)).curvature.dense()
            batches = list(zip(x.split(7), y.split(7), strict=True))
            self._close(self.fitted(net, batches).curvature.dense(), whole, "a fit on batches")  # type: ignore[arg-type]

    def test_n_data_scales(self) -> None:
        for net, data in self.networks():
            one, three = self.fitted(net, data), self.fitted(net, data, n_data=60)
            self._close(three.curvature.dense(), 3 * one.curvature.dense(), "three times as many data")

    def test_more_data(self) -> None:
        for net, (x, y) in self.networks() if self.updates else ():
            whole = self.fitted(net, (x, y))
            grown = self.fitted(net, (x[:12], y[:12])).update((x[12:], y[12:]))
            self._close(grown.curvature.dense(), whole.curvature.dense(), "an update")
            assert grown.n_data == whole.n_data

    def test_predictions_are_those_of_dense_algebra(self) -> None:
        for net, (x, y) in self.networks():
            la = self.fitted(net, (x, y))
            covariance = torch.linalg.inv(la.posterior.precision.dense())
            j = jacobian(net, x[:4])
            want = torch.einsum("ncp,pq,nkq->nck", j, covariance, j)
            self._close(la.predict(x[:4]).function.covariance, want, "the covariance of outputs")

    def test_samples(self) -> None:
        for net, data in self.networks():
            la = self.fitted(net, data)
            first, second = (la.posterior.sample(3, torch.Generator().manual_seed(1)) for _ in range(2))
            assert first.shape == (3, la.params.size)
            assert torch.equal(first, second)

    def test_tuning(self) -> None:
        """The evidence does not fall by tuning it, and held-out data find a prior too."""
        for net, data in self.networks():
            la = self.fitted(net, data)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the limits of the evidence
                tuned, held = la.tune(method="evidence"), la.tune(data)
            assert float(tuned.log_evidence()) >= float(la.log_evidence()) - 1e-3
            assert math.isfinite(float(held.predict(data[0]).log_prob(data[1]).sum()))

    def test_it_is_saved_and_loaded(self) -> None:
        for net, data in self.networks():
            la = self.fitted(net, data)
            with TemporaryDirectory() as folder:
                la.save(Path(folder) / "file")
                again = load(Path(folder) / "file", net, data=data)
            assert type(again.curvature.structure) is type(la.curvature.structure)
            self._same(again, la, data[0])

    def test_it_is_moved(self) -> None:
        for net, data in self.networks():
            la = self.fitted(net, data)
            self._same(la.to("cpu"), la, data[0])

    def test_it_is_compared(self) -> None:
        for net, data in self.networks():
            la = self.fitted(net, data)
            text = str(compare({"mine": la, "scaled": la.replace(prior=2.0)}, data))
            assert la.curvature.structure.name in text
            assert la.curvature.structure.name in la.summary()

    def test_it_is_found_by_its_name(self) -> None:
        found = resolve_structure(self.structure.name)
        assert type(found) is type(self.structure)

    def _same(self, a: Laplace, b: Laplace, x: Tensor) -> None:
        self._close(a.predict(x).function.variance, b.predict(x).function.variance, "variances")
        self._close(a.log_evidence(), b.log_evidence(), "the evidence")

    def _close(self, got: Tensor, want: Tensor, what: str) -> None:
        error, largest = float((got - want).detach().abs().max()), float(want.detach().abs().max())
        assert error <= self.tolerance * largest, f"{what}: off by {error:.3g}, with entries up to {largest:.3g}"


def jacobian(net: nn.Module, x: Tensor) -> Tensor:
    """∂f/∂θ of each sample by autograd, (n, outputs, P), for a network with outputs (n, outputs)."""
    rows = []
    for sample in x.split(1):
        f = net(sample)[0]
        each = [torch.autograd.grad(out, list(net.parameters()), retain_graph=True) for out in f]
        rows.append(torch.stack([torch.cat([g.reshape(-1) for g in own]) for own in each]))
    return torch.stack(rows)


def exact_curvature(net: nn.Module, x: Tensor) -> Tensor:
    """Σ_n Jᵀ (diag p − p pᵀ) J of a classifier, (P, P): the generalized Gauss–Newton matrix by brute force."""
    j, p = jacobian(net, x), net(x).detach().softmax(-1)
    middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return torch.einsum("ncp,nck,nkq->pq", j, middle, j)
