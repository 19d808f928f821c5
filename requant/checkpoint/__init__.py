"""The checkpoint: a Hugging Face folder with packed matrices (format.md is its specification). Header, validation, sizes,
reading and writing; nothing here knows a model."""
