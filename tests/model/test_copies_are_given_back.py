"""A thread's private copies are given back after errors, interruptions and generators that nobody finishes."""

import weakref

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing.model import copies

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


class Fails(nn.Module):
    """Raises whatever it is told to at its n-th call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if WHAT:
            raise WHAT[0]
        return self.layer(x)


WHAT: list[BaseException] = []


def held() -> int:
    return len(copies._IN_USE.__dict__.get("copies", {}))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("a"), RuntimeError("b")])
def test_after_an_error_in_a_pass(error: BaseException) -> None:
    la = lapwing.fit(Fails(), (X, Y), "classification", structure="diag")
    WHAT.append(error)
    try:
        with pytest.raises((type(error), lapwing.LapwingError)):
            la.predict(X).probs  # noqa: B018
    finally:
        WHAT.clear()
    assert held() == 0


def test_rows_that_nobody_reads_to_the_end() -> None:
    """A traceback may keep a generator alive for ever; the next pass must not run the copy that it was using."""
    la = lapwing.fit(nn.Sequential(nn.Linear(4, 3)), (X, Y), "classification", structure="diag")
    rows = la._predictive.linearized(X).jacobians(X)
    next(rows)
    assert held() == 0
    assert sum(len(at.f) for at, _ in rows) == len(X) - 4


def test_an_interruption_while_the_copy_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(dict):
        def __setitem__(self, key: object, value: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(copies, "_SOURCES", Interrupted())
    with pytest.raises(KeyboardInterrupt), copies.private(nn.Linear(4, 3)):
        pass
    assert held() == 0


class Cycle(nn.Module):
    """Refers to itself by a hook, so that reference counts alone do not free its copies."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("large", torch.zeros(2**23))  # 32 MB
        self.layer.register_forward_hook(self.look)

    def look(self, *_: object) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_copies_with_cycles_do_not_pile_up() -> None:
    module, alive = Cycle(), []
    for _ in range(20):
        with copies.private(module) as own:
            alive.append(weakref.ref(own))
        del own
    assert sum(each() is not None for each in alive) <= 6
