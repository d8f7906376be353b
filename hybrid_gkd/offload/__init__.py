"""What is on the device in which phase of a step, and the host copies of what is not."""
