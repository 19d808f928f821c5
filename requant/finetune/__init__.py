"""Training of everything that is not a code, against the original model's outputs: the loop, one step, the compiled blocks,
the teacher's states, and the last phase with all codes fixed."""
