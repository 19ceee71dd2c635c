"""Arrays in, arrays out: one folder an operation, the reference beside the fast code."""
