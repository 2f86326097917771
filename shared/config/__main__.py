"""Print all fields of a recipe as a Markdown table: python -m shared.config."""

from shared.config.recipe import field_table

print(field_table())
