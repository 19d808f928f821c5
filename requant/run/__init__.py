"""One run: its context, the workspace of finished stages it resumes from, and the loop over its matrices."""
