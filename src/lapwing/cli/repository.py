"""`lapwing bench`: the benchmark beside the peers, which is part of the repository, not of the package."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lapwing.errors import BadData


def run(
    out: Path, *, quick: bool = False, threads: Sequence[int] = (1,), workload: str | None = None,
    operation: str | None = None, ours_only: bool = False, resume: bool = False,
) -> None:  # fmt: skip
    """Run `python -m benchmarks` in the repository that this package, or the current folder, belongs to.

    Example:
        >>> run(Path("bench-output"), quick=True)
    """
    arguments = ["--out", str(out.resolve()), "--threads", *map(str, threads)]
    for name, value in (("--workload", workload), ("--operation", operation)):
        arguments += [name, value] if value else []
    flags = {"--quick": quick, "--ours-only": ours_only, "--resume": resume}
    arguments += [flag for flag, wanted in flags.items() if wanted]
    done = subprocess.run([sys.executable, "-m", "benchmarks", *arguments], cwd=repository())
    if done.returncode:
        raise BadData(f"the benchmark stopped with exit code {done.returncode}; its own message is above")


def repository(start: Path | None = None) -> Path:
    """The nearest folder that holds benchmarks/, from `start`, this file or the current folder upwards."""
    for place in (Path(__file__), Path.cwd()) if start is None else (start,):
        for folder in (place.resolve(), *place.resolve().parents):
            if (folder / "benchmarks" / "__main__.py").exists():
                return folder
    raise BadData(
        "benchmarks and experiments are not part of the installed package: get Lapwing's repository, for "
        "`make bench` or `lapwing reproduce` there"
    )
