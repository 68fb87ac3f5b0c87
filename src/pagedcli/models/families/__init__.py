"""The native families: what each has other than Llama or another one, a file for each sort, and their registry."""
