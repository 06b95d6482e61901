"""Formats of weights: how numbers are stored, how they lie in memory, how products are taken with them."""
