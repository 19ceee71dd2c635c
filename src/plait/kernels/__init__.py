"""Arrays in, arrays out: one folder per operation, the reference beside the fast code."""
