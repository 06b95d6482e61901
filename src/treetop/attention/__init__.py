"""The one attention contract: every query sees the committed prefix and the part of a dense tail its mask shows.

A backend implements `prefix_tail` and `causal`. See `contract.py`.
"""
