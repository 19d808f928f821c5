"""A run from end to end: `quantize.py` has the order of its stages, `best.py`, `paper.py` and `sparse.py` are its modes.
`preparation/` opens and checks what a run needs, `planning/` says what it will take; neither imports what runs."""
