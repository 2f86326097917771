"""A run on several hosts: the scripts or manifests of a cluster's own scheduler, and what starts, shows and ends it."""
