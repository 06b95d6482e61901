"""The version and the distribution's name, in a module that imports nothing."""

__version__ = "0.2.0"

DISTRIBUTION = "treetop-llm"
"""What `pip` knows this package by; `treetop` there is somebody else's. It is imported and run as `treetop`."""
