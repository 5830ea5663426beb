"""Reports on a run: the records that it leaves on disk, and what a reader is shown."""
