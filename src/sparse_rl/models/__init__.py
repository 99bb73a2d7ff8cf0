"""Models: loading, saving and the embedded model `tiny`."""
