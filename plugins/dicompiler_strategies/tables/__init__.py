"""Tables: the choices of every layer, what each would hold and send, and what they cost, for strategies that search.

In: a Problem. Out: choices (parts on named devices), footprints, and cost tables as numpy arrays.
"""
