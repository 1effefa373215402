"""Costs are known before memory is taken: what does not fit is refused with numbers and alternatives."""

import threading
import time

import pytest
import torch
from torch import nn

import lapwing
from lapwing import LowRank
from tests.laplace.small import STRUCTURES, X, batches, fit, seeded


class PeakMemory:
    """Growth of the resident set while the block runs, in bytes, as a thread sees it."""

    def __enter__(self) -> "PeakMemory":
        self.start = self.peak = self._resident()
        self._on = True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._on = False
        self._thread.join()

    @property
    def growth(self) -> int:
        return self.peak - self.start

    def _watch(self) -> None:
        while self._on:
            self.peak = max(self.peak, self._resident())
            time.sleep(0.002)

    @staticmethod
    def _resident() -> int:
        try:
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096
        except OSError:
            pytest.skip("the resident set is read from /proc")


@pytest.mark.parametrize("structure", STRUCTURES)
def test_too_large_is_said_in_bytes_with_alternatives(structure: str) -> None:
    with pytest.raises(lapwing.TooLarge, match=rf"structure='{structure}' for 38 weights needs .* MB") as error:
        fit(structure=structure, memory=1)
    assert "memory=" in str(error.value)
    assert "last_layer" in str(error.value)


def test_too_large_is_known_before_memory_is_taken() -> None:
    wide = nn.Sequential(nn.Linear(3, 4000), nn.Tanh(), nn.Linear(4000, 3))  # 28,003 weights: 3.1 GB in float32
    fit(wide, structure="diag")  # what torch itself allocates at first use
    with (
        PeakMemory() as memory,
        pytest.raises(lapwing.TooLarge, match=r"28,003 weights needs .*18\.8 GB.* 1 GB") as error,
    ):
        fit(wide, structure="full", memory=10**9)
    assert memory.growth < 2 * 10**8
    for cheaper in ("ekfac", "kron", "diag"):
        assert f"structure='{cheaper}' (" in str(error.value)


def test_auto_stays_in_the_budget() -> None:
    wide = nn.Sequential(nn.Linear(3, 400), nn.Tanh(), nn.Linear(400, 3))
    assert fit(wide).curvature.structure.name == "functional"  # few data: all their rows are less than any matrix
    assert fit(wide, data=list(batches()) * 30).curvature.structure.name == "ekfac"
    assert fit(wide, data=iter(batches())).curvature.structure.name == "kron"
    small = fit(wide, memory=10**6)
    assert small.curvature.structure.name == "diag"
    assert "memory budget" in small.summary()


def test_the_exact_factor_says_when_directions_are_too_many() -> None:
    words = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 300))
    ids, targets = torch.arange(16).reshape(2, 8) % 9, torch.arange(16).reshape(2, 8)
    with pytest.raises(lapwing.TooLarge, match=r"2,400 output directions .*factor='mc'"):
        fit(words, [(ids, targets)], structure="kron")
    la = fit(words, [(ids, targets)], structure="kron", factor="auto")
    assert "Monte Carlo Fisher, because" in la.summary()


def test_covariances_that_do_not_fit_are_refused() -> None:
    la = fit(structure="kron", memory=20_000)
    with pytest.raises(lapwing.TooLarge, match=r"joint covariance .* GB.*\.function\.variance"):
        _ = la.predict(X, joint=True).function.covariance
    assert la.predict(X).function.variance.shape == (24, 3)
    wide = fit(nn.Linear(3, 3000), batches(y=torch.arange(24)), structure="diag", factor="mc")
    with pytest.raises(lapwing.TooLarge, match=r"\.variance, \.sample\(n\)"):
        wide.posterior.covariance(memory=10**8)


def test_rows_of_a_low_rank_stay_in_the_budget() -> None:
    """One batch has 256 · 10 rows of 28,170 weights, 290 MB in float32; the budget is 100 MB."""
    model = nn.Sequential(nn.Linear(64, 376), nn.Tanh(), nn.Linear(376, 10))
    x = torch.randn(256, 64, generator=seeded())
    y = torch.arange(256) % 10
    fit(model, [(x[:4], y[:4])], structure="diag")
    with PeakMemory() as memory:
        fit(model, [(x, y)], structure=LowRank(5), memory=100_000_000)
    assert memory.growth < 150_000_000
