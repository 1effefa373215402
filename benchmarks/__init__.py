"""Lapwing beside its peers: time in gradient epochs, peak memory, agreement of results."""
