"""A run on several hosts of a cluster: scripts or manifests for the cluster's scheduler, and starting, showing and
ending the run."""
