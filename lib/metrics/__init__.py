"""Metrics: what is measured on a pattern, a prediction, a trajectory."""
