"""How good are the predictions: metrics, plots and the report."""
