"""Several processes: one manager of processes, engine processes, their clients, and ranks that share a model."""
