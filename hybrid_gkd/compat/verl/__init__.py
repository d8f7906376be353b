"""Translation of verl's configuration keys and values."""
