"""What `holdfast dump-log` reads: any file of a log directory as a stream of events. The broker never imports it."""
