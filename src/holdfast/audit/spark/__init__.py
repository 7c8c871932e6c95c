"""The steps of a pipeline evaluated again by Spark, for an audit that takes nobody's word for them."""
