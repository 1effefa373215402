"""Tests mirror the package; shared pieces are imported as `tests.<folder>.<module>`."""
