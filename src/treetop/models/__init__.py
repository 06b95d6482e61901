"""Target and draft models as plain functions of their arguments, and the loader that checks every tensor."""
