"""A run, written down: the schema with every default, YAML in and out, and command-line options to a recipe."""
