"""The kernels and their launchers, which take and return only tensors and plain numbers."""
