"""Where the processes of a job meet: one server, one protocol, one policy for jobs of any size."""
