"""GLM-4.1V and GLM-4.6V-Flash."""
