"""The recipes that ship with requant: next to the package in a wheel, in `recipes/` in a checkout."""

from pathlib import Path

RECIPES = (Path(__file__).parents[1] / "recipes", Path(__file__).parents[2] / "recipes")


def available_recipes() -> dict[str, Path]:
    """Name -> file of every recipe that ships with requant."""
    return {
        file.stem: file for folder in RECIPES if folder.is_dir() for file in sorted(folder.glob("*.yaml"))
    }
