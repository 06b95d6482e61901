"""The one attention contract: every query sees the committed prefix and the part of a dense tail its mask shows.

A backend implements `prefix` and `causal`; the tail and the merge are shared. See `contract.py`.
"""
