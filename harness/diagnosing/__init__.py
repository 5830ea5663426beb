"""What else a kernel computes, or where it goes wrong: what the commands `identify` and `stages` do."""
