"""The forms of `scripts/soak.py`, and what they share."""
