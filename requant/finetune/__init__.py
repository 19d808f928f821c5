"""Knowledge distillation of everything that is not a code from the original model.

`loop.py` is the training loop, `step.py` one step and `blockwise.py` one in less memory (`memory.py` says how much),
`teacher.py` the original's logits, `compile_blocks.py` the fused blocks on a GPU, `final.py` the last phase, `recovery.py`
the training of 2:4 weights."""
