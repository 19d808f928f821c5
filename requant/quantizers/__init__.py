"""The quantizers: one file a method, one contract (`registry.Method`). To add one: a file, a registry line, a
test row, a recipe."""
