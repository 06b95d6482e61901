"""Device memory and the phases of a step. The engine never allocates a page and never sees text."""
