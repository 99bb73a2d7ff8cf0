"""Models: loading, saving, and the embedded `tiny`."""
