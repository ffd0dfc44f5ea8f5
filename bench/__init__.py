"""Benches: one module per operation, each only cases and formulas; `bench.harness` does the rest."""
