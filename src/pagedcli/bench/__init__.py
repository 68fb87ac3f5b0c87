"""Workloads, measurements and the floor that a machine sets: what `pagedcli bench` shows. Knows no terminal."""
