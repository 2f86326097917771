"""The display in a terminal during a run."""
