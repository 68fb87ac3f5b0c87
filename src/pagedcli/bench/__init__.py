"""Workloads, measurements and the machine's floor for `pagedcli bench`. Independent of the terminal."""
