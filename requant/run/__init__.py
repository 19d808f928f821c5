"""One run: its context, the cache of finished stages it resumes from, and the loop over its matrices."""
