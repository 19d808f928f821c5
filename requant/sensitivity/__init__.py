"""One score a weight: gradient, Hessian diagonal, PQI. `path.py` holds the line from original to quantized weights."""
