"""The small operations of a decoding step, between its matrices: sums with norms, positions, attention, gates.

`rms_norm.py`, `rope_cache.py`, `attention.py`, `gated.py`: a launch each (attention two); `rotated_*.py` with rotations.
"""
