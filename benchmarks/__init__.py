"""Experiments: each prints a table of what it measured, then its bars, and fails if one is missed."""
