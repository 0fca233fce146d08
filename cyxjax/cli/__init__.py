"""The subcommands of `cyxjax`, one file each."""
