"""The log of one partition on disk, through the `FileSystem` seam only."""
