"""The ranks of one host: started, watched, stopped, started again."""
