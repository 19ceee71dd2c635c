"""Arrays in, arrays out: one folder per operation, the reference next to the fast code."""
