"""`pagedcli generate ...` as a worker of a queue that kills itself at LAST: METHOD:WORD:COUNT is before or after the
COUNT-th call of this method of Folder with this word in the name; '-': not at all.

python queue_worker.py LEASE_S LAST CLOCK_OFF_S generate ...
"""

import os
import random
import signal
import sys
import time

from pagedcli.buckets import Folder
from pagedcli.cli import queue as cli_queue
from pagedcli.cli.main import app
from pagedcli.distributed import leases, queue

lease_s, last, clock_off_s, *sys.argv[1:] = sys.argv[1:]
leases.LEASE_S = cli_queue.LEASE_S = float(lease_s)
queue.POLL_S = leases.LEASE_S / 8
right_time = time.time
time.time = lambda: right_time() + float(clock_off_s)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def dying(method, word, count):
    """The method, which ends the process at one of its calls."""
    counted, before = iter(range(count)), random.random() < 0.5

    def call(self, name, *arguments):
        is_last = word in f"{name} {arguments}" and next(counted, None) is None
        if is_last and before:
            die()
        result = method(self, name, *arguments)
        if is_last:
            die()
        return result

    return call


if last != "-":
    name, word, count = last.split(":")
    setattr(Folder, name, dying(getattr(Folder, name), word, int(count)))
app()
