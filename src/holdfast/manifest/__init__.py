"""What a data directory holds, by name and digest: the manifest that `graduate` and `backup` stand on."""
