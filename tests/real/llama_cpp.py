"""llama.cpp, as the package cyllama carries it: token ids, and greedy continuations."""

import pytest


class LlamaCpp:
    """A GGUF file in llama.cpp on the CPU; the test is skipped where cyllama is not installed."""

    def __init__(self, path, num_threads=2):
        library = pytest.importorskip("cyllama.llama.llama_cpp", reason="make test-real installs cyllama")

        class Model(library.LlamaModel):
            n_vocab = property(lambda model: model.get_vocab().n_vocab)  # which its get_logits_ith asks for

        library.disable_logging()
        library.llama_backend_init()
        library.ggml_backend_load_all()
        model_params, params = library.LlamaModelParams(), library.LlamaContextParams()
        model_params.n_gpu_layers = 0
        params.n_ctx, params.n_batch, params.n_threads, params.n_threads_batch = 2048, 2048, num_threads, num_threads
        self._library, self._params = library, params
        self._model = Model(str(path), model_params)
        self._vocab = self._model.get_vocab()

    def tokenize(self, text):
        """Token ids, with the BOS that the file asks for."""
        return list(self._vocab.tokenize(text, True, True))

    def greedy(self, ids, count):
        """The likeliest token after ids, after that one, and so on: `count` of them."""
        context = self._library.LlamaContext(self._model, self._params)
        found, new, start = [], list(ids), 0
        while True:
            batch = self._library.LlamaBatch(n_tokens=len(new), embd=0, n_seq_max=1)
            for place, token_id in enumerate(new):
                batch.add(token_id, start + place, [0], place == len(new) - 1)
            context.decode(batch)
            logits = context.get_logits_ith(len(new) - 1)
            found.append(max(range(len(logits)), key=logits.__getitem__))
            if len(found) == count:
                return found
            new, start = found[-1:], start + len(new)
