"""Where the processes of a job find each other: one meeting place, one protocol, who is here."""
