"""What a response is worth: built-in and user functions, called in processes that can be killed. Imports no torch."""
