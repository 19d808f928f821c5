"""Sensitivity: one score per weight, by gradient, Hessian diagonal or post-quantization integral (PQI).

`path.py` holds the line from the original to the quantized weights and the table of scores; `scores.py` finds them by
name.
"""
