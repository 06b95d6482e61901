"""Products of few rows with large weights: plain, in 12 and 13 bits, coded, in FP8."""
