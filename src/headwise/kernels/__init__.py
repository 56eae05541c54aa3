"""The kernels and their launchers, nothing else: tensors and plain numbers in, tensors out."""
