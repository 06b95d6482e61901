"""Bodies of requests: their fields, and what is read from them."""
