"""From the data a user gives to batches on the devices."""
