"""Scores of models on data, and the report about them."""
