"""Products of few rows with large weights: plain, in 12 bits, coded, in FP8."""
