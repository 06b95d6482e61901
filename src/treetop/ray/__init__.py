"""Replicas behind Ray Serve: the only package that knows Ray."""
