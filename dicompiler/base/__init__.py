"""Utilities without knowledge of models, plans or devices: errors, units, schemas, atomic output."""
