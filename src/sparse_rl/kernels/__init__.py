"""Small pieces of arithmetic on tensors, each with a plain torch reference. They know nothing of models or policies."""
