"""What every part of the pipeline shares: the text of SQL, and the lineage of rows. It imports no other part."""
