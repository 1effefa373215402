"""How coarse probabilities by forward-mode draws are: `python -m benchmarks.draws resnet20`.

Differences of `predict(x, link="jvp", samples=...)` from the closed form's, on average and at most, over new inputs.
"""

import argparse

from benchmarks import ours
from benchmarks.operations import operation
from benchmarks.workloads import WORKLOADS

DRAWS = (8, 16, 32, 64, 128)


def main() -> None:
    top = argparse.ArgumentParser(prog="python -m benchmarks.draws", description=__doc__)
    top.add_argument("workload", nargs="+", choices=WORKLOADS)
    top.add_argument("--n", type=int, default=256, help="data to fit")
    top.add_argument("--m", type=int, default=64, help="inputs to predict")
    options = top.parse_args()
    for name in options.workload:
        task = WORKLOADS[name](options.n, options.m)
        la = ours.fit(task, operation("fit-kron"))
        exact = la.predict(task.new).probs
        for draws in DRAWS:
            off = (la.predict(task.new, link="jvp", samples=draws).probs - exact).abs()
            print(
                f"{name}: {draws} draws, {float(off.mean()):.3f} on average, {float(off.max()):.2f} at most", flush=True
            )


if __name__ == "__main__":
    main()
