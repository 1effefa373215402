"""The environment of the peers, made when it is missing or holds other versions than `peers.txt`."""

import subprocess
import sys
from pathlib import Path

from benchmarks.cell import ROOT

EXTRAS = ("pillow", "matplotlib", "transformers", "pytest", "pytest-xdist", "scipy")
ASK = "from importlib.metadata import version; import sys; print(*(version(name) for name in sys.argv[1:]))"


def peers(folder: Path = ROOT / ".venv-peers", pins: Path = ROOT / "benchmarks" / "peers.txt") -> str:
    """The interpreter of an environment with the pinned peers."""
    python = folder / "bin" / "python"
    wanted = pinned(pins.read_text())
    if installed(python, [*wanted, *EXTRAS[:3]])[: len(wanted)] == list(wanted.values()):
        return str(python)
    print(f"making {folder.name} with {', '.join(f'{k} {v}' for k, v in list(wanted.items())[:2])} …", flush=True)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), "-e", str(ROOT), *EXTRAS], check=True)
    subprocess.run([*pip, "--no-deps", "-r", str(pins)], check=True)
    return str(python)


def pinned(text: str) -> dict[str, str]:
    """name → version of the lines `name==version`."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return dict(line.split("==") for line in lines if line)


def installed(python: Path, names: list[str]) -> list[str]:
    """The versions that an interpreter has; none where one is missing."""
    if not python.exists():
        return []
    done = subprocess.run([str(python), "-c", ASK, *names], capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else []
