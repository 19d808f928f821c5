"""The package's version, for those whom the package itself imports."""

VERSION = "0.1.0"
