"""Running a task by its name: resolving recipe, model and data, planning its GPUs, and starting it."""
