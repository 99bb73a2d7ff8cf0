"""Rewards: built-in and user functions that grade responses, called in processes that can be killed. Imports no torch."""
