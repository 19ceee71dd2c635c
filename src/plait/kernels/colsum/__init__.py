"""Sums over the rows of a matrix: the gradient of a bias."""
