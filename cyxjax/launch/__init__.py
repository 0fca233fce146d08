"""How processes come to be: find this process's place, meet the others, start jax, watch, end, start again.

Standard library only; jax is imported inside functions of `connect` and `backend`, once a place is known.
Ways in: `clusters.discover`, `environment.prepare`, `connect.connect` and `disconnect` for a rank;
`__main__.main` for the supervisor of a host; `heartbeat.report_progress` for whoever makes progress.
"""
