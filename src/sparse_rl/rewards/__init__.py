"""Rewards: built-in and user functions that grade responses, called in killable worker processes. Imports no torch."""
