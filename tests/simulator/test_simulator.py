"""The simulator finds nothing in the program as it is, and five planted faults within a minute each."""

import math
from collections import Counter
from unittest import mock

import pytest
from simulator.scenario import run_seed

from pagedcli.batch import journal
from pagedcli.core.block_manager import BlockManager
from pagedcli.core.scheduler import Scheduler
from pagedcli.distributed.parts import PartFolder
from pagedcli.errors import PagedcliError, TraceError


def run_seeds(seeds, *given):
    for seed in seeds:
        run_seed(seed, *given)


def test_fifteen_scenarios_without_a_violation(tmp_path):
    counts = Counter()
    run_seeds(range(15), tmp_path, counts)
    assert min(counts[what] for what in ("kills", "power cuts", "torn writes", "full disks", "interrupts")) > 0


def lose_fsyncs():
    return mock.patch.object(journal, "_SYNC_EVERY_S", math.inf)


def free_twice():
    deallocate = BlockManager.deallocate

    def twice(self, seq):
        table = list(seq.block_table)
        freed = deallocate(self, seq)
        if self.num_free_blocks < 3:
            seq.block_table = table
            deallocate(self, seq)
        return freed

    return mock.patch.object(BlockManager, "deallocate", twice)


def skip_preemptions():
    return mock.patch.object(Scheduler, "_preempt_one", lambda self, victim, for_seq, work: self.running.remove(victim))


def write_rows_twice():
    rows = journal.Journal.rows

    def twice(self, order):
        for index, row in rows(self, order):
            yield index, row
            if index == 3:
                yield index, row

    return mock.patch.object(journal.Journal, "rows", twice)


def overlook_dead_workers():
    def is_begun(self, number):
        return self.part(number).exists() or journal.journal_path(self.part(number)).exists()

    return mock.patch.object(PartFolder, "is_done", is_begun)


@pytest.mark.parametrize(
    ("plant", "first", "said"),
    [
        (lose_fsyncs, 7, "rows were safe"),
        (free_twice, 2, "."),
        (skip_preemptions, 1, "."),
        (write_rows_twice, 0, "rows of"),
        (overlook_dead_workers, 7, "."),
    ],
)
def test_a_planted_fault_is_found(tmp_path, plant, first, said):
    """`first`: the first seed that finds it, so that the others need not run; one of 300, where scenarios change."""
    with pytest.raises((AssertionError, PagedcliError, TraceError), match=said):
        run_seeds(range(first, 300), tmp_path, Counter(), plant)
