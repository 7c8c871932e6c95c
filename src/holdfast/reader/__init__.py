"""Raw record batches of any Kafka, decoded to Arrow without a Python object per record."""
