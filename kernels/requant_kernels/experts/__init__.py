"""Mixtures of experts: all chosen experts in one launch per projection, none of them known to the host. `stack.py` holds the
matrices, `step.py` multiplies few tokens, `prefill.py` prompts in the order of `route.py`; `scale.py` finishes both."""
