"""Fixtures that every test may use."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder named by LAPWING_DATA; the test is skipped where it is not set or does not exist."""
    folder = os.environ.get("LAPWING_DATA", "")
    if not folder:
        pytest.skip("LAPWING_DATA is not set: name the folder with mnist, cifar10, … to run this test")
    path = Path(folder).resolve()
    if not path.is_dir():
        pytest.skip(f"LAPWING_DATA={folder} is not a folder")
    return path
