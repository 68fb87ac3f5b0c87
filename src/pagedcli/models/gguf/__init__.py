"""GGUF files, as llama.cpp, Ollama and LM Studio use them: header -> ModelSpec, tensors -> weights."""
