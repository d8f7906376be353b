"""What is known of answers before they are learned from: rewards, reference, values."""
