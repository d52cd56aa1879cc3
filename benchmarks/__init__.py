"""Measurements, each printing a table and a ratio against a baseline of the same run. Never part of the tests."""
