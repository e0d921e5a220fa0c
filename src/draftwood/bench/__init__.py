"""Measurements, each with a table for people and one JSON line."""
