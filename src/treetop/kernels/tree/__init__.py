"""Draft trees: growing, choosing, accepting, and what a round leaves in rows and pages."""
