"""Driver: from a model to an artifact (`compile`), and the use of an artifact (run, install, verify)."""
