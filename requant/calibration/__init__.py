"""Statistics of every linear layer, collected by running calibration text through the model.

`stats.py` defines them (`LinearStats`), one file computes each, and `collect.py` collects those that a method needs."""
