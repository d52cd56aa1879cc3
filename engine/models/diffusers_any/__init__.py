"""Pipelines that no family serves, called as a whole."""
