"""A checkpoint at work: matrices as the kernels read them, tokens one after another, and how fast.

| file | what |
| --- | --- |
| `serving.py` | every quantized matrix of a loaded model in the kernels' layout |
| `kernel_check.py` | a kernel against the floats of the checkpoint before it is trusted |
| `decoding.py`, `static_cache.py` | steps of one token, captured as a CUDA graph, and their cache |
| `attention.py` | the kernels' attention of a step, where asked for |
| `throughput.py` | `requant bench` |
"""
