"""Alarms: rules over a run's metrics that report a problem, its possible cause, and what to do."""
