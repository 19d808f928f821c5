"""The small operations of a decoding step, between its matrices: residual sums with norms, RoPE, attention, gates.

`rms_norm.py`, `rope_cache.py`, `attention.py`, `gated.py`: one launch each (attention two); `rotated_*.py` adds rotations.
"""
