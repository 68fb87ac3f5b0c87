"""Prompt lookup of OpenVINO GenAI, for guesses_right.py, which runs this with a Python that has openvino_genai.

Reads JSON from stdin: the folder of the model as IR, rows of token ids with their max_tokens, and the most guesses of a
step. Writes JSON to the file that is its argument: the tokens of each row, and how many each of its steps gave. The
library says only in its log which share of a step's guesses was right: "Request_id: 0 ||| 100 50".
"""

import json
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

given = json.load(sys.stdin)
scheduler = openvino_genai.SchedulerConfig()
scheduler.cache_size, scheduler.enable_prefix_caching = 1, False
pipeline = openvino_genai.LLMPipeline(
    given["model"], "CPU", scheduler_config=scheduler, prompt_lookup=True, INFERENCE_PRECISION_HINT="f32",
    KV_CACHE_PRECISION="f32",
)  # fmt: skip
found = []
for row in given["rows"]:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample = row["max_tokens"], False
    config.num_assistant_tokens, config.max_ngram_size = given["most"], 4
    ids = np.array([row["ids"]], dtype=np.int64)
    inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    print("row", flush=True)
    result = pipeline.generate(inputs, config)
    sizes = [int(size) for size in result.perf_metrics.raw_metrics.m_batch_sizes]
    found.append({"token_ids": [int(token) for token in result.tokens[0]], "sizes": sizes})
Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
