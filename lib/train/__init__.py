"""Training: loops over ensembles of models and the optimiser groups of the circuits."""
