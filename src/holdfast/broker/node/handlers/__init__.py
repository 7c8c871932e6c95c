"""One request, one file: `kNN_name.py` answers API key NN."""
