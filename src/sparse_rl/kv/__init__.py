"""What is kept: the bounded storage, who is evicted and when. This room knows no model."""
