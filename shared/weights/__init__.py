"""What engines and learner agree on about parameters: names, layout, checksums."""
