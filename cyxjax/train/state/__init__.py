"""Where training stands, for whoever asks in the middle of it."""
