"""The meter sees a known allocation, also when malloc could reuse freed memory."""

import sys
import time

import pytest
import torch

from lapwing.evaluation.meter import measure

CPU = torch.device("cpu")


def test_seconds() -> None:
    result, cost = measure(lambda: time.sleep(0.05) or 7, CPU)
    assert result == 7
    assert 0.05 <= cost.seconds < 1


@pytest.mark.skipif(sys.platform != "linux", reason="exact only where the high-water mark can be reset")
def test_peak_is_that_of_the_call_and_not_of_earlier_ones() -> None:
    def allocate(megabytes: int) -> int:
        return int(torch.ones(megabytes * 2**20, dtype=torch.uint8)[-1])

    allocate(300)
    for megabytes in (100, 20, 100):
        _, cost = measure(lambda: allocate(megabytes), CPU)  # noqa: B023
        assert cost.peak_bytes / 2**20 == pytest.approx(megabytes, rel=0.3)
