"""Whether the prefix cache of a running OpenAI-compatible server tells the truth, asked from outside.

Used by `pagedcli audit`. Torch-free, and independent of our own engine: all it knows of the server are its answers.
"""
