"""The package's version, for modules that the package itself imports."""

VERSION = "0.1.0"
