"""Compares plait with its peers on the same weights, checked against each other before the clock starts."""
