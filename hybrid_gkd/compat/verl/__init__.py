"""verl: the spellings of its commands."""
