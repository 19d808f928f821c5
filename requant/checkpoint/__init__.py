"""The checkpoint: a Hugging Face folder with packed matrices (format.md is its specification). Header, validation, sizes,
reading and writing. Saving takes a model; all else takes files alone."""
