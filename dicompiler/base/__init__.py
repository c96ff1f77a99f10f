"""Utilities without any knowledge of models, plans or devices: errors, units, schemas, option specs, atomic output."""
