"""The families of models that Pronk trains: everything in which a family differs from the others is in its own folder.

A family is a folder with a subclass of `ModelFamily`, which registry.py enters under config.json's `model_type`.
Nothing else compares a model type or a family's name. Code that needs torch is in separate modules of that folder,
which are imported only when a model is built.
"""
