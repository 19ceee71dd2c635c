"""Sums of messages that are known functions of both ends of an edge, column by column; their gradients."""
