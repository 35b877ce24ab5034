"""What `lanes.py` needs for rounds of many devices at once."""
