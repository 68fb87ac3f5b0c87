"""The process that renders chat templates within bounds on time and memory; see batch.chat_template.

It imports neither torch nor the engine. Its standard input and output are pipes from and to ChatRenderer.
"""

import os
import pickle
import resource
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def main() -> None:
    """Answer requests until the pipe is closed. A request that takes too long ends the process with SIGALRM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reads, writes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # A library that prints would spoil the answers.
    from transformers import PreTrainedTokenizerBase

    _limit_memory(int(sys.argv[1]))
    while True:
        try:
            messages, arguments, special_tokens, seconds, max_characters = pickle.load(reads)
        except EOFError:
            return
        tokenizer: Any = SimpleNamespace(
            special_tokens_map=special_tokens, get_chat_template=lambda template, tools: template
        )
        signal.setitimer(signal.ITIMER_REAL, seconds)
        kind = b"t"
        try:
            text: Any = PreTrainedTokenizerBase.apply_chat_template(tokenizer, messages, tokenize=False, **arguments)
            if len(text) > max_characters:
                kind, text = b"l", ""
        except MemoryError:
            kind, text = b"m", ""
        except Exception as error:  # the template is a program of others
            kind, text = b"e", str(error) or type(error).__name__
        signal.setitimer(signal.ITIMER_REAL, 0)
        content = text.encode("utf-8", "surrogatepass")
        writes.write(kind + len(content).to_bytes(8, "little") + content)
        writes.flush()


def _limit_memory(num_bytes: int) -> None:
    """Let allocations beyond `num_bytes` more than now fail. Systems without /proc have no such limit."""
    try:
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return
    limit = num_pages * resource.getpagesize() + num_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
