"""`python -m pagedcli`."""

from pagedcli.cli.main import run

if __name__ == "__main__":
    run()
