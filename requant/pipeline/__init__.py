"""The stages of a run in order (`quantize.py`), the modes `best`, `paper` and `sparse`, and the diagnosis; `planning/` says
before a run what it will take."""
