"""Rules over a run's metrics that say when something is wrong, why it may be, and what to do."""
