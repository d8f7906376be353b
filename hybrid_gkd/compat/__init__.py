"""What reaches into the private parts of other libraries."""
