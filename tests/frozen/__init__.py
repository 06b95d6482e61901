"""The frozen suite: what treetop does, seen from outside. See README.md beside this file."""
