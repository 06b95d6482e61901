"""Tensor operations, one family a file. Pure functions; no model, no cache and no request is known here."""
