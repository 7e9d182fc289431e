"""Other engines to compare with: scripts for their own environments, and the process that runs one."""
