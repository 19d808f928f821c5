"""The stages of a run in order (`quantize.py`), the modes `best`, `paper` and `sparse`, the diagnosis and the dry run."""
