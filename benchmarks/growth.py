"""How time and memory grow, beside what the FLOP count says, and whether that meets the targets."""

from collections.abc import Sequence
from itertools import pairwise
from math import log

from benchmarks.cell import Outcome

Point = tuple[str, float, Outcome]
FLAT = 1.2  # memory at the largest N over that at the smallest
SLACK = 0.1  # an exponent may exceed the FLOP count's by so much
EIGH = 9  # d³ times this is a symmetric eigendecomposition with vectors (Golub and Van Loan, section 8.3)


def slope(sizes: Sequence[float], values: Sequence[float]) -> float | None:
    """The exponent of a power law through the points, by least squares in logarithms."""
    pairs = [(log(x), log(y)) for x, y in zip(sizes, values) if x > 0 and y > 0]
    if len(pairs) < 2:
        return None
    mx, my = (sum(part) / len(pairs) for part in zip(*pairs))
    spread = sum((x - mx) ** 2 for x, _ in pairs)
    return sum((x - mx) * (y - my) for x, y in pairs) / spread if spread else None


def mlp_flops(width: int, n: int, operation: str, directions: int = 9) -> float:
    """FLOPs of a fit on the MLP 784-width-width-10: forward, one backward a direction, and what the structure adds."""
    layers = list(pairwise((784, width, width, 10)))
    forward = 2 * n * sum(i * o for i, o in layers)
    backward = 2 * n * directions * sum(i * o for i, o in layers[1:])
    if operation == "fit-diag":
        return forward + backward + 2 * n * directions * sum((i + 1) * o for i, o in layers)
    moments = sum(2 * n * (i + 1) ** 2 + 2 * n * directions * o**2 for i, o in layers)
    return forward + backward + moments + EIGH * sum((i + 1) ** 3 + o**3 for i, o in layers)


def findings(points: Sequence[Point]) -> list[str]:
    """One sentence for each curve of ours."""
    found = []
    for axis in ("N", "width"):
        for name in dict.fromkeys(outcome.cell.operation for _, _, outcome in points):
            curve = [(x, o) for a, x, o in points if a == axis and o.cell.operation == name and not o.ours.error]
            if len(curve) > 1:
                found += along_data(name, curve) if axis == "N" else along_width(name, curve)
    return found


def along_data(name: str, curve: Sequence[tuple[float, Outcome]]) -> list[str]:
    first, last = curve[0], curve[-1]
    exponent = slope([x for x, _ in curve], [o.ours.seconds or 0.0 for _, o in curve]) or 0.0
    ratio = (last[1].ours.peak or 0) / max(1, first[1].ours.peak or 0)
    return [
        f"{name}, LeNet-5: memory at N = {last[0]:,.0f} is {ratio:.2f} × the memory at N = {first[0]:,.0f} "
        f"(target: at most {FLAT} ×, {_word(ratio <= FLAT)}).",
        f"{name}, LeNet-5: time grows as N^{exponent:.2f} "
        f"(target: exponent at most {1 + SLACK:g}, {_word(exponent <= 1 + SLACK)}).",
    ]


def along_width(name: str, curve: Sequence[tuple[float, Outcome]]) -> list[str]:
    widths = [x for x, _ in curve]
    exponent = slope(widths, [o.ours.seconds or 0.0 for _, o in curve]) or 0.0
    counted = slope(widths, [mlp_flops(int(x), o.cell.n, name) for x, o in curve]) or 0.0
    return [
        f"{name}, MLP: time grows as width^{exponent:.2f}, the FLOP count as width^{counted:.2f} "
        f"(target: no faster than the count, {_word(exponent <= counted + SLACK)})."
    ]


def _word(reached: bool) -> str:
    return "reached" if reached else "missed"
