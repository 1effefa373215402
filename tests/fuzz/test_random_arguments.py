"""Random networks called with names in any order and with arguments that are no tensors, batch by batch others."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lapwing

from ..zoo import oracle
from ..zoo.cases import assert_same
from .networks import Network, networks
from .test_random_networks import HALVES, MORE

IGNORED = -100


class Told(nn.Module):
    """A drawn network whose inputs and outputs depend on further arguments."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.drawn = network.build()

    def forward(self, x: Tensor, other: Tensor | None = None, mode: str = "plain", gain: Any = 1.0) -> Tensor:
        x = x if other is None else x + 0.5 * torch.sin(other)
        f = self.drawn({"plain": lambda: x, "flipped": lambda: x.flip(-1), "squared": lambda: x.square()}[mode]())
        return f * (sum(gain) if isinstance(gain, (list, tuple)) else gain)


gains = st.sampled_from([0.5, 2, (0.5, 0.2, 0.1), [1.0, 0.5, 0.3], torch.tensor(1.5).double()])


@st.composite
def batches(draw: Any, network: Network) -> list[dict[str, Any]]:
    """Batches of a few samples with their names in any order; `labels` that are ignored let samples wait for others."""
    generator = torch.Generator().manual_seed(network.seed)
    made, others = [], draw(st.sampled_from([[False], [True], [False, True]]))
    for size in draw(st.lists(st.sampled_from([2, 4, 5, 1]), min_size=3, max_size=5)):
        batch: dict[str, Any] = {"x": torch.randn(size, *network.start, generator=generator, dtype=torch.float64)}
        if draw(st.sampled_from(others)):
            batch["other"] = torch.randn(size, *network.start, generator=generator, dtype=torch.float64)
        if draw(st.booleans()):
            batch["mode"] = draw(st.sampled_from(["plain", "flipped", "squared"]))
        if draw(st.booleans()):
            batch["gain"] = draw(gains)
        batch["labels"] = None
        made.append({name: batch[name] for name in draw(st.permutations(list(batch)))})
    return made


def one(batch: dict[str, Any], k: int) -> dict[str, Any]:
    """The arguments of sample k alone."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return {name: v[k : k + 1] if isinstance(v, Tensor) and v.ndim else v for name, v in inputs.items()}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of a first layer, to those who watch it
@pytest.mark.parametrize("half", range(HALVES))
def test_random_arguments(half: int) -> None:
    @settings(
        max_examples=MORE or 12,
        derandomize=not MORE,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(st.data())
    def run(data: Any) -> None:
        network = data.draw(networks())
        assume(network.seed % HALVES == half)
        check(network, data.draw(batches(network)))

    run()


def check(network: Network, data: list[dict[str, Any]]) -> None:
    module = Told(network)
    assume(0 < sum(p.numel() for p in module.parameters()) <= 300)
    jacobians, hessians = [], []
    for batch in data:
        alone = [one(batch, k) for k in range(len(batch["x"]))]
        f = torch.cat([oracle.call(module, inputs).detach() for inputs in alone])
        assume(f.shape[1:].numel() <= 9)
        labels = f.argmin(-1)
        labels[1:] = IGNORED  # the first sample of each batch waits for its like of others
        batch["labels"] = labels
        rows = [jacobian_of(module, inputs) for inputs in alone]
        counted = (labels != IGNORED).reshape(len(f), -1).repeat_interleave(f.shape[-1], 1)
        hessian = oracle.hessian_categorical(f)
        jacobians.append(torch.cat(rows))
        hessians.append(hessian * (counted[:, :, None] & counted[:, None, :]))
    exact = oracle.ggn(torch.cat(jacobians), torch.cat(hessians))
    assume(exact.abs().max() > 1e-8)
    for structure, expected in {"full": exact, "diag": exact.diag().diag()}.items():
        la = lapwing.fit(module, data, "classification", structure=structure, factor=lapwing.GGN(tolerance=0.0))
        assert_same(la.curvature.dense(), expected, 10 * network.rtol, structure)
    last = data[-1]
    found = la.predict(last).function.mean
    assert_same(found, torch.cat([oracle.call(module, one(last, k)).detach() for k in range(len(found))]), 1e-10, "f")


def jacobian_of(module: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Rows (1, outputs, P) of one sample, one call of autograd each."""
    weights = [p for p in module.parameters() if p.requires_grad]
    rows = []
    for value in oracle.call(module, inputs).flatten():
        parts = torch.autograd.grad(value, weights, retain_graph=True, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)[None]
