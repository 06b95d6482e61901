"""Attention over pages and tails: dense, compressed, sparse and by segments; who sees what."""
