"""One run: its context, the workspace of finished stages from which it resumes, and the loop over its matrices."""
