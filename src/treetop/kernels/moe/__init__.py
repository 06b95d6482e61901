"""Experts: which a token goes to, and the products with them."""
