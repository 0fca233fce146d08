"""Starts processes: finds this process's rank, connects the group, starts jax, watches and restarts.

Standard library only; jax is imported inside functions of `connect` and `backend`, once a rank is known.
Entry points: `clusters.discover`, `environment.prepare`, `connect.connect` and `disconnect` for a rank;
`__main__.main` for the supervisor of a host; `heartbeat.report_progress` for code that makes progress.
"""
