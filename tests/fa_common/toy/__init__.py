"""A generation in miniature, for the tests of the compile cache and the kernel report: `x[i] *= scale`."""
