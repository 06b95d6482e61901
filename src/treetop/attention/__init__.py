"""The one attention contract: every query sees the committed prefix and the part of a dense tail its mask shows.

A backend implements `begin`, `plan`, `prefix_tail` and `causal`. See `contract.py`.
"""
