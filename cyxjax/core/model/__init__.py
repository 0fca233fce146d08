"""Models as plain functions, and wrappers around them: statistics, recomputation, adapters."""
