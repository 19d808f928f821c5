"""The stages of a run in order (`quantize.py`), the modes `best` and `paper`, the diagnosis and the dry run."""
