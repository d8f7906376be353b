"""Before and after training: check, assemble, train, stop."""
