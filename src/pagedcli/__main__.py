"""The console script, and `python -m pagedcli`."""

from pagedcli import interrupt


def run() -> None:
    """Run the command line. Ctrl-C gets its handler before anything else is imported."""
    interrupt.install()
    from pagedcli.cli.main import run as run_command

    run_command()


if __name__ == "__main__":
    run()
