"""Groups of ranks: how one rank's tensors come to the others. `types/parallel.py` says what a model sees of it."""
