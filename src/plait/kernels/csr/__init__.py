"""The graph as kernels read it on a device: CSR arrays and the order in which rows are worked off."""
