"""What differs between versions of other libraries, and what reaches into them."""
