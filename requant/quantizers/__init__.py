"""The quantizers: one file per method, one contract (`method.Method`). To add one: a file, a line in the registry, a test
row, a recipe.
"""
