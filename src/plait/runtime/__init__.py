"""The runtime: binds a plan to a graph and carries it out under torch autograd."""
