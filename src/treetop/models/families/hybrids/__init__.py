"""Families with recurrent layers of other kinds than gated delta nets."""
