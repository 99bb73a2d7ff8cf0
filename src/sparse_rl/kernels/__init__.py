"""Small tensor operations, each with a plain torch reference. They know nothing of models or policies."""
