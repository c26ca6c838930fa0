"""The `shoal` command: the one-host stack and the tools that talk to a running one."""
