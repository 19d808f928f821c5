"""Mixtures of experts for few tokens: all chosen experts of a step in one launch a projection, none of them known to the
host. `stack.py` holds the matrices, `step.py` the step, `scale.py` its two small kernels."""
