"""Small tensor operations, each with a plain torch reference. They do not depend on models or policies."""
