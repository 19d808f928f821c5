"""A checkpoint at work: load it, convert its matrices to the kernels' layouts, check each kernel, write tokens."""
