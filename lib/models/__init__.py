"""Models: the two circuits in four parametrisations, and the architectures of the experiments."""
