"""The planner: candidates, pruning, programs, search, and the Plan that explains itself."""
