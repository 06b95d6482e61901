"""Targets: a file a family, parameters declared once, and the loader that checks every tensor."""
