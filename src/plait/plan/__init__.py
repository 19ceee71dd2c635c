"""What: candidates, pruning, search, and the Plan that explains itself."""
