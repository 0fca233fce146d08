"""Models as four plain functions, and wrappers around them: statistics, recomputation, adapters."""
