"""Knowledge distillation: everything that is not a code learns from the original model.

`loop.py` is the training loop, `loss.py` what it minimizes and `trainables.py` what it changes; `step.py` is one step and
`blockwise.py` a step that needs less memory (`memory.py` says how much), of blocks that `recomputed_block.py` runs and
`block_call.py` calls; `reparametrized.py` and `scaled_rows.py` are coded weights as functions of what learns,
`weight_stack.py` those of experts, `teacher.py` provides the original's logits, `compile_blocks.py` the fused blocks on a
GPU, `final.py` is the last phase, `recovery.py` the training of 2:4 weights.
"""
