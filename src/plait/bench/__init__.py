"""Compares plait with its peers on the same weights; results are compared before anything is timed."""
