"""A run's recipe: what a TOML file, the environment and the command line may set."""

from shared.config.recipe import ConfigError, Recipe, load_recipe

__all__ = ["ConfigError", "Recipe", "load_recipe"]
