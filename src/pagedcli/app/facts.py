"""What is known about one sequence or one block, for its page. Used by the application of trace and replay."""

from rich.text import Text

from pagedcli.printable import one_line, plural
from pagedcli.show.panels import block_ids_text
from pagedcli.trace.records import SeqState
from pagedcli.views.moment import Moment


def sequence_facts(moment: Moment, seq: SeqState) -> Text:
    """Tokens, waiting and blocks of a sequence, and with whom it shares them."""
    state, blocks = moment.state, set(seq.held_block_ids)
    shared = [
        other.seq_id for other in state.running() if other is not seq and not blocks.isdisjoint(other.block_table)
    ]
    ended = f" ({seq.finish_reason})" if seq.finish_reason else ""
    lines = [
        f"request    {one_line(seq.label)}, sample {seq.sample_index}: {seq.status}{ended}",
        f"prompt     {plural(seq.num_prompt_tokens, 'token')}; the last lookup found {seq.num_cached_tokens:,} cached",
        f"generated  {seq.num_output_tokens:,} of at most {plural(seq.max_new_tokens, 'token')}",
        f"waited     {plural(seq.num_steps_waited(state.step_number), 'step')}",
        f"preempted  {plural(seq.num_preemptions, 'time')}, "
        f"{plural(seq.num_recomputed_tokens, 'token')} computed again",
        f"blocks     {len(seq.held_block_ids):,}: {block_ids_text(state, seq.block_table) or 'none'}",
    ]
    if state.engine is not None and any(state.engine.windows):
        passed = f"{plural(seq.num_passed_blocks, 'block')} that no later token sees"
        lines.append(
            f"window     {passed}; one table for all layers would hold {plural(len(seq.block_table), 'block')}"
        )
    if shared:
        lines.append(f"shared     with seq {', '.join(map(str, shared))}")
    return Text("\n".join(lines))


def block_facts(moment: Moment, block_id: int) -> Text:
    """Who holds a block, and its content."""
    state = moment.state
    content, filler = state.hashes[block_id], state.filler_seq_ids[block_id]
    holders = []
    for seq in state.running():
        if block_id in seq.block_table:
            place = seq.block_table.index(block_id) // state.num_groups
            holders.append(f"seq {seq.seq_id} (request {one_line(seq.label)}) as its block {place}")
    lines = [f"held by    {', '.join(holders) or 'nobody'}"]
    if content is None:
        lines.append("content    none that a lookup could find")
    else:
        lines.append(f"content    {content:016x}, filled by seq {filler}")
        found = state.hash_to_block_id.get(content)
        if found != block_id:
            lines.append(f"           block {found} has the same content, and lookups find that one")
    return Text("\n".join(lines))
