"""Posteriors as files."""
