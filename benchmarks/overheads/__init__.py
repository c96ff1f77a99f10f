"""The figures of benchmarks/overhead.py, one module for each."""
