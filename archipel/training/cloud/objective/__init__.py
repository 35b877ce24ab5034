"""What a training minimizes, and what it measures."""
