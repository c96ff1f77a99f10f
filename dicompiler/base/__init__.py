"""Base: what every room stands on and what knows nothing of networks, plans or devices.

In: text, files, numbers. Out: errors of one line, quantities with units, checked documents, files moved in whole.
Here: errors, units, schema (and schemas/), specs (the text of options), atomic, seeded, objectives.
"""
