"""What learns once matrices have codes: the loop against the original's outputs, a step, and the floats beside the codes.

| file | what |
| --- | --- |
| `loop.py` | minimize the KL divergence to the original over everything that is not code |
| `step.py` | one step of Adam, on a GPU a replay of CUDA graphs |
| `fusing.py` | blocks and the divergence, compiled on a GPU |
| `learnable.py` | the floats of a matrix, and the weight as a function of them |
| `tuning.py` | `--tune`: all codes fixed |

Mode `best` (`requant/best.py`) alternates between codes and the loop.
"""
