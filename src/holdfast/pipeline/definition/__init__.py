"""What a pipeline is, as plain values; read from YAML or built in Python."""
