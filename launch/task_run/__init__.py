"""A task by its name: what it is made of, how it is laid out over GPUs, and how it is started."""
