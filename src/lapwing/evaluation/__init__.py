"""How good are predictions: evaluation on data, the report, and temperature scaling as the rival to beat."""
